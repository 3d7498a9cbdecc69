"""linear_tv_overlap in chunked torch, as `linear_rows` of the overlap."""

from __future__ import annotations

from torch import Tensor

from bebop_kernels.linear.driver import Inputs, Use
from bebop_kernels.linear.rows import sweep_rows
from bebop_kernels.overlap.reference import overlap_rows, unavailable
from bebop_kernels.rows import Rows

__all__ = ["sweep", "unavailable"]


def sweep(inputs: Inputs, scale: Tensor | None, want_grad: bool, use: Use) -> None:
    def overlap(
        draft: Rows, target: Rows, index: Tensor, depth: int, anchors: slice, want_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        alpha, grad = overlap_rows(draft, target.probs[index], want_grad, inputs.group)
        return alpha, alpha, grad

    sweep_rows(overlap, inputs, scale, want_grad, use)
