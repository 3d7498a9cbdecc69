"""Changes the draft length of a running vLLM engine, so that one engine can be timed at every k.

vLLM 0.31.0 reads `num_speculative_tokens_per_batch_size` once, into a table of its scheduler. The scheduler is in the
engine core, which `collective_rpc` does not reach. But callers can call the engine core's own methods, so a method is
added to it. At k = 0 vLLM still runs the drafter's layer, without lm_head or sampling, so the drafter's KV cache stays
complete and drafting can start again at any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bebop.config.draft_schedule import k_for

METHOD = "bebop_draft_lengths"


def apply() -> None:
    """Add the method to vLLM's EngineCore. Raises AttributeError if the scheduler has no such table."""
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine.core import EngineCore

    if not hasattr(scheduler, "build_dynamic_sd_schedule_lookup"):
        raise AttributeError("vLLM's scheduler has no draft length by batch size")
    setattr(EngineCore, METHOD, _draft_lengths)


def lookup(schedule: Mapping[str, int], max_num_seqs: int) -> list[int]:
    """[max_num_seqs + 1] draft length by number of scheduled requests; index 0 is not used."""
    return [0] + [k_for(batch, schedule) for batch in range(1, max_num_seqs + 1)]


def _draft_lengths(self: Any, lengths: list) -> None:
    self.scheduler.dynamic_sd_lookup = list(lengths)
