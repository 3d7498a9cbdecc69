"""linear_tv_overlap: tv_overlap of hidden states under a shared head, without a [rows, V] tensor that outlives a chunk.

| input         | gradient of alpha[k, n]                                                    |
|---------------|----------------------------------------------------------------------------|
| draft_hidden  | G W, G the row gradient of tv_overlap on the draft logits W draft_hidden   |
| weight        | G^T draft_hidden, only where the weight requires gradient                  |
| target_hidden | none, the target is a constant                                             |

The weights of an end-to-end loss need every alpha before any gradient. So for a frozen head forward makes the unscaled
G W [K, N, D] while a chunk's logits are there, and backward multiplies it by the weights; for a trained head, whose
gradient sums over rows, backward makes the logits anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.dispatch import check_impl, load
from bebop_kernels.linear_rows import check_linear, scale_rows
from bebop_kernels.tensor_parallel import group_name, group_of


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
    of target_hidden that each depth and anchor is judged by. With `tp_group`, weight is this rank's shard of V (of any
    height, 0 too), the hidden states are whole on every rank, and so is their gradient. Returns alpha [K, N] float32
    (float64 for float64 inputs). Raises ValueError naming the argument on wrong shapes, dtypes, devices, indices, NaN,
    +inf, temperature, a sharded weight without its group, or an `impl` that cannot run here.
    """
    check_impl(impl)
    check_linear(draft_hidden, target_hidden, weight, target_index, temperature, tp_group)
    want_grad = torch.is_grad_enabled() and draft_hidden.requires_grad and not weight.requires_grad
    plain = float(temperature), group_name(tp_group), impl
    return _linear(draft_hidden, target_hidden.detach(), weight, target_index, *plain, want_grad)[0]


@torch.library.custom_op("bebop::linear_tv_overlap", mutates_args=())
def _linear(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: str,
    impl: str,
    want_row_grad: bool,
) -> tuple[Tensor, Tensor]:
    inputs = draft_hidden, target_hidden, weight, target_index
    chosen = load(impl, "linear", draft_hidden)
    alpha, row_grad = chosen.forward(*inputs, temperature, group_of(group), want_row_grad)
    return alpha, draft_hidden.new_empty(0) if row_grad is None else row_grad


@_linear.register_fake
def _(draft_hidden, target_hidden, weight, target_index, temperature, group, impl, want_row_grad):
    dtype = torch.float64 if draft_hidden.dtype == torch.float64 else torch.float32
    alpha = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=dtype)
    return alpha, torch.empty_like(draft_hidden) if want_row_grad else draft_hidden.new_empty(0)


@torch.library.custom_op("bebop::linear_tv_overlap_backward", mutates_args=())
def _linear_backward(
    grad_alpha: Tensor,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = draft_hidden, target_hidden, weight, target_index
    return load(impl, "linear", draft_hidden).backward(grad_alpha, *inputs, temperature, group_of(group))


@_linear_backward.register_fake
def _(grad_alpha, draft_hidden, target_hidden, weight, target_index, temperature, group, impl):
    return torch.empty_like(draft_hidden), torch.empty_like(weight)


def _keep(ctx, inputs, output):
    *tensors, temperature, group, impl, ctx.row_grad = inputs
    ctx.plain = temperature, group, impl
    ctx.save_for_backward(*((output[1],) if ctx.row_grad else tensors))
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_alpha, _):
    grad_weight = None
    if ctx.row_grad:
        grad_draft = scale_rows(*ctx.saved_tensors, grad_alpha)
    else:
        grad_draft, grad_weight = _linear_backward(grad_alpha, *ctx.saved_tensors, *ctx.plain)
    return grad_draft, None, grad_weight, *[None] * 5


_linear.register_autograd(_differentiate, setup_context=_keep)
