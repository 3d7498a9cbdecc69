"""Where a step's record goes: the run's sinks, trained_prompts.jsonl, and one line for the user."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from bebop.config import Logger
from bebop.records import StepRecord
from bebop.rl.stage import PROGRESS
from bebop.store import sinks
from bebop.store.metrics import METRICS, drop_steps_after

TRAINED = "trained_prompts.jsonl"


class Console:
    """Lines for the user: printed, among verl's own output, and in run_dir/progress.log, which `bebop grpo` shows."""

    def __init__(self, run_dir: Path) -> None:
        self.file = (run_dir / PROGRESS).open("a", buffering=1)

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.file.write(text + "\n")


class Sinks:
    """Open from a start of the run to its end; `resumed_from` is the step of the checkpoint it started from."""

    def __init__(self, run_dir: Path, bebop: Any, trainer: Any, console: Console, *, resumed_from: int) -> None:
        drop_steps_after(run_dir / METRICS, resumed_from, kind="step")
        drop_steps_after(run_dir / TRAINED, resumed_from)
        logger = Logger(wandb=bebop.wandb, project=trainer.project_name, name=trainer.experiment_name)
        self.sinks = sinks.Sinks(logger, run_dir)
        self.prompts = (run_dir / TRAINED).open("a", buffering=1)
        self.console = console
        self._started, self._first = time.monotonic(), resumed_from

    def step(self, record: StepRecord, prompt_ids: list[str], *, total: int) -> None:
        """Write one step; `total` is the run's number of steps, for the time left."""
        self.sinks.write_step(record)
        self.prompts.write(json.dumps({"step": record.step, "prompt_ids": prompt_ids}) + "\n")
        each = (time.monotonic() - self._started) / max(1, record.step - self._first)
        self.console.say(line_of(record, total, left_s=each * (total - record.step)))

    def close(self) -> None:
        self.prompts.close()
        with contextlib.redirect_stderr(self.console.file):  # wandb writes there how to upload the run
            self.sinks.close()


def line_of(record: StepRecord, total: int, *, left_s: float) -> str:
    """One step in one line."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"step {record.step:3d}/{total}  reward {number(record.reward_mean, 3)}  "
        f"entropy {number(record.entropy_nats, 3)} nats  AL {number(record.acceptance_length, 2)}  "
        f"tokens {number(record.response_length_mean, 0)}  stale {number(record.staleness_max, 0)}  "
        f"{number(record.tokens_per_s, 0)} tok/s  {number(record.step_s, 1)} s  (left {left_s:.0f} s)"
    )
