"""`sft`: policy, text, training, checkpoint. Every part is skipped where the run folder or the cache has it already."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config import SftConfig
from bebop.errors import ConfigError
from bebop.monitor import check_wandb, write_summary
from bebop.policies import prepare_policy
from bebop.sft.job import Job
from bebop.sft.launch import launch
from bebop.sft.training_sequences import prepare_text
from bebop.store.files import cache_home
from bebop.store.run_folder import read_json

log = logging.getLogger(__name__)
JOB, RESULT, CHECKPOINT = "sft_job.json", "sft_result.json", "checkpoint"


@dataclass(frozen=True)
class SftResult:
    """checkpoint: Hugging Face directory of the policy with its trained heads. summary: what summary.json holds."""

    checkpoint: Path
    summary: dict[str, Any]


def run(config: SftConfig, run_dir: Path) -> SftResult:
    """Train heads as `config` says, in `run_dir`; a folder with unfinished training goes on from its last checkpoint.

    Raises ConfigError before any model loads, SftError where training fails.
    """
    check_temperatures(config)
    check_wandb(config.logger.wandb)
    run_dir = run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = run_dir / CHECKPOINT
    started = time.monotonic()
    times: dict[str, float] = {}
    if not (run_dir / RESULT).exists():
        policy_dir = prepare_policy(config.model, config.seed)
        times["policy_s"] = time.monotonic() - started
        text_dir, _ = prepare_text(config, policy_dir, cache_home())
        times["text_s"] = time.monotonic() - started - times["policy_s"]
        train(config, policy_dir, text_dir, run_dir)
        times["train_s"] = time.monotonic() - started - times["policy_s"] - times["text_s"]
    else:
        _refuse_other_config(config, run_dir)
        log.info("sft: %s is finished", run_dir)
    summary = {**read_json(run_dir / RESULT), **{name: round(value, 1) for name, value in times.items()}}
    write_summary(run_dir, summary)
    print(describe(summary), flush=True)
    return SftResult(checkpoint, summary)


def train(config: SftConfig, policy_dir: Path, text_dir: Path, run_dir: Path) -> None:
    """Train on the text set in `text_dir` and write run_dir/checkpoint; in processes of its own."""
    job = Job(config=config, policy_dir=policy_dir, text_dir=text_dir, run_dir=run_dir)
    (run_dir / JOB).write_text(job.model_dump_json(indent=1))
    launch(run_dir / JOB, run_dir, config.sft.num_processes)


def _refuse_other_config(config: SftConfig, run_dir: Path) -> None:
    before = Job.model_validate_json((run_dir / JOB).read_text()).config
    for section in ("model", "data", "loss", "sft", "seed"):
        if getattr(before, section) != getattr(config, section):
            raise ConfigError(f"run_dir={run_dir}: holds heads trained with another {section}; choose another run_dir")


def check_temperatures(config: SftConfig) -> None:
    """Raise ConfigError where loss and rollouts differ in temperature: acceptance is scored at the text's own."""
    if config.loss.temperature != config.rollout.temperature:
        raise ConfigError(
            f"loss.temperature={config.loss.temperature} with rollout.temperature={config.rollout.temperature}: the "
            "text is sampled at the latter and acceptance is scored on it; set both to the same value"
        )


def describe(summary: dict[str, Any]) -> str:
    """The result as a few lines for the terminal."""
    accepted = ", ".join(f"{value:.3f}" for value in summary["conditional"])
    return (
        f"heads: loss {summary['loss']}, depth {summary['mtp_depth']}, {summary['steps']} steps\n"
        f"held-out acceptance length {summary['acceptance_length']:.3f} "
        f"(before {summary['acceptance_length_before']:.3f}), rejection sampling at T = {summary['temperature']:g}; "
        f"conditional per depth {accepted}\n"
        f"checkpoint {summary['checkpoint']}"
    )
