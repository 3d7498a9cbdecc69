"""`run`: one GRPO run in its own processes, from its config to its summary.

All processes that verl, Ray and vLLM start have the run folder in their environment (bebop.processes.RUN_ENV). If a run
is killed or its engine dies, the processes that remain are found by that mark and ended; no others are touched.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bebop.config import GrpoConfig
from bebop.data.prompts import TOO_LONG
from bebop.data.tokenizer import load_tokenizer
from bebop.engines import check_policy
from bebop.errors import ConfigError, RlError
from bebop.monitor import summarise, write_report
from bebop.processes import ErrorFile, child_environment, end_marked
from bebop.rl import checkpoints
from bebop.rl.environment import ENGINE_LOG, run_environment
from bebop.rl.prompts import prompts_that_fit, write_parquet
from bebop.rl.verl.config import Policy, compose, save
from bebop.store.files import check_room, folder_size, read_json
from bebop.store.metrics import JsonlSink, read_records
from bebop.store.run_folder import owned, write_summary

ERROR, LOG, PROGRESS = "error.json", "grpo.log", "progress.log"
log = logging.getLogger(__name__)
LOOK_S = 0.2  # how often the trainer's lines are shown
ENDING_S = 15.0  # time for processes to end by themselves before they are killed


def run(config: GrpoConfig, run_dir: Path, *, policy_dir: Path | None = None) -> dict[str, Any]:
    """Train the policy in `policy_dir` (default: the one that `config.model` names) and return the summary.

    If run_dir has a complete checkpoint, the run resumes from it. Raises ConfigError before anything starts, and
    RlError with the reason in its first line if the run ends early.
    """
    import torch

    run_dir = Path(run_dir).resolve()
    num_gpus = torch.cuda.device_count()
    if torch.version.cuda is not None and not num_gpus:
        raise ConfigError("torch is built for GPUs and sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    with owned(run_dir):
        return _run(config, run_dir, policy_dir, num_gpus)


def _run(config: GrpoConfig, run_dir: Path, policy_dir: Path | None, num_gpus: int) -> dict[str, Any]:
    if policy_dir is None:
        from bebop.policies import prepare_policy

        policy_dir = prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    started = time.monotonic()
    checkpoints.discard_incomplete(run_dir)
    step = checkpoints.latest(run_dir)
    resume_from = checkpoints.verl_dir(run_dir, step) if step else None
    policy = Policy.read(Path(policy_dir).resolve())
    check_policy(config.rollout, policy.path)
    composed = compose(config, policy, run_dir, num_gpus=num_gpus, resume_from=resume_from)
    save(composed, run_dir / "verl.yaml")
    left_out = _write_prompts(config, policy.path, run_dir)
    _note_entropy_range(policy.path, run_dir)
    if step is None or step < config.grpo.steps:
        # at least the policy's directory, its parameters, and AdamW's two moments
        check_room(run_dir, 4 * folder_size(policy.path), "a checkpoint")
        _train(run_dir, run_environment(run_dir, on_cpu=num_gpus == 0))
    last = checkpoints.latest(run_dir)
    result = {
        **summarise(run_dir),
        "left_out": {TOO_LONG: left_out} if left_out else {},
        "checkpoint": str(checkpoints.policy_dir(run_dir, last)) if last else None,
        "elapsed_s": round(time.monotonic() - started, 1),
    }
    write_summary(run_dir, result)
    write_report(run_dir)
    return result


def _write_prompts(config: GrpoConfig, policy_dir: Path, run_dir: Path) -> int:
    """Write the run's prompts; returns how many were too long and left out."""
    number, limit = config.grpo.steps * config.grpo.prompts_per_step, config.data.max_prompt_tokens
    prompts, left_out = prompts_that_fit(config.data.tasks, number, config.seed, load_tokenizer(policy_dir), limit)
    if left_out:
        log.warning("grpo: %d prompts are longer than data.max_prompt_tokens=%d and were left out", left_out, limit)
    write_parquet(prompts, run_dir / "prompts.parquet")
    return left_out


def _train(run_dir: Path, env: dict[str, str]) -> None:
    """Run the trainer's process and show its lines; no process of the run remains, however it ends."""
    failure = ErrorFile(run_dir / ERROR)
    failure.clear()
    (run_dir / ENGINE_LOG).touch()
    (run_dir / PROGRESS).write_text("")
    command = [sys.executable, "-m", "bebop.rl.trainer.process", str(run_dir)]
    started = time.monotonic()
    with (run_dir / LOG).open("a") as output, (run_dir / PROGRESS).open() as progress:
        process = subprocess.Popen(
            command, env=env | child_environment(run_dir), stdout=output, stderr=output, start_new_session=True
        )
        try:
            while (code := process.poll()) is None:
                time.sleep(LOOK_S)
                for line in progress:
                    print(f"[grpo {time.monotonic() - started:5.1f} s] {line}", end="", flush=True)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
        finally:
            end_marked(run_dir, grace_s=ENDING_S if process.poll() == 0 else 2.0)
    if code != 0:
        raise RlError(failure.message(code, f"in {run_dir / LOG}", pick=lambda message: reason(message, run_dir / LOG)))


def reason(message: str, log: Path) -> str:
    """An error's own line; for a dead engine its cause, which vLLM writes only to the log."""
    line = told(message)
    if "EngineDeadError" in line and log.is_file():
        died = [text for text in log.read_text(errors="replace").splitlines() if "(EngineCore pid=" in text]
        named = [found[1] for text in died if (found := re.search(r"\] (\w+(?:\.\w+)*(?:Error|Exception): .+)$", text))]
        if named:
            return f"vLLM's engine died: {named[-1]}"
    return line


def told(message: str) -> str:
    """An error's own line: its first, or if Ray wrapped a worker's error, the last of its traceback."""
    lines = message.splitlines() or ["an error without a message"]
    if "ray::" not in lines[0]:
        return lines[0]
    named = [line for line in lines[1:] if re.match(r"(\w+\.)*\w+: \S", line)]
    return named[-1] if named else lines[-1].strip()


def _note_entropy_range(policy_dir: Path, run_dir: Path) -> None:
    """Record the range of entropies that the heads were trained on, for the monitor's decision."""
    file = policy_dir / "bebop.json"
    known = read_json(file).get("entropy_range")
    if known and not read_records(run_dir, "monitor"):
        with JsonlSink(run_dir) as sink:
            sink.write({"kind": "monitor", "entropy_range": known, "from": str(file)})
