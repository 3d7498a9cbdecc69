"""tv_overlap on CPUs, whose backward leaves out the tiles of the vocabulary where the draft has next to no mass.

|gradient of alpha on draft logit j| = q_j |S - [q_j > p_j]| / T <= q_j / T, so a tile left at 0 costs at most its mass
under q over T, summed over its tokens; forward knows that mass. A row leaves out tiles below tolerance / (number of
tiles), so its gradient is off by at most tolerance / T in the sum of absolute values. alpha is exact. Optional: nothing
else here uses it, and the linear form, whose time is matrix products over all tiles, would gain nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels import cpu_overlap
from bebop_kernels.dispatch import choose
from bebop_kernels.rows import check_float, check_temperature


def tv_overlap_skipping(
    draft_logits: Tensor, target_logits: Tensor, tolerance: float, *, temperature: float = 1.0
) -> Tensor:
    """`tv_overlap`, alpha [N], with a gradient that is off by at most tolerance / T times its alpha's in sum |.| a row.

    draft_logits, target_logits [N, V] float32, bfloat16 or float16 on the CPU. tolerance: above 0, at most 1. Raises
    ValueError naming the argument, and where the CPU kernel cannot run.
    """
    check_temperature(temperature)
    if not 0 < tolerance <= 1:
        raise ValueError(f"tolerance={tolerance!r}: expected a number above 0 and at most 1")
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape, like=draft_logits)
    choose("cpu", "overlap", draft_logits.device, (draft_logits.dtype, target_logits.dtype))
    return _Skipping.apply(draft_logits, target_logits.detach(), float(tolerance), float(temperature))


class _Skipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_logits, target_logits, tolerance, temperature):
        from bebop_kernels.cpu_loops import TILE

        num_rows, width = draft_logits.shape
        masses = torch.empty(num_rows, -(-width // TILE))
        alpha, saved = cpu_overlap.forward(draft_logits, target_logits, temperature, None, masses=masses)
        ctx.save_for_backward(draft_logits, target_logits, saved, masses)
        ctx.temperature, ctx.least = temperature, tolerance / max(masses.shape[1], 1)
        return alpha

    @staticmethod
    def backward(ctx, grad_alpha):
        draft_logits, target_logits, saved, masses = ctx.saved_tensors
        grad = cpu_overlap.backward(
            grad_alpha, draft_logits, target_logits, saved, ctx.temperature, None, masses, ctx.least
        )
        return grad, None, None, None
