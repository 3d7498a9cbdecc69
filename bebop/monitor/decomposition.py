"""Why the acceptance length changes over an RL run: other entropy of the policy, or heads that no longer fit it.

    AL_t - AL_0 = d_entropy + d_mismatch,   d_entropy = b (H_t - H_0),   d_mismatch = the rest

b and AL_0 = a + b H_0 come from a line fitted on the run's early phase, so d_mismatch is a regression residual,
AL_t - (a + b H_t), and its interval contains the line's own uncertainty. The mean mismatch over the recent steps comes
from one regression over the early and the recent steps, in which the recent ones have a level and a slope of their own:
their level at their mean entropy, against the early line, is the mismatch. Steps are compared only if acceptance means
the same in them: one draft length, one rule, one temperature. Slopes are not pooled over draft lengths, because the
accepted share falls with the draft length even if nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bebop.errors import BadInput
from bebop.monitor.regression import half_width, regress
from bebop.monitor.slope import MIN_POINTS, MIN_SPAN_NATS, Fit, Slope, fit_slope
from bebop.records import DraftCounts, StepRecord

EARLY_STEPS = 20
MIN_RECENT = 5


@dataclass(frozen=True)
class Definition:
    """What acceptance means in a step; steps of different definitions are never pooled."""

    num_speculative_tokens: int
    acceptance_rule: str
    temperature: float

    def __str__(self) -> str:
        return f"k={self.num_speculative_tokens}, {self.acceptance_rule}, T={self.temperature:g}"


@dataclass(frozen=True)
class Drafted:
    """A step that drafted and has a finite entropy: what the statistics need of it."""

    step: int
    entropy_nats: float
    acceptance_length: float
    counts: DraftCounts
    definition: Definition


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, in tokens per target forward."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """One step's change of acceptance length against the early line at H_0."""

    step: int
    change: float
    entropy: Estimate
    mismatch: Estimate


@dataclass(frozen=True)
class Decomposition:
    """Parts per step, and the mean mismatch over the recent steps. Without a slope, parts is empty and recent None."""

    definition: Definition | None
    early: Slope
    early_steps: tuple[int, int] | None  # first and last step that the line was fitted on
    parts: tuple[Part, ...] = ()
    recent: Estimate | None = None
    recent_steps: tuple[int, int] | None = None


def drafted(history: Sequence[StepRecord]) -> list[Drafted]:
    """Steps that drafted and have a finite entropy; the others say nothing about acceptance."""
    found = []
    for s in history:
        length, entropy, rule = s.acceptance_length, s.entropy_nats, s.acceptance_rule
        if s.counts is None:
            rule = f"{rule}, mean of requests"
        if length is not None and entropy is not None and math.isfinite(entropy):
            definition = Definition(s.num_speculative_tokens, rule, float(s.temperature))
            found.append(Drafted(s.step, entropy, length, s.counts or DraftCounts(), definition))
    return found


def split_by_definition(history: Sequence[StepRecord]) -> dict[Definition, list[Drafted]]:
    """Steps that drafted, by definition of acceptance, in order of their last step: the current one comes last."""
    groups: dict[Definition, list[Drafted]] = {}
    for step in drafted(history):
        groups[step.definition] = [*groups.pop(step.definition, []), step]
    return groups


def current(history: Sequence[StepRecord]) -> list[Drafted]:
    """Steps that drafted under the definition of the last of them; [] if nothing was drafted."""
    groups = split_by_definition(history)
    return list(groups.values())[-1] if groups else []


def slope_of(steps: Sequence[StepRecord | Drafted]) -> Slope:
    """Slope of acceptance length against entropy, for steps of one definition. Raises BadInput on more."""
    used = [d for s in steps for d in ([s] if isinstance(s, Drafted) else drafted([s]))]
    definitions = {step.definition for step in used}
    if len(definitions) > 1:
        names = "; ".join(sorted(map(str, definitions)))
        raise BadInput(f"steps: got {names}, expected one definition of acceptance: split_by_definition first")
    return fit_slope([step.entropy_nats for step in used], [step.acceptance_length for step in used])


def num_recent(num_steps: int) -> int:
    """Steps that count as recent: the last quarter, at least 5."""
    return max(MIN_RECENT, num_steps // 4)


def decompose(history: Sequence[StepRecord], *, early_steps: int = EARLY_STEPS) -> Decomposition:
    """Split the change of acceptance length, for steps under the current definition.

    The line is fitted on the first `early_steps` of them; in a shorter run, on those before the recent ones. The
    interval of a step's mismatch contains the line's uncertainty and the step's own scatter; that of the recent mean
    also the scatter's autocorrelation.
    """
    steps = current(history)
    if not steps:
        return Decomposition(None, slope_of([]), None)
    recent = steps[-num_recent(len(steps)) :]
    before = steps[: len(steps) - len(recent)]
    early = before[:early_steps]
    slope = slope_of(early)
    span = (early[0].step, early[-1].step) if early else None
    if slope.fit is None:
        return Decomposition(steps[0].definition, slope, span)
    line, h_0 = slope.fit, steps[0].entropy_nats
    return Decomposition(
        definition=steps[0].definition,
        early=slope,
        early_steps=span,
        parts=tuple(_part(step, line, h_0) for step in steps),
        recent=_recent_mismatch(early, recent),
        recent_steps=(recent[0].step, recent[-1].step),
    )


def _recent_mismatch(early: list[Drafted], recent: list[Drafted]) -> Estimate:
    """Mean mismatch over the recent steps against the line of the early ones."""
    steps = [*early, *recent]
    h = np.array([step.entropy_nats for step in steps])
    is_recent = np.arange(len(steps)) >= len(early)
    columns = [np.ones(len(steps)), h - h[~is_recent].mean(), is_recent.astype(float)]
    own_slope = is_recent * (h - h[is_recent].mean())
    if np.ptp(own_slope) > MIN_SPAN_NATS:
        columns.append(own_slope)
    lengths = np.array([step.acceptance_length for step in steps])
    fit = regress(np.column_stack(columns), lengths, np.array([step.step for step in steps]))
    value, half = float(fit.coefficients[2]), half_width(fit, np.eye(len(columns))[2])
    return Estimate(value, value - half, value + half)


def fewest_steps() -> int:
    """Steps with drafts below which no line can be fitted before the recent ones."""
    return MIN_POINTS + MIN_RECENT


def _part(step: Drafted, line: Fit, h_0: float) -> Part:
    moved = step.entropy_nats - h_0
    low, high = sorted((line.low * moved, line.high * moved))
    change = step.acceptance_length - (line.intercept + line.slope * h_0)
    mismatch = _mismatch(line, step.entropy_nats, step.acceptance_length, line.residual_variance)
    return Part(step.step, change, Estimate(line.slope * moved, low, high), mismatch)


def _mismatch(line: Fit, entropy_nats: float, acceptance_length: float, scatter: float) -> Estimate:
    value, low, high = line.line(entropy_nats, scatter)
    return Estimate(acceptance_length - value, acceptance_length - high, acceptance_length - low)
