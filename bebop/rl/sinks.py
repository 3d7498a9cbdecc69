"""Where a step's record goes: metrics.jsonl, trained_prompts.jsonl, Weights & Biases, one line on the console."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bebop.monitor import JsonlSink
from bebop.records import StepRecord

TRAINED = "trained_prompts.jsonl"


class Sinks:
    """Open for one process's share of a run; `resumed_from` is the step of the checkpoint it started from."""

    def __init__(self, run_dir: Path, bebop: Any, config: Any, *, resumed_from: int) -> None:
        self.run_dir = run_dir
        forget_after(run_dir / "metrics.jsonl", resumed_from, kind="step")
        forget_after(run_dir / TRAINED, resumed_from)
        self.jsonl = JsonlSink(run_dir)
        self.prompts = open(run_dir / TRAINED, "a", buffering=1)  # noqa: SIM115: closed by close()

    def step(self, record: StepRecord, prompt_ids: list[str], *, total: int) -> None:
        self.jsonl.write(record)
        self.prompts.write(json.dumps({"step": record.step, "prompt_ids": prompt_ids}) + "\n")

    def close(self) -> None:
        self.jsonl.close()
        self.prompts.close()


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
