"""tv_statistics in Triton: the rows' normalisers, then all sums in one sweep over both.

Values of single tokens (the target's probability of the draft's argmax, log-probabilities of `tokens`) are gathered
afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bebop_kernels._triton import launch
from bebop_kernels._triton import rows as kernels
from bebop_kernels._triton.launch import grid_of, scales, unavailable, unit_columns
from bebop_kernels.rows import check_sums, safe

__all__ = ["statistics", "unavailable"]


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return list(draft.new_zeros(5 if tokens is None else 7, num_rows, dtype=torch.float32))
    sums = launch.sums(draft, target, temperature, None)
    check_sums("draft_logits", sums[:, 1])
    check_sums("target_logits", sums[:, 3])
    grid = grid_of(draft)
    parts = draft.new_empty(grid.splits, num_rows, 4, dtype=torch.float32)
    best = draft.new_empty(grid.splits, num_rows, dtype=torch.int32)
    strides = draft.stride(0), target.stride(0)
    kernels.row_statistics[grid.programs](
        draft, target, sums, parts, best, vocab_size, *strides, grid.span, *scales(temperature), **grid.options
    )
    alpha, *nats = parts.sum(0).unbind(1)
    target_entropy, draft_entropy, kl = (value * math.log(2) for value in nats)
    # A row of -inf has no argmax. Any column will do: its probability is 0, or arbitrary if the draft is all -inf.
    argmax = best.amin(0).long()
    argmax = argmax.where(argmax < vocab_size, 0)
    fields = [
        alpha.clamp(max=1),
        target_entropy,
        draft_entropy,
        _logprobs(target, argmax, sums[:, 2:], temperature).exp(),
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
    return (at - safe(peak)) / temperature - total.masked_fill(total == 0, 1).log()
