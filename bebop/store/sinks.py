"""Where a stage's records go: metrics.jsonl always, Weights & Biases as the config says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bebop.config import Logger
from bebop.records import StepRecord
from bebop.store.metrics import JsonlSink
from bebop.store.wandb import WandbSink


class Sinks:
    """All sinks of a run as one; a context manager."""

    def __init__(self, logger: Logger, run_dir: Path, *, write: bool = True) -> None:
        """write: False in the processes of a run that leave writing to another one."""
        self._sinks: list[JsonlSink | WandbSink] = []
        if write:
            self._sinks.append(JsonlSink(run_dir))
            self._sinks.append(WandbSink(logger.wandb, logger.project, logger.name, run_dir))

    def write(self, kind: str, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """kind: "sft" (a training step), "sft_eval" (held-out sequences) or "eval". step: optimizer steps done."""
        at = {} if step is None else {"step": step}
        self._write({"kind": kind, **at, **values})

    def write_step(self, record: StepRecord) -> None:
        """Write an RL step."""
        self._write(record)

    def _write(self, record: StepRecord | Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
