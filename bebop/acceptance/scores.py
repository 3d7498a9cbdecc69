"""Scored acceptance: heads re-run on text that the policy sampled, against the backbone's own distributions.

P(first j drafts accepted) = E_{y~p}[ prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j ], alpha_j = sum_v min(p_j, q_j)

is exact for text that the policy sampled at the same temperature. Under target-only acceptance the draft is argmax q,
so the factors are [y_i = argmax q_i] and p_j(argmax q_j). Block verification: see bebop.losses.accepted_at_anchors.
Shapes: K depths, N anchors, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from bebop_kernels import tv_statistics
from torch import Tensor

from bebop.data.batches import TrainBatch
from bebop.errors import BadInput
from bebop.head_training.objective import anchor_rows
from bebop.losses import accepted_at_anchors, expected_acceptance
from bebop.mtp import MtpHead

CHUNK_ELEMENTS = 1 << 24  # logits held at once


@dataclass(frozen=True)
class Acceptance:
    """Scored acceptance per depth, with what it is made of."""

    temperature: float
    num_anchors: int
    alpha: tuple[float, ...]  # [K] mean overlap over all anchors, each depth for itself
    accepted: tuple[float, ...]  # [K] P(first j drafts accepted) under rejection sampling, weighted form
    accepted_se: tuple[float, ...]  # [K] its standard errors, anchors taken as independent
    acceptance_length: float  # expected tokens per target forward under rejection sampling, draft length K
    acceptance_length_se: float
    accepted_target_only: tuple[float, ...]  # [K] the same under target-only acceptance
    accepted_block: tuple[float, ...]  # [K] the same under block verification
    accepted_product: tuple[float, ...]  # [K] mean product of alphas along the text: biased, what e2e_tv trains
    entropy_nats: float  # mean target entropy over the anchors' first depth

    @property
    def acceptance_length_target_only(self) -> float:
        return 1 + sum(self.accepted_target_only)

    @property
    def acceptance_length_block(self) -> float:
        return 1 + sum(self.accepted_block)

    @property
    def acceptance_length_product(self) -> float:
        return 1 + sum(self.accepted_product)

    @property
    def conditional(self) -> tuple[float, ...]:
        """[K] P(depth j accepted | depth j-1 accepted), under rejection sampling."""
        before = (1.0, *self.accepted[:-1])
        return tuple(a / b if b else 0.0 for a, b in zip(self.accepted, before, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "conditional": self.conditional,
            "acceptance_length_target_only": self.acceptance_length_target_only,
            "acceptance_length_block": self.acceptance_length_block,
            "acceptance_length_product": self.acceptance_length_product,
        }


@torch.no_grad()
def statistics(
    head: MtpHead,
    batches: Iterable[TrainBatch],
    embed_weight: Tensor,
    lm_head_weight: Tensor,
    *,
    depth: int,
    temperature: float,
) -> dict[str, Tensor]:
    """`anchor_statistics` [K,N] of the heads over all batches of text. Raises ValueError where they have no anchor."""
    drafts = ((anchor_rows(head, batch, embed_weight, depth), batch) for batch in batches)
    return join([anchor_statistics(rows, batch, lm_head_weight, temperature=temperature) for rows, batch in drafts])


@torch.no_grad()
def score_rows(
    drafts: Iterable[tuple[Tensor, TrainBatch]],
    lm_head_weight: Tensor,
    *,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Acceptance:
    """drafts: the heads' output [K,N,D] at a batch's anchors, with the batch. chunk_elements: logits held at once."""
    parts = [
        anchor_statistics(rows, batch, lm_head_weight, temperature=temperature, chunk_elements=chunk_elements)
        for rows, batch in drafts
    ]
    return acceptance_of(join(parts), temperature)


@torch.no_grad()
def anchor_statistics(
    rows: Tensor,
    batch: TrainBatch,
    lm_head_weight: Tensor,
    *,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> dict[str, Tensor]:
    """Statistics [K,N] of the heads' output [K,N,D] at a batch's anchors, from one sweep of the vocabulary."""
    step = max(1, chunk_elements // (rows.shape[0] * lm_head_weight.shape[0]))
    parts = []
    for start in range(0, max(1, rows.shape[1]), step):
        where = slice(start, start + step)
        # a position is the target of up to K anchors: its logits are computed once
        positions, which = batch.target_index[:, where].unique(return_inverse=True)
        target = (batch.hidden[positions], which)
        parts.append(_statistics(rows[:, where], target, batch.labels[:, where], lm_head_weight, temperature))
    return join(parts)


def join(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics [K,n] of several batches as one [K,N]. Raises ValueError without an anchor."""
    if not parts or not any(part["alpha"].shape[1] for part in parts):
        raise BadInput("text to score: 0 anchors; it needs sequences longer than the draft depth")
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def accepted_by_rule(s: dict[str, Tensor]) -> dict[str, Tensor]:
    """[K,N] by rule, what each anchor adds to P(first j drafts accepted), from `anchor_statistics`."""
    text = (s["target_logprob"], s["draft_logprob"])
    greedy = (torch.zeros_like(s["top_logweight"]), s["top_logweight"])
    return {
        "target_only": accepted_at_anchors(s["top_prob"], *greedy),
        "rejection": accepted_at_anchors(s["alpha"], *text),
        "block": accepted_at_anchors(s["alpha"], *text, rule="block"),
    }


