"""tv_overlap: alpha = sum_v min(p_v, q_v) = 1 - TV(p, q) of two sets of logits, the acceptance of rejection sampling.

| input         | gradient of alpha                                          |
|---------------|------------------------------------------------------------|
| draft_logits  | q_j (S - [q_j > p_j]) / T,  S = sum_v [q_v > p_v] q_v      |
| target_logits | none, the target is a constant                             |

This is Bebop's -q_j ([q_j <= p_j] - S') for the loss 1 - alpha with S' = 1 - S: written with S it is exactly 0 where
p == q. Forward and backward are operators of torch's library, which torch.compile takes whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.dispatch import check_impl, load
from bebop_kernels.rows import check_float, check_temperature
from bebop_kernels.tensor_parallel import check_whole, group_name, group_of


def tv_overlap(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Any = None,
    impl: str = "auto",
) -> Tensor:
    """Acceptance probability of one draft token per row, under rejection sampling.

    draft_logits, target_logits [N, V], any float types, -inf allowed; with `tp_group` each rank's shard of V, which
    may differ in width and be empty. Returns alpha [N] in [0, 1], float32 (float64 if both are). Gradient to
    draft_logits only. Raises ValueError naming the argument on wrong shapes, devices, NaN, +inf, a temperature that is
    not above 0, a shard without its group, or an `impl` that cannot run here.
    """
    check_impl(impl)
    check_temperature(temperature)
    for argument, value in (("draft_logits", draft_logits), ("target_logits", target_logits)):
        check_whole(argument, value, tp_group)
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape, like=draft_logits)
    return _overlap(draft_logits, target_logits.detach(), float(temperature), group_name(tp_group), impl)[0]


@torch.library.custom_op("bebop::tv_overlap", mutates_args=())
def _overlap(
    draft_logits: Tensor, target_logits: Tensor, temperature: float, group: str, impl: str
) -> tuple[Tensor, Tensor]:
    chosen = load(impl, "overlap", draft_logits, target_logits)
    return chosen.forward(draft_logits, target_logits, temperature, group_of(group))


@_overlap.register_fake
def _(draft_logits, target_logits, temperature, group, impl):
    both = draft_logits.dtype == target_logits.dtype == torch.float64
    alpha = draft_logits.new_empty(draft_logits.shape[0], dtype=torch.float64 if both else torch.float32)
    return alpha, alpha.new_empty(draft_logits.shape[0], 5)


@torch.library.custom_op("bebop::tv_overlap_backward", mutates_args=())
def _overlap_backward(
    grad_alpha: Tensor,
    draft_logits: Tensor,
    target_logits: Tensor,
    saved: Tensor,
    temperature: float,
    group: str,
    impl: str,
) -> Tensor:
    chosen = load(impl, "overlap", draft_logits, target_logits)
    return chosen.backward(grad_alpha, draft_logits, target_logits, saved, temperature, group_of(group))


@_overlap_backward.register_fake
def _(grad_alpha, draft_logits, target_logits, saved, temperature, group, impl):
    return torch.empty_like(draft_logits)


def _keep(ctx, inputs, output):
    draft_logits, target_logits, *ctx.plain = inputs
    ctx.save_for_backward(draft_logits, target_logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_alpha, _):
    return _overlap_backward(grad_alpha, *ctx.saved_tensors, *ctx.plain), None, None, None, None


_overlap.register_autograd(_differentiate, setup_context=_keep)
