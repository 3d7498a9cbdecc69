"""Runs draft heads on a text and compares their distributions with the policy's, at every depth of every draft.

Anchor n is a position of the text at which a draft starts. At depth k the head has read the text's own tokens so far
(teacher forcing). p is the policy's distribution there, q the head's, both at the same temperature; y the text's token.

Shapes: T tokens of a packed batch, K depths, N anchors, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from bebop_kernels import tv_statistics
from torch import Tensor

from bebop.data.batches import TrainBatch
from bebop.errors import BadInput
from bebop.head_training.objective import anchor_rows
from bebop.mtp import MtpHead
from bebop.spec import RULES, DraftScores

CHUNK_ELEMENTS = 1 << 24  # logits held at once
PER_DEPTH = (
    "alpha",
    "target_logprob",
    "draft_logprob",
    "target_entropy",
    "draft_entropy",
    "target_prob_of_draft_argmax",
    "is_draft_argmax",
    "kl",
)


@dataclass(frozen=True, kw_only=True)
class AnchorScores(DraftScores):
    """Scores of N anchors, on the CPU: the fields of DraftScores, and

    target_entropy, draft_entropy, kl [K, N] in nats, kl = KL(p || q). document long [N]: number of the anchor's
    document, below num_documents; anchors of one document are correlated. position long [N]: index of the anchor in its
    document, from 0.
    """

    target_entropy: Tensor
    draft_entropy: Tensor
    kl: Tensor
    document: Tensor
    position: Tensor
    num_documents: int
    temperature: float

    @property
    def entropy_nats(self) -> Tensor:
        """float64 [N] target entropy at the first draft's position."""
        return self.target_entropy[0].double()

    @cached_property
    def accepted(self) -> dict[str, Tensor]:
        """float64 [K, N] under a rule; the mean over anchors is an unbiased estimate of P(first j tokens accepted)."""
        return {name: RULES[name].expected(self) for name in RULES}

    def length(self, rule: str) -> Tensor:
        """float64 [N] expected acceptance length, in tokens per target forward."""
        return 1 + self.accepted[rule].sum(0)

    def where(self, chosen: Tensor) -> AnchorScores:
        """The anchors at which the mask, bool [N], is True. Documents keep their numbers."""
        parts: dict[str, Any] = {name: getattr(self, name)[:, chosen] for name in PER_DEPTH}
        if self.sampled_logprob is not None:
            parts["sampled_logprob"] = self.sampled_logprob[:, chosen]
        return replace(self, document=self.document[chosen], position=self.position[chosen], **parts)

    def of_documents(self, documents: Sequence[int]) -> AnchorScores:
        """The anchors of these documents. Documents keep their numbers."""
        return self.where(torch.isin(self.document, torch.tensor(list(documents))))


@torch.no_grad()
def score_anchors(
    head: MtpHead,
    batch: TrainBatch,
    embed_weight: Tensor,
    lm_head_weight: Tensor,
    *,
    temperature: float,
    sampled_logprobs: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> AnchorScores:
    """Score the head's drafts at the anchors of a batch. batch.target_index gives the number of depths.

    batch: token ids and the policy's hidden states, after its final norm. embed_weight, lm_head_weight [V, D]: the
    policy's. sampled_logprobs [T]: log-probabilities of the tokens under the older policy that sampled them; None: this
    policy sampled them. chunk_elements: logits held at once. Documents are numbered as in the batch.
    """
    drafts = anchor_rows(head, batch, embed_weight, len(batch.target_index))
    step = max(1, chunk_elements // (len(drafts) * len(lm_head_weight)))
    parts = []
    for start in range(0, max(1, drafts.shape[1]), step):
        some = slice(start, start + step)
        # a position is the target of up to K anchors: its logits are computed once
        positions, which = batch.target_index[:, some].unique(return_inverse=True)
        target_logits = (batch.hidden[positions] @ lm_head_weight.T)[which.flatten()]
        draft_logits = drafts[:, some].flatten(0, 1) @ lm_head_weight.T
        tokens = batch.labels[:, some]
        parts.append(_compare(draft_logits, target_logits, tokens, temperature))
    sampled = None if sampled_logprobs is None else sampled_logprobs[batch.target_index + 1].cpu()
    return AnchorScores(
        **{name: torch.cat([part[name] for part in parts], dim=1) for name in PER_DEPTH},
        sampled_logprob=sampled,
        document=(torch.searchsorted(batch.cu_seqlens, batch.anchors, right=True) - 1).cpu(),
        position=batch.position_ids[batch.anchors].cpu(),
        num_documents=len(batch.cu_seqlens) - 1,
        temperature=temperature,
    )


def score_batches(
    head: MtpHead, batches: Iterable[TrainBatch], embed_weight: Tensor, lm_head_weight: Tensor, *, temperature: float
) -> AnchorScores:
    """`score_anchors` over all batches of a text. Numbers documents in order. Raises ValueError without an anchor."""
    return concatenate(
        [score_anchors(head, batch, embed_weight, lm_head_weight, temperature=temperature) for batch in batches]
    )


def concatenate(parts: Sequence[AnchorScores]) -> AnchorScores:
    """Scores of several texts as one; document numbers continue. Raises ValueError without an anchor."""
    if not any(len(part.document) for part in parts):
        raise BadInput("text to score: got 0 anchors, expected sequences longer than the draft depth")
    first = list(itertools.accumulate((part.num_documents for part in parts), initial=0))
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in PER_DEPTH}
    sampled = [part.sampled_logprob for part in parts if part.sampled_logprob is not None]
    return replace(
        parts[0],
        **joined,
        sampled_logprob=torch.cat(sampled, dim=1) if sampled else None,
        document=torch.cat([part.document + start for part, start in zip(parts, first, strict=False)]),
        position=torch.cat([part.position for part in parts]),
        num_documents=first[-1],
    )


def _compare(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """Logits [K*n, V] and the text's tokens [K, n] -> the fields of PER_DEPTH [K, n]."""
    statistics = tv_statistics(draft_logits, target_logits, tokens=tokens.flatten(), temperature=temperature)
    fields = statistics._asdict() | {"is_draft_argmax": draft_logits.argmax(-1) == tokens.flatten()}
    return {name: fields[name].reshape(tokens.shape).cpu() for name in PER_DEPTH}


@torch.no_grad()
def sequence_entropies(
    batches: Iterable[tuple[TrainBatch, Tensor]], lm_head_weight: Tensor, *, temperature: float
) -> list[float]:
    """Mean target entropy (nats) of each sequence over its supervised tokens, at `temperature`.

    batches: each with its loss mask [T]. Sequences without a supervised token are left out.
    """
    means: list[float] = []
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
                means.append(total / read_at.numel())
    return means
