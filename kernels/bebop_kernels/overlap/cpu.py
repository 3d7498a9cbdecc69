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
from bebop_kernels.tensor_parallel import Group, gather, ordered_sum, ordered_sum_of

__all__ = ["backward", "forward", "unavailable"]


def forward(
    draft_logits: Tensor,
    target_logits: Tensor,
    temperature: float,
    group: Group,
    names: tuple[str, str] = ("draft_logits", "target_logits"),
) -> tuple[Tensor, Tensor]:
    """names: how errors call the arguments."""
    parts = loops.scale_parts(temperature)
    num_rows, width = draft_logits.shape
    alpha = torch.empty(num_rows)
    saved = torch.empty(num_rows, 5)

    def whole(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.overlap(*pair, *parts, alpha[block].numpy(), saved[block].numpy())

    def sums(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.softmax(*pair, *parts, saved[block].numpy())

    def share(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.overlap_share(*pair, *parts, alpha[block].numpy(), saved[block].numpy())

    if group is None:
        in_blocks(num_rows, width, whole)
        _check(saved, names)
        return alpha.clamp_(max=1), saved
    in_blocks(num_rows, width, sums)
    saved[:, :4] = _over_ranks(saved[:, :4], temperature, group)
    _check(saved, names)
    in_blocks(num_rows, width, share)
    alpha, saved[:, 4] = ordered_sum(torch.stack((alpha, saved[:, 4])), group)
    return alpha.clamp_(max=1), saved


def _over_ranks(local: Tensor, temperature: float, group: Group) -> Tensor:
    """Maxima and 1 / Z [N, 4] of whole rows, from those of each rank."""
    peaks, inverse = gather(local, group).double().split(2, -1)
    top = peaks.amax(0)
    shift = ((peaks - top.masked_fill(top == -torch.inf, 0)) / temperature).exp()
    sums = torch.where(inverse == 0, 0, 1 / inverse)
    z = ordered_sum_of((sums * shift).unbind(0))
    return torch.cat((top, torch.where(z == 0, 0, 1 / z)), -1).float()


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


def _check(saved: Tensor, names: tuple[str, str]) -> None:
    for name, inverse in zip(names, saved[:, 2:4].unbind(1), strict=True):
        check_sums(name, inverse)
