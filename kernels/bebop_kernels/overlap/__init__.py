"""tv_overlap: alpha = sum_v min(p_v, q_v) = 1 - TV(p, q) of two sets of logits: the probability that rejection
sampling accepts a draft token.

| input         | gradient of alpha                                          |
|---------------|------------------------------------------------------------|
| draft_logits  | q_j (S - [q_j > p_j]) / T,  S = sum_v [q_v > p_v] q_v      |
| target_logits | none: the target is a constant                             |

Bebop writes -q_j ([q_j <= p_j] - S') for the loss 1 - alpha, with S' = 1 - S. Written with S, the gradient is exactly 0
where p == q. Forward and backward are operators of torch.library, so torch.compile captures them without graph breaks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.arguments import check_logits
from bebop_kernels.dispatch import load
from bebop_kernels.tensor_parallel import Group, group_name, group_of


def tv_overlap(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Group = None,
    impl: str = "auto",
) -> Tensor:
    """Acceptance probability of one draft token per row, under rejection sampling.

    draft_logits, target_logits [N, V], any float types, -inf allowed; with `tp_group`, each rank's shard of V, which
    may differ in width and may be empty. Returns alpha [N] in [0, 1], float32 (float64 if both inputs are). Only
    draft_logits gets a gradient. Raises ValueError that names the argument for wrong shapes or devices, NaN, +inf, a
    temperature not above 0, a shard without its group, or an `impl` that cannot run here.
    """
    check_logits(draft_logits, target_logits, temperature, impl, tp_group)
    outputs: tuple[Tensor, Tensor] = _overlap(
        draft_logits, target_logits.detach(), float(temperature), group_name(tp_group), impl
    )
    return outputs[0]


@torch.library.custom_op("bebop::tv_overlap", mutates_args=())
def _overlap(
    draft_logits: Tensor, target_logits: Tensor, temperature: float, group: str, impl: str
) -> tuple[Tensor, Tensor]:
    alpha, saved = load(impl, "overlap", draft_logits, target_logits, sharded=bool(group)).forward(
        draft_logits, target_logits, temperature, group_of(group)
    )
    return alpha, saved


@_overlap.register_fake
def _(draft_logits: Tensor, target_logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    grad: Tensor = load(impl, "overlap", draft_logits, target_logits, sharded=bool(group)).backward(
        grad_alpha, draft_logits, target_logits, saved, temperature, group_of(group)
    )
    return grad


@_overlap_backward.register_fake
def _(grad_alpha: Tensor, draft_logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(draft_logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    draft_logits, target_logits, *ctx.settings = inputs
    ctx.save_for_backward(draft_logits, target_logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_alpha: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return _overlap_backward(grad_alpha, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_overlap.register_autograd(_differentiate, setup_context=_save)
