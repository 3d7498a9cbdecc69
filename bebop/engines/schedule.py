"""Draft length by batch size (`rollout.draft_schedule`) for the engines."""

from __future__ import annotations

from bebop.config import RolloutSection
from bebop.config.draft_schedule import k_for, parse

__all__ = ["k_for", "vllm_ranges"]


def vllm_ranges(rollout: RolloutSection) -> list[list[int]]:
    """The schedule as vLLM's `num_speculative_tokens_per_batch_size`: [first, last, k], both ends included.

    vLLM, too, lets a gap keep the k of the range below it; a range without end stops at rollout.max_num_seqs.
    """
    ranges = parse(rollout.draft_schedule or {"1+": rollout.num_speculative_tokens})
    return [[r.first, r.last or max(r.first, rollout.max_num_seqs), r.k] for r in ranges]
