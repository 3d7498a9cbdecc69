"""Where a step's record goes: metrics.jsonl, trained_prompts.jsonl, Weights & Biases, and one line on the console."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from bebop.monitor import JsonlSink, WandbSink
from bebop.records import StepRecord

TRAINED = "trained_prompts.jsonl"


class Sinks:
    """Open for one process's share of a run; `resumed_from` is the step of the checkpoint it started from."""

    console: TextIO = sys.stdout  # the caller's terminal; set by bebop.rl.trainer.process

    def __init__(self, run_dir: Path, bebop: Any, trainer: Any, *, resumed_from: int) -> None:
        forget_after(run_dir / "metrics.jsonl", resumed_from, kind="step")
        forget_after(run_dir / TRAINED, resumed_from)
        self.jsonl = JsonlSink(run_dir)
        self.prompts = (run_dir / TRAINED).open("a", buffering=1)
        self.wandb = WandbSink(bebop.wandb, trainer.project_name, trainer.experiment_name, run_dir)
        self._started, self._first = time.monotonic(), resumed_from

    def step(self, record: StepRecord, prompt_ids: list[str], *, total: int) -> None:
        """Write one step; `total` is the run's number of steps, for the time left."""
        self.jsonl.write(record)
        self.prompts.write(json.dumps({"step": record.step, "prompt_ids": prompt_ids}) + "\n")
        self.wandb.write(record)
        each = (time.monotonic() - self._started) / max(1, record.step - self._first)
        print(line_of(record, total, left_s=each * (total - record.step)), file=self.console, flush=True)

    def close(self) -> None:
        self.jsonl.close()
        self.prompts.close()
        with contextlib.redirect_stderr(self.console):
            self.wandb.close()


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


def forget_after(path: Path, step: int, kind: str | None = None) -> None:
    """Drop the lines of steps whose update a killed run lost: those after the checkpoint it resumes from."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by the kill
        if (kind is None or record.get("kind") == kind) and record.get("step", 0) > step:
            continue
        kept.append(line if line.endswith("\n") else line + "\n")
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(kept))
    os.replace(part, path)
