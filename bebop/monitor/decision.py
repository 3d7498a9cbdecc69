"""Should the heads be updated online? (Bebop, sections on the entropy-acceptance slope and on online updates.)

Checked in this order; the first that applies decides:

1. Undetermined if there are too few steps.
2. Yes if the recent entropy has left the range of the pre-RL data, where the heads were not trained.
3. Undetermined for drafts of mixed lengths or constant entropy.
4. By the mismatch. A loss of `min_mismatch` in acceptance length is the smallest for which an update pays.
   - Yes if the loss is significant and at least `min_mismatch`.
   - No if it is significant but smaller, or if its interval rules out a loss of `min_mismatch`, or if the interval is
     so narrow that such a loss would have been significant.
   - Otherwise undetermined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bebop.errors import BadInput
from bebop.monitor.decomposition import EARLY_STEPS, current, decompose, fewest_steps, num_recent, slope_of
from bebop.records import DraftCounts, StepRecord


@dataclass(frozen=True)
class MonitorState:
    """The input of a decision.

    history: the run's steps in order.
    entropy_range: smallest and largest entropy (nats) of the pre-RL data, as means over many tokens, like
        StepRecord.entropy_nats. None: not known; then the range plays no part.
    early_steps: steps on which the decomposition's line is fitted.
    min_steps: smallest number of steps for a decision.
    min_mismatch: smallest loss of acceptance length by mismatch for which an update pays.
    """

    history: Sequence[StepRecord]
    entropy_range: tuple[float, float] | None = None
    early_steps: int = EARLY_STEPS
    min_steps: int = 8
    min_mismatch: float = 0.05


@dataclass(frozen=True)
class Decision:
    """update: True, False, or None for "undetermined"; reason: one sentence; evidence: the numbers behind it."""

    update: bool | None
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """The decision in words."""
        return {True: "update the heads online", False: "keep the heads", None: "undetermined"}[self.update]


def decide(state: MonitorState) -> Decision:
    """Decide on online updates of the heads. Raises BadInput if entropy_range is not a range."""
    _check_range(state.entropy_range)
    steps = current(state.history)
    evidence: dict[str, Any] = {"steps_in_run": len(state.history), "steps_used": len(steps)}
    if not steps:
        return Decision(None, f"no data: no step of {len(state.history)} has drafts and an entropy", evidence)
    recent = steps[-num_recent(len(steps)) :]
    entropy = float(np.mean([step.entropy_nats for step in recent]))
    slope = slope_of(steps)
    evidence |= {
        **asdict(steps[-1].definition),
        "counts": asdict(sum((step.counts for step in steps), DraftCounts())),
        "slope": slope.slope,
        "slope_low": slope.low,
        "slope_high": slope.high,
        "slope_relative": slope.relative,
        "slope_status": slope.status,
        "recent_steps": [recent[0].step, recent[-1].step],
        "recent_entropy_nats": entropy,
        "entropy_range": list(state.entropy_range) if state.entropy_range else None,
        "min_mismatch": state.min_mismatch,
    }
    fewest = max(state.min_steps, fewest_steps())
    if len(steps) < state.min_steps:
        return Decision(None, f"undetermined: {len(steps)} steps with drafts, at least {fewest} are needed", evidence)
    if state.entropy_range and not state.entropy_range[0] <= entropy <= state.entropy_range[1]:
        low, high = state.entropy_range
        reason = (
            f"entropy {entropy:.3f} nats (mean of steps {recent[0].step} to {recent[-1].step}) has left the range of "
            f"the pre-RL data, {low:.3f} to {high:.3f}: the heads have not seen such text"
        )
        return Decision(True, reason, evidence)
    if steps[-1].counts.mixed_lengths:
        reason = (
            f"undetermined: drafts of mixed lengths ({steps[-1].definition.acceptance_rule}): the acceptance length "
            "depends on the batch size; rollout.draft_schedule=null drafts with one length"
        )
        return Decision(None, reason, evidence)
    if slope.status != "ok":
        return Decision(None, f"undetermined: {slope.reason}", evidence)
    return _by_mismatch(state, evidence, fewest, len(steps))


def _by_mismatch(state: MonitorState, evidence: dict[str, Any], fewest: int, num_steps: int) -> Decision:
    if num_steps < fewest:
        return Decision(None, f"undetermined: {num_steps} steps with drafts, at least {fewest} are needed", evidence)
    parts = decompose(state.history, early_steps=state.early_steps)
    evidence |= {
        "early_steps": list(parts.early_steps or ()),
        "early_slope": parts.early.slope,
        "early_slope_low": parts.early.low,
        "early_slope_high": parts.early.high,
    }
    if parts.recent is None or parts.recent_steps is None:
        return Decision(None, f"undetermined: early phase: {parts.early.reason}", evidence)
    mismatch, limit = parts.recent, -state.min_mismatch
    evidence |= {"mismatch": mismatch.value, "mismatch_low": mismatch.low, "mismatch_high": mismatch.high}
    interval = f"{mismatch.value:+.3f} [{mismatch.low:+.3f}, {mismatch.high:+.3f}]"
    first, last = parts.recent_steps
    said = f"mismatch over steps {first} to {last} is {interval} tokens per target forward"
    if mismatch.high < 0 and mismatch.value <= limit:
        reason = f"{said}: significant, and a loss of {state.min_mismatch:g} or more, so an update pays"
        return Decision(True, reason, evidence)
    if mismatch.high < 0 or mismatch.low > limit:
        reason = f"{said}: not a loss of {state.min_mismatch:g} or more, so an update would not pay"
        return Decision(False, reason, evidence)
    resolved = (mismatch.high - mismatch.low) / 2  # the smallest mismatch that would be significant
    if resolved <= state.min_mismatch:
        reason = (
            f"{said}: not significant, although the interval is narrow enough to show a loss of {state.min_mismatch:g}"
        )
        return Decision(False, reason, evidence)
    reason = (
        f"undetermined: {said}: too uncertain to tell: a loss of {state.min_mismatch:g}, the smallest for which an "
        "update pays, would not show; more steps narrow the interval"
    )
    return Decision(None, reason, evidence)


def _check_range(entropy_range: tuple[float, float] | None) -> None:
    if entropy_range is not None and not (len(entropy_range) == 2 and 0 <= entropy_range[0] <= entropy_range[1]):
        raise BadInput(f"entropy_range: got {entropy_range!r}, expected two entropies in nats, smallest first")
