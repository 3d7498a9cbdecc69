"""Where a stage's records go: metrics.jsonl always, wandb as the config says. One process writes, the others don't."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bebop.config import Logger
from bebop.store.run_folder import JsonlSink
from bebop.store.wandb import WandbSink


class Sinks:
    """All sinks of a run as one; a context manager."""

    def __init__(self, logger: Logger, run_dir: Path, *, write: bool = True) -> None:
        self._sinks: list[Any] = []
        if write:
            self._sinks.append(JsonlSink(run_dir))
            self._sinks.append(WandbSink(logger.wandb, logger.project, logger.name, run_dir))

    def write(self, kind: str, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """kind: "sft" (a training step), "sft_eval" (held-out text) or "eval". step: optimizer steps done."""
        where = {} if step is None else {"step": step}
        for sink in self._sinks:
            sink.write({"kind": kind, **where, **values})

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
