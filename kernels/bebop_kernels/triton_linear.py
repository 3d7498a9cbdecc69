"""linear_tv_overlap: matrix products by torch's library into a buffer of one chunk's logits, the rows in Triton.

A chunk's target logits are made and normalised once and judged against by all its depths. The draft logits of one
depth at a time lie in a buffer in which their gradient replaces them, ready for the product with the weight.
Buffers hold what the products give, in the inputs' type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_kernels import triton_launch as launch
from bebop_kernels.rows import check_range
from bebop_kernels.tensor_parallel import all_sum, gather
from bebop_kernels.triton_rows import unavailable

__all__ = ["backward", "forward", "unavailable"]

# Bytes of one [rows, V] buffer; two live at once. Products of some thousand rows are bound by arithmetic, not by
# reading the weight.
CHUNK_BYTES = 512 << 20
MIN_CHUNK_ROWS = 128


def forward(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: Any,
    want_row_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    alpha = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=torch.float32)
    row_grad = torch.empty_like(draft_hidden, memory_format=torch.contiguous_format) if want_row_grad else None

    def use(k: int, anchors: slice, rows: _Rows) -> None:
        alpha[k, anchors] = rows.alpha
        if row_grad is not None:
            torch.mm(rows.gradient(None), weight, out=row_grad[k, anchors])

    _sweep(draft_hidden, target_hidden, weight, target_index, temperature, group, use)
    if row_grad is not None:
        all_sum(row_grad, group)
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
    grad_draft = torch.empty_like(draft_hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)

    def use(k: int, anchors: slice, rows: _Rows) -> None:
        gradient = rows.gradient(grad_alpha[k, anchors].contiguous())
        torch.mm(gradient, weight, out=grad_draft[k, anchors])
        grad_weight.add_(gradient.T @ draft_hidden[k, anchors])

    _sweep(draft_hidden, target_hidden, weight, target_index, temperature, group, use)
    return all_sum(grad_draft, group), grad_weight.to(weight.dtype)


class _Rows:
    """One depth's draft rows of a chunk, judged; `gradient` overwrites their logits."""

    def __init__(self, logits, target_logits, index, sums, target_sums, temperature, group) -> None:
        self._rows = logits, target_logits, index, sums, target_sums
        self._temperature = temperature
        alpha, self._over_mass = launch.overlap(*self._rows, temperature, group).unbind(1)
        self.alpha = alpha.clamp(max=1)

    def gradient(self, row_scale: Tensor | None) -> Tensor:
        return launch.gradient(*self._rows, self._over_mass, row_scale, self._temperature, out=self._rows[0])


def _sweep(draft_hidden, target_hidden, weight, target_index, temperature, group, use) -> None:
    check_range("target_index", target_index, target_hidden.shape[0], "rows of target_hidden")
    num_depths, num_anchors, _ = draft_hidden.shape
    step = _chunk_rows(weight, group)
    buffer = weight.new_empty(min(step, num_anchors), weight.shape[0])
    bad = {"target_hidden": [], "draft_hidden": []}
    for a in range(0, num_anchors, step):
        anchors = slice(a, min(a + step, num_anchors))
        needed, index = target_index[:, anchors].unique(return_inverse=True)
        target_logits = F.linear(target_hidden[needed], weight)
        target_sums = launch.sums(target_logits, None, temperature, group)
        bad["target_hidden"].append(target_sums[:, 1])
        for k in range(num_depths):
            logits = buffer[: anchors.stop - a]
            torch.mm(draft_hidden[k, anchors], weight.T, out=logits)
            sums = launch.sums(logits, None, temperature, group)
            bad["draft_hidden"].append(sums[:, 1])
            use(k, anchors, _Rows(logits, target_logits, index[k], sums, target_sums, temperature, group))
    for argument, parts in bad.items():
        if parts:
            launch.check(argument, torch.cat(parts))


def _chunk_rows(weight: Tensor, group: Any) -> int:
    """Anchors per chunk; the same on every rank."""
    height = weight.shape[0]
    if group is not None:
        height = int(gather(torch.tensor([height], device=weight.device), group).max())
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // max(height * weight.element_size(), 1))
