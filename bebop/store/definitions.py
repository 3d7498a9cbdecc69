"""What each logged number means: its name in sinks, its unit, and how it is averaged. One table for all views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bebop.records import StepRecord

PREFIX = "bebop/"


@dataclass(frozen=True)
class Metric:
    """field: of StepRecord; label: axis title with unit; meaning: definition in one sentence."""

    field: str
    label: str
    meaning: str


METRICS = (
    Metric(
        "entropy_nats",
        "target entropy [nats]",
        "Mean entropy of the target distribution at the sampling temperature, over emitted response tokens.",
    ),
    Metric(
        "acceptance_length",
        "acceptance length [tokens per target forward]",
        "1 + accepted drafts / drafts, pooled over the step's requests: sums over all of them, then one ratio.",
    ),
    Metric(
        "acceptance_length_mean_of_requests",
        "acceptance length, mean of requests",
        "Mean of the requests' own ratios (verl's average); short responses weigh as much as long ones.",
    ),
    Metric("num_drafts", "drafts", "Target forwards that carried a draft; a raw count."),
    Metric("num_draft_tokens", "draft tokens", "Draft tokens proposed; a raw count."),
    Metric("reward_mean", "mean reward", "Mean of the task verifier's reward over the step's responses, 0 to 1."),
    Metric(
        "zero_spread_groups", "groups without spread", "Share of groups with equal rewards, whose advantages are 0."
    ),
    Metric(
        "staleness_mean",
        "staleness, mean [versions]",
        "Policy versions between sampling and training, mean of samples.",
    ),
    Metric("staleness_max", "staleness, largest [versions]", "Policy versions between sampling and training, largest."),
    Metric("tokens_per_s", "response tokens per second", "Response tokens of the step over its wall time."),
    Metric("response_length_mean", "response length [tokens]", "Mean number of response tokens."),
    Metric(
        "probs_diff_max",
        "largest probability difference",
        "Largest difference between the engine's and the trainer's probability of an emitted token.",
    ),
    Metric("step_s", "step time [s]", "Wall time of the step."),
    Metric("num_speculative_tokens", "draft length", "Draft tokens per target forward, as configured."),
    Metric("temperature", "temperature", "Sampling temperature; entropy and acceptance are at this temperature."),
)

DEPTH_METRICS = {
    "conditional_acceptance": "P(draft accepted | all before it accepted): accepted at depth j over accepted at j - 1.",
    "accepted": "Drafts accepted at this depth; a raw count.",
}


def flatten(record: StepRecord | Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, finite or not, under their logged names: `bebop/...`, per depth `bebop/.../depth_1`.

    Records of other kinds go under `bebop/<kind>/...`, lists per depth. Names in a step's `extra` that have a slash,
    such as verl's, are kept.
    """
    if not isinstance(record, StepRecord):
        prefix = f"{PREFIX}{record['kind']}/"
        return _numbers(prefix, {key: value for key, value in record.items() if key not in ("kind", "time")})
    values: dict[str, Any] = {"step": record.step}
    for metric in METRICS:
        source = record.counts if metric.field in ("num_drafts", "num_draft_tokens") else record
        values[metric.field] = getattr(source, metric.field, None)
    if record.counts:
        values["conditional_acceptance"] = record.counts.conditional_acceptance
        values["accepted"] = record.counts.accepted_per_depth
    flat = _numbers(PREFIX, values)
    for key, value in record.extra.items():
        flat[key if "/" in key else PREFIX + key] = value
    return flat


def definitions_table() -> list[tuple[str, str, str]]:
    """Rows of (logged name, label, meaning)."""
    rows = [(PREFIX + metric.field, metric.label, metric.meaning) for metric in METRICS]
    return rows + [(f"{PREFIX}{name}/depth_j", name.replace("_", " "), text) for name, text in DEPTH_METRICS.items()]


def label_of(field: str) -> str:
    """Axis title of a field of StepRecord."""
    return next(metric.label for metric in METRICS if metric.field == field)


def meaning_of(field: str) -> str:
    """Definition of a field of StepRecord."""
    return next(metric.meaning for metric in METRICS if metric.field == field)


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            flat |= _numbers(f"{prefix}{key}/", {f"depth_{depth}": item for depth, item in enumerate(value, start=1)})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[prefix + key] = value
    return flat
