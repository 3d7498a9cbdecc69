"""`run`: one GRPO run in processes of its own, from its config to its summary.

Everything that verl, Ray and vLLM start carries the run folder in its environment, so that whatever a run leaves behind
(it was killed, its engine died) is found and ended, and nothing else is touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.config import GrpoConfig
from bebop.data.prompts import make_prompts
from bebop.engines import check_policy
from bebop.errors import ConfigError, RlError
from bebop.monitor import JsonlSink, read_records, summarise, write_report, write_summary
from bebop.rl import checkpoints
from bebop.rl.environment import ENGINE_LOG, PARENT_ENV, RUN_ENV, run_environment
from bebop.rl.prompts import write_parquet
from bebop.rl.verl.config import Policy, compose, save

HOLD = ".hold"  # its lock is held by the process that runs `run`; the trainer has one of its own
ENDING_S = 15.0  # for processes to end by themselves before they are killed


def run(config: GrpoConfig, run_dir: Path, *, policy_dir: Path | None = None) -> dict[str, Any]:
    """Train the policy in `policy_dir` (default: the one that `config.model` names) and return the summary.

    A run_dir with a complete checkpoint is resumed from it. Raises ConfigError before anything starts, RlError with the
    reason in its first line when the run ends early.
    """
    import torch

    run_dir = Path(run_dir).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    num_gpus = torch.cuda.device_count()
    if torch.version.cuda is not None and not num_gpus:
        raise ConfigError("torch is built for GPUs and sees none (nvidia-smi, CUDA_VISIBLE_DEVICES); grpo won't guess")
    with only_run_of(run_dir):
        return _run(config, run_dir, policy_dir, num_gpus)


@contextmanager
def only_run_of(run_dir: Path) -> Iterator[None]:
    """Hold a run folder. Raises RlError where another process does: it would be killed for a leftover of this run."""
    with open(run_dir / HOLD, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RlError(f"run_dir={run_dir}: another process trains there; wait for it or choose another") from None
        yield


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
    _write_prompts(config, run_dir)
    _note_entropy_range(policy.path, run_dir)
    if step is None or step < config.grpo.steps:
        _train(run_dir, run_environment(run_dir, on_cpu=num_gpus == 0))
    last = checkpoints.latest(run_dir)
    result = {
        **summarise(run_dir),
        "checkpoint": str(checkpoints.policy_dir(run_dir, last)) if last else None,
        "elapsed_s": round(time.monotonic() - started, 1),
    }
    write_summary(run_dir, result)
    write_report(run_dir)
    return result


def _write_prompts(config: GrpoConfig, run_dir: Path) -> None:
    number = config.grpo.steps * config.grpo.prompts_per_step
    prompts = make_prompts(config.data.tasks, number, config.seed, "rl", solutions=False)
    write_parquet(prompts, run_dir / "prompts.parquet")


def _train(run_dir: Path, env: dict[str, str]) -> None:
    """Run the trainer's process; whatever happens, no process of the run is left."""
    (run_dir / "error.json").unlink(missing_ok=True)
    (run_dir / ENGINE_LOG).touch()
    end_processes(run_dir, grace_s=0)
    env = {**env, PARENT_ENV: str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-m", "bebop.rl.trainer.process", str(run_dir)], env=env, start_new_session=True
    )
    try:
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        raise
    finally:
        end_processes(run_dir, grace_s=ENDING_S if process.poll() == 0 else 2.0)
    if code != 0:
        raise RlError(_reason(run_dir, code))


def _reason(run_dir: Path, code: int) -> str:
    file = run_dir / "error.json"
    if file.exists():
        message = json.loads(file.read_text())["message"]
        return f"{told(message)} (details in {file}, all output in {run_dir / 'grpo.log'})"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the trainer's process ended with {how}; its output is in {run_dir / 'grpo.log'}"


def told(message: str) -> str:
    """An error's own line: its first, or the one that ends the traceback with which Ray brings a worker's error."""
    lines = message.splitlines() or ["an error without a message"]
    if "ray::" not in lines[0]:
        return lines[0]
    named = [line for line in lines[1:] if re.match(r"(\w+\.)*\w+: \S", line)]
    return named[-1] if named else lines[-1].strip()


def end_processes(run_dir: Path, *, grace_s: float) -> int:
    """End every process that carries this run folder in its environment; returns how many had to be killed."""
    deadline = time.monotonic() + grace_s
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    killed = len(left)
    while left := processes_of(run_dir):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    return killed


def processes_of(run_dir: Path) -> list[int]:
    """Process ids whose environment names this run folder, this process and the finished ones left out."""
    mark = f"{RUN_ENV}={run_dir}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _note_entropy_range(policy_dir: Path, run_dir: Path) -> None:
    """Leave the range of entropies that the heads were trained on for the monitor's decision."""
    file = policy_dir / "bebop.json"
    known = json.loads(file.read_text()).get("entropy_range") if file.exists() else None
    if known and not read_records(run_dir, "monitor"):
        with JsonlSink(run_dir) as sink:
            sink.write({"kind": "monitor", "entropy_range": known, "from": str(file)})
