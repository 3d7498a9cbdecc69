"""linear_tv_overlap: tv_overlap from hidden states under a shared head. No [rows, V] tensor outlives a chunk.

| input         | gradient of alpha[k, n]                                                    |
|---------------|----------------------------------------------------------------------------|
| draft_hidden  | G W, G the row gradient of tv_overlap on the draft logits W draft_hidden   |
| weight        | G^T draft_hidden, only if the weight requires gradient                     |
| target_hidden | none: the target is a constant                                             |

The weights of an end-to-end loss depend on every alpha, so they are known only after forward: see driver.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.dispatch import check_impl, load
from bebop_kernels.linear import driver
from bebop_kernels.linear.driver import Inputs
from bebop_kernels.tensor_parallel import Group, group_name, group_of


def linear_tv_overlap(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Group = None,
    impl: str = "auto",
) -> Tensor:
    """Acceptance probability per depth and anchor, from hidden states and the head's weight.

    draft_hidden [K, N, D], target_hidden [M, D], weight [V, D] of one float type; target_index long [K, N], the row of
    target_hidden for each depth and anchor. With `tp_group`, weight is this rank's shard of V (of any height, including
    0); the hidden states and their gradient are whole on every rank. Returns alpha [K, N] float32 (float64 for float64
    inputs). Raises ValueError that names the argument for wrong shapes, dtypes, devices or indices, NaN, +inf, a bad
    temperature, a sharded weight without its group, or an `impl` that cannot run here.
    """
    check_impl(impl)
    Inputs(draft_hidden, target_hidden, weight, target_index, temperature, tp_group).check()
    want_grad = torch.is_grad_enabled() and draft_hidden.requires_grad and not weight.requires_grad
    settings = float(temperature), group_name(tp_group), impl
    outputs: tuple[Tensor, Tensor] = _linear(
        draft_hidden, target_hidden.detach(), weight, target_index, *settings, want_grad
    )
    return outputs[0]


def _sweep(impl: str, hidden: Tensor, group: str) -> driver.Sweep:
    sweep: driver.Sweep = load(impl, "linear", hidden, sharded=bool(group)).sweep
    return sweep


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
    inputs = Inputs(draft_hidden, target_hidden, weight, target_index, temperature, group_of(group))
    alpha, _, row_grad = driver.forward(_sweep(impl, draft_hidden, group), inputs, want_row_grad)
    return alpha, draft_hidden.new_empty(0) if row_grad is None else row_grad


@_linear.register_fake
def _(draft_hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if draft_hidden.dtype == torch.float64 else torch.float32
    alpha = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=dtype)
    want_row_grad = arguments[-1]
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
    inputs = Inputs(draft_hidden, target_hidden, weight, target_index, temperature, group_of(group))
    return driver.backward(_sweep(impl, draft_hidden, group), inputs, grad_alpha)


@_linear_backward.register_fake
def _(
    grad_alpha: Tensor, draft_hidden: Tensor, target_hidden: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(draft_hidden), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, temperature, group, impl, ctx.row_grad = inputs
    ctx.settings = temperature, group, impl
    ctx.save_for_backward(*((output[1],) if ctx.row_grad else tensors))
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_alpha: Tensor, _: None) -> tuple[Tensor | None, ...]:
    grad_weight = None
    if ctx.row_grad:
        grad_draft = driver.scale_rows(ctx.saved_tensors[0], grad_alpha)
    else:
        grad_draft, grad_weight = _linear_backward(grad_alpha, *ctx.saved_tensors, *ctx.settings)
    return grad_draft, None, grad_weight, *[None] * 5


_linear.register_autograd(_differentiate, setup_context=_save)
