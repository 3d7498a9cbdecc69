"""Where the training's records go: metrics.jsonl always, wandb as the config says. Rank 0 writes, the others don't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bebop.monitor import JsonlSink, WandbSink
from bebop.sft.job import Job


class Sinks:
    def __init__(self, job: Job, *, write: bool) -> None:
        self._sinks: list[Any] = []
        if write:
            logger = job.config.logger
            self._sinks.append(JsonlSink(job.run_dir))
            self._sinks.append(WandbSink(logger.wandb, logger.project, logger.name, job.run_dir))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """kind: "sft" (a training step) or "sft_eval" (held-out text). step: optimizer steps done."""
        for sink in self._sinks:
            sink.write({"kind": kind, "step": step, **values})

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
