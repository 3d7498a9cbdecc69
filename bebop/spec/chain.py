"""Verify a batch of draft chains so that what is emitted is distributed exactly as the target.

Rules, formulas and sources: bebop.spec.rules. Accept is `u q(y) < p(y)`, strict, since u may be exactly 0 and a token
with p(y) = 0 must never be accepted. After all drafts of a row were accepted, the bonus token comes from the target
distribution behind the last draft, position gamma + 1.

Legend: B requests, K longest draft of the batch, V vocabulary. Request b has gamma_b <= K drafts, then -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.spec import rules
from bebop.spec.draws import Sampler, sample
from bebop.spec.random import Purpose, Streams, Uniforms

Rule = Literal["rejection", "target_only", "block"]
NO_TOKEN = -1
SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a distribution's sum from 1; half types: 2e-2


@dataclass(frozen=True)
class ChainResult:
    """tokens: long [B, K+1], the accepted drafts, one more token, then -1. num_accepted: long [B], drafts accepted."""

    tokens: Tensor
    num_accepted: Tensor


def verify_chain(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    *,
    rule: Rule = "rejection",
    generator: torch.Generator | None = None,
    draws: Uniforms | None = None,
    sampler: Sampler = "inversion",
    request_ids: Sequence[str] | None = None,
) -> ChainResult:
    """Accept a prefix of each draft and emit one token more.

    target_probs [B, K+1, V]: the target at the sampling temperature; [b, i] follows i drafts.
    draft_probs [B, K, V]: what each draft token was sampled from, filters included; for target_only, whose draft is
        deterministic, None (else unread).
    draft_tokens long [B, K]: -1 from the first position without a draft on.
    draws: the requests' own random streams in this round (Streams); they fix a request's tokens in any batch. None:
        fresh streams seeded from generator. The drafts come from the same streams' numbers for Purpose.DRAFT, or from
        another source, never from the numbers used here; one noise stream for both biases the output.
    sampler: how the final token is drawn from its distribution.
    request_ids: names for error messages.

    Raises ValueError, naming the argument: shapes, ids outside [0, V), a draft behind a -1, rows that are no
    distributions (request and position named), rejection or block without draft_probs.
    """
    _check_shapes(target_probs, draft_probs, draft_tokens, rule, request_ids)
    has_draft = draft_tokens != NO_TOKEN  # [B, K]
    num_drafts = has_draft.sum(1)  # [B]
    _check_values(target_probs, draft_probs, draft_tokens, has_draft, num_drafts, rule, request_ids)

    dtype = torch.float64 if target_probs.dtype == torch.float64 else torch.float32
    target = target_probs.to(dtype)
    draft = None if rule == "target_only" or draft_probs is None else draft_probs.to(dtype)
    token = draft_tokens.long().clamp(min=0)  # -1 is never an index
    p = target[:, :-1].gather(-1, token.unsqueeze(-1)).squeeze(-1)  # [B, K] p(y)
    q = torch.ones_like(p) if draft is None else draft.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    draws = draws or Streams.from_generator(generator, p.shape[0], p.device)
    u = draws.uniforms(Purpose.ACCEPT, torch.arange(p.shape[1], device=p.device).unsqueeze(0))

    weight = target.new_ones(target.shape[0])
    if rule == "block":
        num_accepted, weight = _accept_block(target, draft, p, q, u, has_draft, num_drafts)
    else:
        accepted = has_draft & (u * q.double() < p.double())
        num_accepted = accepted.long().cumprod(1).sum(1)

    final = _final_distribution(target, draft, token, num_accepted, num_drafts, weight)
    emitted = sample(final, draws, Purpose.FINAL, num_accepted, sampler)
    position = torch.arange(target.shape[1], device=token.device)
    padded = torch.cat([token, token.new_zeros(token.shape[0], 1)], dim=1)
    tokens = torch.where(position < num_accepted.unsqueeze(1), padded, NO_TOKEN)
    return ChainResult(tokens.scatter(1, num_accepted.unsqueeze(1), emitted.unsqueeze(1)), num_accepted)


def _accept_block(
    target: Tensor, draft: Tensor, p: Tensor, q: Tensor, u: Tensor, has_draft: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Drafts accepted [B], and the weight w at that prefix [B]: the last prefix whose own test passes."""
    weight = torch.ones_like(target[:, 0, 0])
    num_accepted, weight_there = torch.zeros_like(num_drafts), weight
    for i in range(1, p.shape[1] + 1):
        weight = rules.block_weight(weight, p[:, i - 1], q[:, i - 1])
        accept_with = weight
        if i < p.shape[1]:
            is_last = num_drafts == i
            accept_with = torch.where(is_last, weight, rules.block_acceptance(weight, target[:, i], draft[:, i]))
        accepted = has_draft[:, i - 1] & (u[:, i - 1] < accept_with)
        num_accepted = torch.where(accepted, i, num_accepted)
        weight_there = torch.where(accepted, weight, weight_there)
    return num_accepted, weight_there


