"""`sft`: policy, training sequences, training, checkpoint. Skips parts that are in the run folder or the cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config import RolloutSection, SftConfig
from bebop.data.rows import check_given, told
from bebop.policies import prepare_policy
from bebop.sft.job import Job
from bebop.sft.launch import launch
from bebop.sft.training_sequences import prepare_text
from bebop.store.files import cache_home, check_room, folder_size, read_json, write_text
from bebop.store.run_folder import owned, refuse_changes, write_summary
from bebop.store.wandb import check_wandb

log = logging.getLogger(__name__)
JOB, RESULT, CHECKPOINT = "sft_job.json", "sft_result.json", "checkpoint"
# keys in which a resumed run may differ
FREE = (
    *("run_dir", "logger", "sft.eval_every", "sft.save_every"),
    *(f"rollout.{key}" for key in RolloutSection.model_fields if key != "temperature"),
)


@dataclass(frozen=True)
class SftResult:
    """checkpoint: Hugging Face directory of the policy with its trained heads. summary: content of summary.json."""

    checkpoint: Path
    summary: dict[str, Any]


def run(config: SftConfig, run_dir: Path) -> SftResult:
    """Train heads as `config` says, in `run_dir`; unfinished training there resumes from its last checkpoint.

    Raises ConfigError or DiskError before any model loads, SftError if training fails.
    """
    check_wandb(config.logger.wandb)
    check_given(config.data.path)
    run_dir = run_dir.resolve()
    with owned(run_dir):
        times = _run(config, run_dir)
        summary = {**read_json(run_dir / RESULT), **{name: round(value, 1) for name, value in times.items()}}
        write_summary(run_dir, summary)
    print(describe(summary), flush=True)
    return SftResult(run_dir / CHECKPOINT, summary)


def _run(config: SftConfig, run_dir: Path) -> dict[str, float]:
    """Do the parts that are not done yet; returns the seconds of each part."""
    if before := read_json(run_dir / JOB):
        refuse_changes(run_dir, before["config"], config.model_dump(mode="json"), free=FREE)
    if (run_dir / RESULT).exists():
        log.info("sft: %s is finished", run_dir)
        return {}
    times: dict[str, float] = {}
    started = time.monotonic()
    policy_dir = prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    times["policy_s"] = time.monotonic() - started
    check_room(run_dir, folder_size(policy_dir), "a copy of the policy")
    text_dir, _ = prepare_text(config, policy_dir, cache_home())
    times["text_s"] = time.monotonic() - started - times["policy_s"]
    train(config, policy_dir, text_dir, run_dir)
    times["train_s"] = time.monotonic() - started - times["policy_s"] - times["text_s"]
    return times


def train(config: SftConfig, policy_dir: Path, text_dir: Path, run_dir: Path) -> None:
    """Train on the training sequences in `text_dir`, in separate processes, and write run_dir/checkpoint."""
    job = Job(config=config, policy_dir=policy_dir, text_dir=text_dir, run_dir=run_dir)
    write_text(run_dir / JOB, job.model_dump_json(indent=1))
    launch(run_dir / JOB, run_dir, config.sft.num_processes)


def describe(summary: dict[str, Any]) -> str:
    """The result as a few lines for the terminal."""
    accepted = ", ".join(f"{value:.3f}" for value in summary["conditional"])
    left_out = f"left out: {told(summary['left_out'])}\n" if summary.get("left_out") else ""
    return (
        f"heads: loss {summary['loss']}, depth {summary['mtp_depth']}, {summary['steps']} steps\n"
        f"held-out acceptance length {summary['acceptance_length']:.3f} "
        f"(before {summary['acceptance_length_before']:.3f}), rejection sampling at T = {summary['temperature']:g}; "
        f"conditional per depth {accepted}\n"
        f"{left_out}checkpoint {summary['checkpoint']}"
    )
