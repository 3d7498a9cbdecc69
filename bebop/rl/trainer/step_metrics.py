"""The numbers of one RL step: pure functions of the contents of verl's batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bebop.records import DraftCounts
from bebop.verifiers import FAILURES


def counts_of(fields: Mapping[str, Any]) -> DraftCounts | None:
    """Draft counts of one response, from verl's extra_fields; None if the engine reported none."""
    drafts = fields.get("spec_num_verify_steps")
    if not drafts:
        return None
    return DraftCounts(
        int(drafts), int(fields["spec_num_draft_tokens"]), tuple(fields.get("spec_accepted_per_depth", ()))
    )


def pooled(counts: Sequence[DraftCounts | None]) -> DraftCounts | None:
    """Sum of a batch's counts; None if no response has any."""
    known = [one for one in counts if one is not None]
    return sum(known, DraftCounts()) if known else None


def mean_of_requests(counts: Sequence[DraftCounts | None]) -> float | None:
    """Mean over requests of their acceptance lengths (verl's average); requests without drafts are left out."""
    lengths = [one.acceptance_length for one in counts if one is not None and one.num_drafts]
    return sum(lengths) / len(lengths) if lengths else None


def masked_mean(values: Tensor, mask: Tensor) -> float | None:
    """Mean of `values` [B, T] where `mask` [B, T] is set, for example over response tokens. None if nowhere."""
    chosen = values[mask.bool()]
    return chosen.double().mean().item() if chosen.numel() else None


def zero_spread_share(groups: Sequence[str], rewards: Sequence[float]) -> float | None:
    """Share of groups whose rewards are all equal; such a group's advantages are 0. None without groups."""
    spread: dict[str, set[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        spread.setdefault(group, set()).add(round(reward, 9))
    return sum(len(values) == 1 for values in spread.values()) / len(spread) if spread else None


def largest_probability_gap(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, rows: Tensor
) -> float | None:
    """max |p_trainer - p_rollout| where `mask` is set, in the chosen `rows` [B] bool; None if there are none.

    Any value that is not finite makes the result NaN.
    """
    chosen = mask.bool() & rows.bool().unsqueeze(1)
    if not chosen.any():
        return None
    gap = (trainer_logprobs.double().exp() - rollout_logprobs.double().exp()).abs()[chosen]
    return math.nan if not torch.isfinite(gap).all() else gap.max().item()


def verifier_failures(fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of a batch's rewards that failed in the box, and how many by kind; {} for rewards from elsewhere."""
    kinds = [(one.get("reward_extra_info") or {}).get("verifier_failure") for one in fields]
    if not kinds or kinds[0] is None:
        return {}
    share = sum(bool(kind) for kind in kinds) / len(kinds)
    return {"rewards/failed_share": share} | {f"rewards/failed_{kind}": float(kinds.count(kind)) for kind in FAILURES}


def staleness(tags: Sequence[Mapping[str, Any]], trained_version: int) -> list[int]:
    """For each response, the versions from the oldest weights that sampled it to the weights that are trained."""
    return [trained_version - int(tag["min_global_steps"]) for tag in tags]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars among verl's metrics."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