def _final_distribution(
    target: Tensor, draft: Tensor | None, token: Tensor, num_accepted: Tensor, num_drafts: Tensor, weight: Tensor
) -> Tensor:
    """[B, V] of the token behind the accepted prefix: the target where no draft was left, else the rule's residual."""
    row = torch.arange(target.shape[0], device=target.device)
    bonus = target[row, num_accepted]
    if token.shape[1] == 0:
        return bonus
    at = num_accepted.clamp(max=token.shape[1] - 1)
    if draft is None:
        rejected = rules.residual_without(bonus, token[row, at])
    else:
        rejected = rules.residual(bonus, draft[row, at], weight)
    return torch.where((num_accepted < num_drafts).unsqueeze(1), rejected, bonus)


def _check_shapes(
    target: Tensor, draft: Tensor | None, token: Tensor, rule: str, request_ids: Sequence[str] | None
) -> None:
    if rule not in get_args(Rule):
        raise BadInput(f"rule={rule!r}: expected one of {', '.join(get_args(Rule))}")
    if token.ndim != 2 or token.dtype not in (torch.int64, torch.int32):
        raise BadInput(f"draft_tokens: {token.dtype} {list(token.shape)} came, expected integers [B, K]")
    batch, depth = token.shape
    fits = target.ndim == 3 and target.shape[:2] == (batch, depth + 1) and target.shape[2] > 0
    if not fits or not target.is_floating_point():
        came = f"{target.dtype} {list(target.shape)}"
        raise BadInput(f"target_probs: {came} came, expected floats [B, K+1, V] = [{batch}, {depth + 1}, V]")
    if draft is None:
        if rule != "target_only":
            raise BadInput(f"draft_probs: None came with rule={rule}, expected the distribution of every draft token")
    elif not draft.is_floating_point() or draft.shape != (batch, depth, target.shape[2]):
        came = f"{draft.dtype} {list(draft.shape)}"
        raise BadInput(f"draft_probs: {came} came, expected floats [B, K, V] = {[batch, depth, target.shape[2]]}")
    if request_ids is not None and len(request_ids) != batch:
        raise BadInput(f"request_ids: {len(request_ids)} names came, expected one for each of {batch} rows")


def _check_values(
    target: Tensor,
    draft: Tensor | None,
    token: Tensor,
    has_draft: Tensor,
    num_drafts: Tensor,
    rule: str,
    request_ids: Sequence[str] | None,
) -> None:
    def where(bad: Tensor) -> tuple[int, int, str]:
        row, position = (int(i) for i in bad.nonzero()[0])
        name = "" if request_ids is None else f", request {request_ids[row]!r}"
        return row, position, f"row {row}{name}, position {position}"

    vocabulary = target.shape[2]
    outside = (token < NO_TOKEN) | (token >= vocabulary)
    if outside.any():
        row, position, place = where(outside)
        raise BadInput(f"draft_tokens: {int(token[row, position])} came ({place}), expected -1 or in [0, {vocabulary})")
    position_of = torch.arange(token.shape[1], device=token.device)
    gap = has_draft & (position_of >= num_drafts.unsqueeze(1))
    if gap.any():
        raise BadInput(f"draft_tokens: a draft came behind a -1 ({where(gap)[2]}), expected -1 only at a row's end")
    used = torch.arange(target.shape[1], device=token.device) <= num_drafts.unsqueeze(1)
    checked = [("target_probs", target, used)]
    if draft is not None and rule != "target_only":
        checked.append(("draft_probs", draft, has_draft))
    for name, probs, rows in checked:
        total = probs.sum(-1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)
        good = (total - 1.0).abs() <= SUM_TOLERANCE.get(probs.dtype, 2e-2)  # NaN compares false
        bad = rows & ~(good & (probs >= 0).all(-1))
        if bad.any():
            row, position, place = where(bad)
            came = "NaN" if probs[row, position].isnan().any() else f"sum {float(total[row, position]):.6g}"
            if (probs[row, position] < 0).any():
                came = f"smallest value {float(probs[row, position].min()):.3g}"
            raise BadInput(f"{name}: {came} came ({place}), expected a distribution: values >= 0 that sum to 1")
