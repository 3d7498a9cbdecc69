"""What changes the acceptance length over an RL run: the policy's entropy, or heads that fit the policy no longer.

    AL_t - AL_0 = d_entropy + d_mismatch,   d_entropy = b (H_t - H_0),   d_mismatch = the rest

b and AL_0 = a + b H_0 come from a line fitted on the run's early phase, so d_mismatch is a regression residual,
AL_t - (a + b H_t), and carries the line's own uncertainty. Steps compare only where acceptance means the same: one
draft length, one rule, one temperature. The accepted share falls with the draft length alone, so slopes are not pooled
over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bebop.errors import BadInput
from bebop.monitor.slope import MIN_POINTS, Slope, fit_slope
from bebop.records import StepRecord

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
    """Parts per step, and the mean mismatch over the recent steps. parts is empty and recent None without a slope."""

    definition: Definition | None
    early: Slope
    early_steps: tuple[int, int] | None  # first and last step that the line was fitted on
    parts: tuple[Part, ...]
    recent: Estimate | None
    recent_steps: tuple[int, int] | None


def observed(history: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps that drafted and have a finite entropy; the others carry no information on acceptance."""
    return [
        s
        for s in history
        if s.acceptance_length is not None and s.entropy_nats is not None and math.isfinite(s.entropy_nats)
    ]


def definition_of(step: StepRecord) -> Definition:
    """The definition of acceptance under which a step was run."""
    return Definition(step.num_speculative_tokens, step.acceptance_rule, float(step.temperature))


def split_by_definition(history: Sequence[StepRecord]) -> dict[Definition, list[StepRecord]]:
    """Observed steps by definition of acceptance, in order of their last step: the current definition comes last."""
    groups: dict[Definition, list[StepRecord]] = {}
    for step in observed(history):
        definition = definition_of(step)
        groups[definition] = [*groups.pop(definition, []), step]
    return groups


def current(history: Sequence[StepRecord]) -> list[StepRecord]:
    """Observed steps under the definition of the last of them; [] where nothing was drafted."""
    groups = split_by_definition(history)
    return list(groups.values())[-1] if groups else []


def slope_of(steps: Sequence[StepRecord]) -> Slope:
    """Slope of acceptance length over entropy, of steps under one definition. Raises ValueError on more."""
    definitions = {definition_of(step) for step in steps}
    if len(definitions) > 1:
        names = "; ".join(sorted(map(str, definitions)))
        raise BadInput(f"steps: {names} came, expected one definition of acceptance: split_by_definition first")
    return fit_slope([step.entropy_nats for step in steps], [step.acceptance_length for step in steps])


def num_recent(num_steps: int) -> int:
    """Steps that count as recent: the last quarter, at least 5."""
    return max(MIN_RECENT, num_steps // 4)


def decompose(history: Sequence[StepRecord], *, early_steps: int = EARLY_STEPS) -> Decomposition:
    """Split the change of acceptance length, for steps under the current definition.

    The line is fitted on the first `early_steps` of them, or on what comes before the recent ones in a shorter run. The
    interval of a step's mismatch holds the line's uncertainty and the step's own scatter; that of the recent mean the
    scatter's autocorrelation too.
    """
    steps = current(history)
    if not steps:
        return Decomposition(None, fit_slope([], []), None, (), None, None)
    recent = steps[-num_recent(len(steps)) :]
    before = steps[: len(steps) - len(recent)]
    early = before[:early_steps]
    line = slope_of(early)
    span = (early[0].step, early[-1].step) if early else None
    if line.status != "ok":
        return Decomposition(definition_of(steps[0]), line, span, (), None, None)
    h_0 = steps[0].entropy_nats
    parts = tuple(_part(step, line, h_0) for step in steps)
    mean_h = float(np.mean([step.entropy_nats for step in recent]))
    mean_al = float(np.mean([step.acceptance_length for step in recent]))
    scatter = max(line.long_run_variance, line.residual_variance) / len(recent)
    mean = _mismatch(line, mean_h, mean_al, scatter)
    return Decomposition(definition_of(steps[0]), line, span, parts, mean, (recent[0].step, recent[-1].step))


def fewest_steps() -> int:
    """Observed steps below which no line can be fitted before the recent ones."""
    return MIN_POINTS + MIN_RECENT


def _part(step: StepRecord, line: Slope, h_0: float) -> Part:
    moved = step.entropy_nats - h_0
    ends = sorted((line.low * moved, line.high * moved))
    change = step.acceptance_length - (line.intercept + line.slope * h_0)
    mismatch = _mismatch(line, step.entropy_nats, step.acceptance_length, line.residual_variance)
    return Part(step.step, change, Estimate(line.slope * moved, *ends), mismatch)


def _mismatch(line: Slope, entropy_nats: float, acceptance_length: float, scatter: float) -> Estimate:
    x = np.array([1.0, entropy_nats])
    value = acceptance_length - (line.intercept + line.slope * entropy_nats)
    half = line.quantile * math.sqrt(max(0.0, float(x @ np.array(line.covariance) @ x)) + scatter)
    return Estimate(value, value - half, value + half)
