"""linear_rows: any function of one draft row and one target row, from hidden states, chunk by chunk in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_kernels.linear import driver
from bebop_kernels.linear.driver import Inputs, Use
from bebop_kernels.rows import Rows, chunk_rows, normalise
from bebop_kernels.tensor_parallel import Group

# (draft rows [C, V], all target rows of the chunk [R, V], the target row of each draft row [C], depth, anchors as a
#  slice, whether the gradient is wanted) -> value [C], alpha [C], and the gradient of value on the scaled draft logits
#  [C, V], which the caller may overwrite, or None
RowFunction: TypeAlias = Callable[[Rows, Rows, Tensor, int, slice, bool], tuple[Tensor, Tensor, Tensor | None]]


def linear_rows(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    row_function: RowFunction,
    *,
    temperature: float = 1.0,
    tp_group: Group = None,
) -> tuple[Tensor, Tensor]:
    """value [K, N] with gradient, alpha [K, N] without. Arguments and errors as in linear_tv_overlap."""
    Inputs(draft_hidden, target_hidden, weight, target_index, temperature, tp_group).check()
    want_grad = torch.is_grad_enabled() and (draft_hidden.requires_grad or weight.requires_grad)
    tensors = draft_hidden, target_hidden.detach(), weight, target_index
    outputs: tuple[Tensor, Tensor] = _LinearRows.apply(  # type: ignore[no-untyped-call]
        *tensors, functools.partial(sweep_rows, row_function), (float(temperature), tp_group), want_grad
    )
    return outputs


def sweep_rows(row_function: RowFunction, inputs: Inputs, scale: Tensor | None, want_grad: bool, use: Use) -> None:
    draft_hidden, weight, temperature, group = inputs.draft_hidden, inputs.weight, inputs.temperature, inputs.group
    for anchors, target_hidden, index in inputs.chunks(chunk_rows(len(weight), group, weight.device)):
        target = normalise(F.linear(target_hidden, weight), temperature, "target_hidden", group)
        for k in range(len(draft_hidden)):
            draft = normalise(F.linear(draft_hidden[k, anchors], weight), temperature, "draft_hidden", group)
            value, alpha, grad = row_function(draft, target, index[k], k, anchors, want_grad)
            if grad is not None:
                grad = grad.div_(temperature) if scale is None else grad.mul_(scale[k, anchors, None] / temperature)
                grad = grad.to(weight.dtype)
            use((k, anchors), value, alpha, grad)
            del draft, grad  # [C, V] buffers, freed before the next depth makes its own


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.sweep, ctx.settings, want_grad = arguments
        ctx.recompute = want_grad and tensors[2].requires_grad
        inputs = Inputs(*tensors, *ctx.settings)
        value, alpha, row_grad = driver.forward(ctx.sweep, inputs, want_grad and not ctx.recompute)
        ctx.save_for_backward(*(tensors if ctx.recompute else (row_grad,) if want_grad else ()))
        ctx.mark_non_differentiable(alpha)
        return value, alpha

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor, _: None) -> tuple[Tensor | None, ...]:
        grad_weight = None
        if ctx.recompute:
            inputs = Inputs(*ctx.saved_tensors, *ctx.settings)
            grad_draft, grad_weight = driver.backward(ctx.sweep, inputs, grad_value)
        else:
            grad_draft = driver.scale_rows(ctx.saved_tensors[0], grad_value)
        return grad_draft, None, grad_weight, None, None, None, None
