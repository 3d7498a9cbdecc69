"""linear_tv_overlap in chunked torch, by `linear_rows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.linear_rows import Sweep
from bebop_kernels.reference_overlap import overlap_rows
from bebop_kernels.rows import Rows


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def _sweep(temperature: float, group: Any) -> Sweep:
    def row_function(draft: Rows, target: Rows, index: Tensor, depth: int, anchors: slice, want_grad: bool):
        alpha, grad = overlap_rows(draft, target.probs[index], want_grad, group)
        return alpha, alpha, grad

    return Sweep(row_function, temperature, group)


def forward(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: Any,
    want_row_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    sweep = _sweep(temperature, group)
    alpha, _, row_grad = sweep.forward(draft_hidden, target_hidden, weight, target_index, want_row_grad)
    return alpha, row_grad


def backward(
    grad_alpha: Tensor,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: Any,
) -> tuple[Tensor, Tensor]:
    return _sweep(temperature, group).backward(grad_alpha, draft_hidden, target_hidden, weight, target_index)
