"""The formula of linear_tv_overlap: tv_overlap of the logits W h, all of them in memory."""

from __future__ import annotations

from torch import Tensor

from bebop_kernels.overlap import naive


def linear_tv_overlap(
    draft_hidden: Tensor, target_hidden: Tensor, weight: Tensor, target_index: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """alpha [K, N]."""
    target_logits = (target_hidden @ weight.T).detach()[target_index]
    return naive.tv_overlap(draft_hidden @ weight.T, target_logits, temperature=temperature)
