"""tv_statistics in chunked torch."""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.reference_overlap import overlap_rows
from bebop_kernels.rows import chunk_rows, normalise


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    num_rows, vocab_size = draft_logits.shape
    step = chunk_rows(vocab_size)
    chunks = [
        _chunk(
            draft_logits[a : a + step],
            target_logits[a : a + step],
            None if tokens is None else tokens[a : a + step, None],
            temperature,
        )
        for a in range(0, num_rows, step)
    ]
    if not chunks:
        return [draft_logits.new_empty(0, dtype=torch.float32)] * (5 if tokens is None else 7)
    return [torch.cat(field) for field in zip(*chunks, strict=True)]


def _chunk(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    draft = normalise(draft_logits, temperature, "draft_logits")
    target = normalise(target_logits, temperature, "target_logits")
    log_p, log_q = target.logprobs, draft.logprobs
    # xlogy-like: where p is 0 the term is 0, whatever the logarithm.
    p_log_p = (target.probs * log_p).masked_fill_(target.probs == 0, 0)
    q_log_q = (draft.probs * log_q).masked_fill_(draft.probs == 0, 0)
    p_log_q = (target.probs * log_q).masked_fill_(target.probs == 0, 0)
    fields = [
        overlap_rows(draft, target.probs, False)[0],
        -p_log_p.sum(-1),
        -q_log_q.sum(-1),
        target.probs.gather(1, draft.probs.argmax(-1, keepdim=True)).squeeze(1),
        (p_log_p - p_log_q).sum(-1).clamp_(min=0),
    ]
    if tokens is not None:
        fields += [log_p.gather(1, tokens).squeeze(1), log_q.gather(1, tokens).squeeze(1)]
    return [field.float() for field in fields]