def acceptance_of(s: dict[str, Tensor], temperature: float) -> Acceptance:
    """Means over anchors of the statistics [K,N] of `anchor_statistics`."""
    block = accepted_by_rule(s)["block"].mean(1)
    sampled = expected_acceptance(s["alpha"], s["target_logprob"], s["draft_logprob"])
    greedy = expected_acceptance(s["top_prob"], torch.zeros_like(s["top_logweight"]), s["top_logweight"])
    return Acceptance(
        temperature=temperature,
        num_anchors=s["alpha"].shape[1],
        alpha=tuple(s["alpha"].double().mean(dim=1).tolist()),
        accepted=tuple(sampled.probability.tolist()),
        accepted_se=tuple(sampled.standard_error.tolist()),
        acceptance_length=sampled.acceptance_length.item(),
        acceptance_length_se=sampled.acceptance_length_error.item(),
        accepted_target_only=tuple(greedy.probability.tolist()),
        accepted_block=tuple(block.tolist()),
        accepted_product=tuple(s["alpha"].double().cumprod(0).mean(1).tolist()),
        entropy_nats=s["target_entropy"][0].double().mean().item(),
    )


def _statistics(
    draft: Tensor, target: tuple[Tensor, Tensor], tokens: Tensor, weight: Tensor, temperature: float
) -> dict[str, Tensor]:
    """[K,n,D] draft rows, [m,D] target rows with which of them [K,n] go with the draft's, [K,n] tokens of the text ->
    statistics [K,n]."""
    shape, (rows, which) = tokens.shape, target
    draft_logits, target_logits = draft.flatten(0, 1) @ weight.T, (rows @ weight.T)[which.flatten()]
    found = tv_statistics(draft_logits, target_logits, tokens=tokens.flatten(), temperature=temperature)
    is_top = draft_logits.argmax(dim=-1) == tokens.flatten()
    columns = {
        "alpha": found.alpha,
        "target_logprob": found.target_logprob,
        "draft_logprob": found.draft_logprob,
        "target_entropy": found.target_entropy,
        "top_prob": found.target_prob_of_draft_argmax,
        "top_logweight": torch.where(is_top, 0.0, -torch.inf),
    }
    return {name: column.reshape(shape).cpu() for name, column in columns.items()}


@torch.no_grad()
def sequence_entropies(
    batches: Iterable[tuple[TrainBatch, Tensor]], lm_head_weight: Tensor, *, temperature: float
) -> list[float]:
    """Mean target entropy (nats) of every sequence over its supervised tokens, at `temperature`.

    batches: each with its loss mask [T]. Sequences without a supervised token are left out.
    """
    found: list[float] = []
    step = max(1, CHUNK_ELEMENTS // lm_head_weight.shape[0])
    for batch, loss_mask in batches:
        bounds = batch.cu_seqlens.tolist()
        for a, b in itertools.pairwise(bounds):
            # token t is predicted at position t - 1
            read_at = (loss_mask[a + 1 : b].nonzero().squeeze(1) + a).to(batch.hidden.device)
            total = 0.0
            for rows in read_at.split(step):
                logp = torch.log_softmax((batch.hidden[rows] @ lm_head_weight.T) / temperature, dim=-1)
                total -= (logp.exp() * logp.clamp_min(-1e4)).sum().item()
            if read_at.numel():
                found.append(total / read_at.numel())
    return found
