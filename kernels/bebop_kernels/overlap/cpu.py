"""tv_overlap on CPUs: a row of both logits is read once from memory; its exponentials are computed once and stay in
cache.

Forward reads 2 N V logits and saves five numbers per row. Backward reads the logits again, computes the exponentials
tile by tile in the first-level cache, repeats forward's comparison bit for bit, and writes the gradient once.

saved: the maxima of draft and target, 1 / Z of both, and S = sum of q where q > p.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bebop_kernels._cpu import loops
from bebop_kernels._cpu.threads import empty, in_blocks, rows_of, unavailable
from bebop_kernels.rows import check_sums
from bebop_kernels.tensor_parallel import Group

__all__ = ["backward", "forward", "unavailable"]


def forward(draft_logits: Tensor, target_logits: Tensor, temperature: float, group: Group) -> tuple[Tensor, Tensor]:
    parts = loops.scale_parts(temperature)
    num_rows, width = draft_logits.shape
    alpha, saved = torch.empty(num_rows), torch.empty(num_rows, 5)

    def work(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.overlap(*pair, *parts, alpha[block].numpy(), saved[block].numpy())

    in_blocks(num_rows, width, work)
    check_sums("draft_logits", saved[:, 2])
    check_sums("target_logits", saved[:, 3])
    return alpha.clamp_(max=1), saved


def backward(
    grad_alpha: Tensor, draft_logits: Tensor, target_logits: Tensor, saved: Tensor, temperature: float, group: Group
) -> Tensor:
    parts = loops.scale_parts(temperature)
    grad = empty(draft_logits.shape, draft_logits.dtype)
    factor = (grad_alpha.float() / temperature).contiguous().numpy()
    direct = grad.dtype in (torch.float32, torch.bfloat16)

    def work(block: slice) -> None:
        out = rows_of(grad[block]) if direct else np.empty(grad[block].shape, np.float32)
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.gradient(*pair, *parts, saved[block].numpy(), factor[block], out)
        if not direct:
            grad[block] = torch.from_numpy(out)

    in_blocks(len(grad), grad.shape[1], work)
    return grad
