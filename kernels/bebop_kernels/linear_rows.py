"""Any function of one draft row and one target row, from hidden states under a shared head, chunk by chunk in torch.

Anchors go in chunks. The target rows that a chunk needs are normalised once and shared by its K depths, which look at
the same positions shifted by one. For a frozen head the row gradients G W [K, N, D] are made in forward, while the
logits are there, and backward only scales them; for a trained head backward recomputes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_kernels.rows import Rows, check_float, check_ids, check_range, check_temperature, chunk_rows, normalise
from bebop_kernels.tensor_parallel import all_sum, check_whole

# (draft rows [C, V], all target rows of the chunk [R, V], row of each draft row in them [C], depth, anchors a slice,
#  gradient wanted) -> value [C], alpha [C], gradient of value on the scaled draft logits [C, V] or None
RowFunction = Callable[[Rows, Rows, Tensor, int, slice, bool], tuple[Tensor, Tensor, Tensor | None]]


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
    """value [K, N] with gradient, alpha [K, N] without. Arguments and errors as in linear_tv_overlap."""
    check_linear(draft_hidden, target_hidden, weight, target_index, temperature, tp_group)
    want_grad = torch.is_grad_enabled() and (draft_hidden.requires_grad or weight.requires_grad)
    sweep = Sweep(row_function, float(temperature), tp_group)
    return _LinearRows.apply(draft_hidden, target_hidden.detach(), weight, target_index, sweep, want_grad)


def check_linear(draft_hidden, target_hidden, weight, target_index, temperature, tp_group) -> None:
    """Everything about the arguments of a linear kernel that needs no look at their values."""
    check_temperature(temperature)
    check_whole("weight", weight, tp_group)
    check_float("draft_hidden", draft_hidden, "[K, N, D]", None, None, None)
    depths, anchors, width = draft_hidden.shape
    check_float("target_hidden", target_hidden, "[M, D] with draft_hidden's D", None, width, like=draft_hidden)
    check_float("weight", weight, "[V, D] with draft_hidden's D", None, width, like=draft_hidden)
    for argument, value in (("target_hidden", target_hidden), ("weight", weight)):
        if value.dtype != draft_hidden.dtype:
            raise ValueError(f"{argument}: dtype {value.dtype}, expected {draft_hidden.dtype} as draft_hidden")
    check_ids("target_index", target_index, (depths, anchors), like=draft_hidden)


class Sweep:
    """One row function at one temperature, over chunks of anchors and all depths."""

    def __init__(self, row_function: RowFunction, temperature: float, group: Any) -> None:
        self.row_function, self.temperature, self.group = row_function, temperature, group

    def forward(self, draft_hidden, target_hidden, weight, target_index, want_row_grad):
        """value, alpha [K, N], and the gradient of value on draft_hidden [K, N, D] where wanted."""
        dtype = torch.float64 if draft_hidden.dtype == torch.float64 else torch.float32
        value = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=dtype)
        alpha = torch.empty_like(value)
        row_grad = torch.empty_like(draft_hidden) if want_row_grad else None

        def use(k, anchors, chunk_value, chunk_alpha, grad):
            value[k, anchors], alpha[k, anchors] = chunk_value, chunk_alpha
            if row_grad is not None:
                row_grad[k, anchors] = grad.to(weight.dtype) @ weight

        self._sweep(draft_hidden, target_hidden, weight, target_index, want_row_grad, use)
        if row_grad is not None:
            all_sum(row_grad.div_(self.temperature), self.group)
        return value, alpha, row_grad

    def backward(self, grad_value, draft_hidden, target_hidden, weight, target_index):
        """Gradients on draft_hidden and weight, with the logits made anew."""
        grad_draft = torch.empty_like(draft_hidden)
        grad_weight = torch.zeros_like(weight)

        def use(k, anchors, _value, _alpha, grad):
            grad = grad.mul_(grad_value[k, anchors, None] / self.temperature).to(weight.dtype)
            grad_draft[k, anchors] = grad @ weight
            grad_weight.addmm_(grad.T, draft_hidden[k, anchors])

        self._sweep(draft_hidden, target_hidden, weight, target_index, True, use)
        return all_sum(grad_draft, self.group), grad_weight

    def _sweep(self, draft_hidden, target_hidden, weight, target_index, want_grad, use) -> None:
        check_range("target_index", target_index, target_hidden.shape[0], "rows of target_hidden")
        step = chunk_rows(weight.shape[0], self.group)
        for a in range(0, draft_hidden.shape[1], step):
            anchors = slice(a, min(a + step, draft_hidden.shape[1]))
            needed, index = target_index[:, anchors].unique(return_inverse=True)
            target_logits = F.linear(target_hidden[needed], weight)
            target = normalise(target_logits, self.temperature, "target_hidden", self.group)
            for k in range(draft_hidden.shape[0]):
                draft_logits = F.linear(draft_hidden[k, anchors], weight)
                draft = normalise(draft_logits, self.temperature, "draft_hidden", self.group)
                use(k, anchors, *self.row_function(draft, target, index[k], k, anchors, want_grad))


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_hidden, target_hidden, weight, target_index, sweep, want_grad):
        ctx.sweep, ctx.recompute = sweep, want_grad and weight.requires_grad
        inputs = draft_hidden, target_hidden, weight, target_index
        value, alpha, row_grad = sweep.forward(*inputs, want_grad and not ctx.recompute)
        ctx.save_for_backward(*(inputs if ctx.recompute else (row_grad,) if want_grad else ()))
        ctx.mark_non_differentiable(alpha)
        return value, alpha

    @staticmethod
    def backward(ctx, grad_value, _):
        if not ctx.recompute:
            return scale_rows(*ctx.saved_tensors, grad_value), None, None, None, None, None
        grad_draft, grad_weight = ctx.sweep.backward(grad_value, *ctx.saved_tensors)
        return grad_draft, None, grad_weight, None, None, None


def scale_rows(row_grad: Tensor, grad_value: Tensor) -> Tensor:
    """row_grad [K, N, D] times grad_value [K, N], multiplied in the wider type and rounded once."""
    return torch.mul(row_grad, grad_value[..., None], out=torch.empty_like(row_grad))
