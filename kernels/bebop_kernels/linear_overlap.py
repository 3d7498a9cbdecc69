"""linear_tv_overlap: tv_overlap of hidden states under a shared head, without a [rows, V] tensor that outlives a chunk.

| input         | gradient of alpha[k, n]                                                    |
|---------------|----------------------------------------------------------------------------|
| draft_hidden  | G W, G the row gradient of tv_overlap on the draft logits W draft_hidden   |
| weight        | G^T draft_hidden, only where the weight requires gradient                  |
| target_hidden | none, the target is a constant                                             |

Anchors go in chunks. The target rows that a chunk needs are normalised once and shared by its K depths, which look at
the same positions shifted by one. For a frozen head the row gradients G W [K, N, D] are made in forward, while the
logits are there, and backward only scales them; for a trained head backward recomputes the logits.

`linear_rows` is the same pass for any function of one draft row and one target row; the other losses are made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_kernels.overlap import overlap_rows
from bebop_kernels.rows import (
    Rows,
    all_sum,
    check_float,
    check_impl,
    check_indices,
    check_temperature,
    chunk_rows,
    normalise,
)

# (draft rows [C, V], all target rows of the chunk [R, V], row of each draft row in them [C], depth, anchors a slice,
#  gradient wanted) -> value [C], alpha [C], gradient of value on the scaled draft logits [C, V] or None
RowFunction = Callable[[Rows, Rows, Tensor, int, slice, bool], tuple[Tensor, Tensor, Tensor | None]]


def linear_tv_overlap(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Any = None,
    impl: str = "auto",
) -> Tensor:
    """Acceptance probability per depth and anchor, from hidden states and the head's weight.

    draft_hidden [K, N, D], target_hidden [M, D], weight [V, D] of one float type; target_index long [K, N], the row
    of target_hidden that each depth and anchor is judged by. With `tp_group`, weight is this rank's shard of V and
    the hidden states are whole on every rank. Returns alpha [K, N] float32 (float64 for float64 inputs). Raises
    ValueError naming the argument on wrong shapes, dtypes, indices, NaN, +inf or temperature.
    """
    check_impl(impl)

    def row_function(draft: Rows, target: Rows, index: Tensor, depth: int, anchors: slice, want_grad: bool):
        alpha, grad = overlap_rows(draft, target.probs[index], want_grad, tp_group)
        return alpha, alpha, grad

    return linear_rows(
        draft_hidden, target_hidden, weight, target_index, row_function, temperature=temperature, tp_group=tp_group
    )[0]


def linear_rows(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    row_function: RowFunction,
    *,
    temperature: float = 1.0,
    tp_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """value [K, N] with gradient, alpha [K, N] without, of a function of draft and target rows. Arguments as above."""
    check_temperature(temperature)
    check_float("draft_hidden", draft_hidden, "[K, N, D]", None, None, None)
    depths, anchors, width = draft_hidden.shape
    check_float("target_hidden", target_hidden, "[M, D] with draft_hidden's D", None, width)
    check_float("weight", weight, "[V, D] with draft_hidden's D", None, width)
    for argument, value in (("target_hidden", target_hidden), ("weight", weight)):
        if value.dtype != draft_hidden.dtype:
            raise ValueError(f"{argument}: dtype {value.dtype}, expected {draft_hidden.dtype} as draft_hidden")
    check_indices("target_index", target_index, (depths, anchors), target_hidden.shape[0], "rows of target_hidden")
    want_grad = torch.is_grad_enabled() and (draft_hidden.requires_grad or weight.requires_grad)
    pass_ = _Pass(row_function, float(temperature), tp_group)
    return _LinearRows.apply(draft_hidden, target_hidden.detach(), weight, target_index, pass_, want_grad)


class _Pass:
    """One sweep over anchors and depths; calls `use` with what each chunk gives."""

    def __init__(self, row_function: RowFunction, temperature: float, tp_group: Any) -> None:
        self.row_function, self.temperature, self.tp_group = row_function, temperature, tp_group

    def sweep(self, draft_hidden, target_hidden, weight, target_index, want_grad, use) -> None:
        step = chunk_rows(weight.shape[0])
        for a in range(0, draft_hidden.shape[1], step):
            anchors = slice(a, min(a + step, draft_hidden.shape[1]))
            needed, index = target_index[:, anchors].unique(return_inverse=True)
            target_logits = F.linear(target_hidden[needed], weight)
            target = normalise(target_logits, self.temperature, "target_hidden", self.tp_group)
            for k in range(draft_hidden.shape[0]):
                draft_logits = F.linear(draft_hidden[k, anchors], weight)
                draft = normalise(draft_logits, self.temperature, "draft_hidden", self.tp_group)
                use(k, anchors, *self.row_function(draft, target, index[k], k, anchors, want_grad))


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_hidden, target_hidden, weight, target_index, pass_, want_grad):
        dtype = torch.float64 if draft_hidden.dtype == torch.float64 else torch.float32
        value = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=dtype)
        alpha = torch.empty_like(value)
        recompute = want_grad and weight.requires_grad
        row_grad = torch.empty_like(draft_hidden) if want_grad and not recompute else None

        def use(k, anchors, chunk_value, chunk_alpha, grad):
            value[k, anchors], alpha[k, anchors] = chunk_value, chunk_alpha
            if row_grad is not None:
                row_grad[k, anchors] = grad.to(weight.dtype) @ weight

        pass_.sweep(draft_hidden, target_hidden, weight, target_index, row_grad is not None, use)
        if row_grad is not None:
            all_sum(row_grad.div_(pass_.temperature), pass_.tp_group)
        ctx.pass_ = pass_
        ctx.recompute = recompute
        ctx.save_for_backward(
            *((draft_hidden, target_hidden, weight, target_index) if recompute else (row_grad,) if want_grad else ())
        )
        ctx.mark_non_differentiable(alpha)
        return value, alpha

    @staticmethod
    def backward(ctx, grad_value, _):
        if not ctx.recompute:
            (row_grad,) = ctx.saved_tensors
            return row_grad * grad_value[..., None].to(row_grad.dtype), None, None, None, None, None
        draft_hidden, target_hidden, weight, target_index = ctx.saved_tensors
        grad_draft = torch.empty_like(draft_hidden)
        grad_weight = torch.zeros_like(weight)

        def use(k, anchors, _value, _alpha, grad):
            grad = grad.mul_(grad_value[k, anchors, None] / ctx.pass_.temperature).to(weight.dtype)
            grad_draft[k, anchors] = grad @ weight
            grad_weight.addmm_(grad.T, draft_hidden[k, anchors])

        ctx.pass_.sweep(draft_hidden, target_hidden, weight, target_index, True, use)
        return all_sum(grad_draft, ctx.pass_.tp_group), None, grad_weight, None, None, None
