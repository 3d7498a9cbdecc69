"""Real GRPO runs in processes of their own: how tests start them, wait for them, and look for what they leave."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bebop.config import RolloutSection
from bebop.engines import make_engine
from bebop.monitor import read_steps
from bebop.mtp import checkpoint_checksums
from bebop.processes import marked
from bebop.records import Sampling, StepRecord
from bebop.rl import checkpoints

START_UP_S = 400.0
REWARD = Path(__file__).parents[2] / "recipes" / "families" / "reward.py"
RUN = """
import json, sys
from pathlib import Path
from bebop.config import check
from bebop.rl import run
values, run_dir, policy = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
print(json.dumps(run(check("grpo", values), run_dir, policy_dir=policy), default=str))
"""


def config(mode: str, *, rollout: Mapping[str, Any] | None = None, verl: tuple[str, ...] = (), **grpo: Any) -> dict:
    """A small run with a reward that any policy gets some of. rollout, grpo: more keys of these sections."""
    return {
        "model": {"name": "tiny"},
        "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 96, "max_response_tokens": 48},
        "rollout": {
            **{"max_model_len": 160, "max_num_seqs": 16, "kv_cache_gib": 0.25, "temperature": 0.9},
            **(rollout or {}),
        },
        "trainer": {"mode": mode},
        "logger": {"wandb": "disabled"},
        "grpo": {
            **{"prompts_per_step": 4, "group_size": 4, "lr": 1e-3, "adam_eps": 1e-3},
            "verl_overrides": [f"reward.custom_reward_function.path='{REWARD}'", *verl],
            **grpo,
        },
    }


def start(values: Mapping[str, Any], run_dir: Path, policy: Path) -> subprocess.Popen:
    words = [sys.executable, "-c", RUN, json.dumps(values), str(run_dir), str(policy)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen, timeout_s: float = START_UP_S) -> str:
    """Output of a run that must end well, and by itself."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    wait_for(process, run_dir, f"step {step}", lambda: len(read_steps(run_dir)) >= step)


def wait_for_phase(process: subprocess.Popen, run_dir: Path, phase: str) -> None:
    progress = run_dir / "progress.log"
    wait_for(process, run_dir, phase, lambda: progress.exists() and phase in progress.read_text())


def wait_for(process: subprocess.Popen, run_dir: Path, what: str, happened: Any) -> None:
    deadline = time.monotonic() + START_UP_S
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no {what}: {process.communicate()[0]}\n{(run_dir / 'grpo.log').read_text()[-4000:]}")
        time.sleep(0.1)


def no_process_left(run_dir: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while marked(run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not marked(run_dir)


def listening(run_dir: Path) -> set[tuple[str, str]]:
    """(process, address) of every socket on which a process of the run waits for connections."""
    found = set()
    for pid in marked(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((" ".join(process.cmdline())[:60], connection.laddr.ip))
    return found


def check_served(records: list[StepRecord], steps: int, *, rounding: float = 1e-5) -> None:
    """What every healthy run shows: each step logged, the trainer's weights served, frozen heads frozen.

    rounding: largest difference of probabilities between engine and trainer that float32 explains.
    """
    assert [record.step for record in records] == list(range(1, steps + 1))
    for record in records:
        assert record.heads_checksum_engine == record.heads_checksum_trainer
        assert record.probs_diff_max is None or record.probs_diff_max <= rounding
        assert record.counts.num_drafts > 0 and record.acceptance_length > 1
    assert len({record.backbone_checksum for record in records}) == steps  # the policy moved at every step
    assert len({record.heads_checksum_engine for record in records}) == 1  # its frozen heads did not


def check_checkpoint(run_dir: Path, policy: Path, step: int) -> None:
    """The last checkpoint is what the engine served last, loads in vLLM and transformers, and kept its heads."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    saved, last = checkpoints.policy_dir(run_dir, step), read_steps(run_dir)[-1]
    held = checkpoint_checksums(saved)
    assert (held.backbone, held.heads) == (last.backbone_checksum, last.heads_checksum_engine)
    assert load_file(saved / "model.safetensors").keys() == load_file(policy / "model.safetensors").keys()
    prompt, rollout = [7, 8, 9], RolloutSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=0.25)
    with make_engine(rollout, saved, seed=0, dtype="float32") as engine:
        (answer,) = engine.generate([prompt], Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer.token_ids)
