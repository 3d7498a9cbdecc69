"""Verify a batch of draft chains so that the emitted tokens are distributed exactly as the target.

Rules, formulas and sources: bebop.spec.rules. A test passes if `u * scale < mass`. The comparison is strict because u
may be exactly 0, and a token with p(y) = 0 must never be accepted. If all drafts of a row are accepted, the bonus token
is sampled from the target distribution after the last draft, position gamma + 1.

Legend: B requests, K longest draft of the batch, V vocabulary. Request b has gamma_b <= K draft tokens, then -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.spec.random import StreamId, Streams, Uniforms, sample
from bebop.spec.rules import RULES, ChainRule

NO_TOKEN = -1
SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # largest |sum of a distribution - 1|; half types: 2e-2


@dataclass(frozen=True)
class ChainResult:
    """tokens: long [B, K+1], the accepted draft tokens, one more token, then -1. num_accepted: long [B]."""

    tokens: Tensor
    num_accepted: Tensor


def verify_chain(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    *,
    rule: str = "rejection",
    generator: torch.Generator | None = None,
    draws: Uniforms | None = None,
) -> ChainResult:
    """Accept a prefix of each draft and emit one more token.

    target_probs [B, K+1, V]: the target at the sampling temperature; [b, i] is the distribution after i draft tokens.
    draft_probs [B, K, V]: the distribution that each draft token was sampled from, filters included. A rule for argmax
        drafts (target_only) does not read it; it may be None there.
    draft_tokens long [B, K]: -1 at every position after the end of the row's draft.
    rule: a name in RULES.
    draws: the requests' own random streams in this round (Streams). With them a request gets the same tokens in any
        batch. None: new streams, seeded from generator. Sample the draft tokens with the same streams' StreamId.DRAFT
        numbers or from another source, never with the numbers used here: shared numbers bias the output.

    Raises ValueError, which names the argument, for wrong shapes, ids outside [0, V), a draft token after a -1, rows
    that are not distributions (with row and position), or no draft_probs with a rule for sampled drafts.
    """
    verifier = RULES.lookup(rule, key="rule")
    _check_shapes(target_probs, draft_probs, draft_tokens, verifier)
    has_draft = draft_tokens != NO_TOKEN  # [B, K]
    num_drafts = has_draft.sum(1)  # [B]
    if verifier.draft == "argmax":
        draft_probs = None
    _check_values(target_probs, draft_probs, draft_tokens, has_draft, num_drafts)

    dtype = torch.float64 if target_probs.dtype == torch.float64 else torch.float32
    target = target_probs.to(dtype)
    draft = None if draft_probs is None else draft_probs.to(dtype)
    tokens = draft_tokens.long().clamp(min=0)  # -1 is never an index
    batch, depth = tokens.shape
    draws = draws or Streams.from_generator(generator, batch, tokens.device)
    if depth == 0:
        num_accepted, final = num_drafts, target[:, 0]
    else:
        num_accepted, final = _accept(verifier, target, draft, tokens, has_draft, num_drafts, draws)
    emitted = sample(final, draws, StreamId.FINAL, num_accepted)
    position = torch.arange(depth + 1, device=tokens.device)
    padded = torch.cat([tokens, tokens.new_zeros(batch, 1)], dim=1)
    kept = torch.where(position < num_accepted.unsqueeze(1), padded, NO_TOKEN)
    return ChainResult(kept.scatter(1, num_accepted.unsqueeze(1), emitted.unsqueeze(1)), num_accepted)


def _accept(
    rule: ChainRule,
    target: Tensor,
    draft: Tensor | None,
    tokens: Tensor,
    has_draft: Tensor,
    num_drafts: Tensor,
    draws: Uniforms,
) -> tuple[Tensor, Tensor]:
    """Number of accepted draft tokens [B], and the distribution [B, V] of the token after them."""
    depth = tokens.shape[1]
    u = draws.uniforms(StreamId.ACCEPT, torch.arange(depth, device=tokens.device).unsqueeze(0))
    tests = rule.tests(target, draft, tokens, num_drafts)
    num_accepted = rule.num_accepted(has_draft & (u * tests.scale.double() < tests.mass.double()))
    row = torch.arange(len(target), device=target.device)
    after = target[row, num_accepted]
    at = num_accepted.clamp(max=depth - 1)
    drafted = None if draft is None else draft[row, at]
    rejected = rule.after_rejection(after, drafted, tokens[row, at], tests.weight[row, num_accepted])
    return num_accepted, torch.where((num_accepted < num_drafts).unsqueeze(1), rejected, after)


def _check_shapes(target: Tensor, draft: Tensor | None, tokens: Tensor, rule: ChainRule) -> None:
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise BadInput(f"draft_tokens: got {tokens.dtype} {list(tokens.shape)}, expected integers [B, K]")
    batch, depth = tokens.shape
    fits = target.ndim == 3 and target.shape[:2] == (batch, depth + 1) and target.shape[2] > 0
    if not fits or not target.is_floating_point():
        got = f"{target.dtype} {list(target.shape)}"
        raise BadInput(f"target_probs: got {got}, expected floats [B, K+1, V] = [{batch}, {depth + 1}, V]")
    if draft is None:
        if rule.draft == "sampled":
            raise BadInput(
                f"draft_probs: got None with rule={rule.name}, expected the distribution of every draft token"
            )
    elif not draft.is_floating_point() or draft.shape != (batch, depth, target.shape[2]):
        got = f"{draft.dtype} {list(draft.shape)}"
        raise BadInput(f"draft_probs: got {got}, expected floats [B, K, V] = {[batch, depth, target.shape[2]]}")


def _check_values(target: Tensor, draft: Tensor | None, tokens: Tensor, has_draft: Tensor, num_drafts: Tensor) -> None:
    def first(bad: Tensor) -> tuple[int, int, str]:
        row, position = (int(i) for i in bad.nonzero()[0])
        return row, position, f"row {row}, position {position}"

    vocabulary = target.shape[2]
    outside = (tokens < NO_TOKEN) | (tokens >= vocabulary)
    if outside.any():
        row, position, place = first(outside)
        raise BadInput(f"draft_tokens: got {int(tokens[row, position])} ({place}), expected -1 or in [0, {vocabulary})")
    gap = has_draft & (torch.arange(tokens.shape[1], device=tokens.device) >= num_drafts.unsqueeze(1))
    if gap.any():
        raise BadInput(f"draft_tokens: got a draft after a -1 ({first(gap)[2]}), expected -1 only at a row's end")
    used = torch.arange(target.shape[1], device=tokens.device) <= num_drafts.unsqueeze(1)
    for name, probs, rows in (("target_probs", target, used), ("draft_probs", draft, has_draft)):
        if probs is None:
            continue
        total = probs.sum(-1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)
        good = (total - 1.0).abs() <= SUM_TOLERANCE.get(probs.dtype, 2e-2)  # NaN compares false
        bad = rows & ~(good & (probs >= 0).all(-1))
        if bad.any():
            row, position, place = first(bad)
            got = "NaN" if probs[row, position].isnan().any() else f"sum {float(total[row, position]):.6g}"
            if (probs[row, position] < 0).any():
                got = f"smallest value {float(probs[row, position].min()):.3g}"
            raise BadInput(f"{name}: got {got} ({place}), expected a distribution: values >= 0 that sum to 1")
