"""tv_statistics in Triton: the rows' normalisers, then everything else in one sweep over both.

What belongs to single tokens (the target's probability of the draft's argmax, log-probabilities of `tokens`) is
gathered after it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bebop_kernels import triton_launch as launch
from bebop_kernels import triton_rows as kernels
from bebop_kernels.triton_rows import num_splits, scales, span_of, tile_for, unavailable, unit_columns

__all__ = ["statistics", "unavailable"]


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return list(draft.new_zeros(5 if tokens is None else 7, num_rows, dtype=torch.float32))
    sums = launch.sums(draft, target, temperature, None)
    launch.check("draft_logits", sums[:, 1])
    launch.check("target_logits", sums[:, 3])
    splits = num_splits(num_rows, vocab_size, draft.device)
    parts = draft.new_empty(splits, num_rows, 4, dtype=torch.float32)
    best = draft.new_empty(splits, num_rows, dtype=torch.int32)
    tile = tile_for(vocab_size)
    kernels.row_statistics[(num_rows, splits)](
        draft,
        target,
        sums,
        parts,
        best,
        vocab_size,
        draft.stride(0),
        target.stride(0),
        span_of(vocab_size, splits),
        *scales(temperature),
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    alpha, *nats = parts.sum(0).unbind(1)
    target_entropy, draft_entropy, kl = (value * math.log(2) for value in nats)
    # A row of -inf has no maximum among its columns: any will do, its probability is 0 or the target's to it.
    favourite = best.amin(0).long()
    favourite = favourite.where(favourite < vocab_size, 0)
    fields = [
        alpha.clamp(max=1),
        target_entropy,
        draft_entropy,
        _logprobs(target, favourite, sums[:, 2:], temperature).exp(),
        kl.clamp(min=0),
    ]
    if tokens is not None:
        fields += [
            _logprobs(target, tokens, sums[:, 2:], temperature),
            _logprobs(draft, tokens, sums, temperature),
        ]
    return fields


def _logprobs(logits: Tensor, tokens: Tensor, sums: Tensor, temperature: float) -> Tensor:
    peak, total = sums[:, 0], sums[:, 1]
    at = logits.gather(1, tokens[:, None]).squeeze(1).float()
    return (at - peak.masked_fill(peak == -torch.inf, 0)) / temperature - total.masked_fill(total == 0, 1).log()
