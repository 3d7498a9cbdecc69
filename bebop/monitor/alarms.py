"""Alarms: the engine's heads differ from the trainer's, or its probabilities do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bebop.records import StepRecord


def checksums_equal(steps: Sequence[StepRecord]) -> bool | None:
    """True if engine and trainer had the same heads at every step that compared them; None if no step did."""
    compared = [step.heads_checksum_engine == step.heads_checksum_trainer for step in steps if _compared(step)]
    return all(compared) if compared else None


def largest_probs_diff(steps: Sequence[StepRecord]) -> float | None:
    """Largest probability difference over all steps; NaN if one is not finite, None if none was measured."""
    found = [step.probs_diff_max for step in steps if step.probs_diff_max is not None]
    if not found:
        return None
    return max(found) if all(map(math.isfinite, found)) else math.nan


def alarms(steps: Sequence[StepRecord]) -> list[str]:
    """One sentence per kind of alarm, with the first step that raised it."""
    found = []
    other_heads = [s for s in steps if _compared(s) and s.heads_checksum_engine != s.heads_checksum_trainer]
    if other_heads:
        first = other_heads[0]
        found.append(
            f"the engine's heads differ from the trainer's at {len(other_heads)} steps, first at step {first.step}: "
            f"engine {first.heads_checksum_engine}, trainer {first.heads_checksum_trainer}"
        )
    lost = [s for s in steps if s.probs_diff_max is not None and not math.isfinite(s.probs_diff_max)]
    if lost:
        found.append(f"rollout and trainer probabilities differ by {lost[0].probs_diff_max} at step {lost[0].step}")
    return found


def _compared(step: StepRecord) -> bool:
    return step.heads_checksum_engine is not None and step.heads_checksum_trainer is not None
