"""tv_overlap on CPUs: a row of both logits is read once from memory; its exponentials are made once and stay in cache.

Forward reads 2 N V logits and keeps five numbers a row. Backward reads them again, makes the exponentials tile by tile
in the first-level cache, repeats forward's comparison bit for bit and writes the gradient once.

saved: the maxima of draft and target, 1 / Z of both, and S = sum of q where q > p.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop_kernels import cpu_threads
from bebop_kernels.cpu_threads import fresh, in_blocks, rows_of
from bebop_kernels.rows import check_sums
from bebop_kernels.tensor_parallel import gather, ordered_sum, ordered_sum_of

unavailable = cpu_threads.unavailable


def forward(
    draft_logits: Tensor,
    target_logits: Tensor,
    temperature: float,
    group: Any,
    names: tuple[str, str] = ("draft_logits", "target_logits"),
    masses: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """masses [N, tiles] float32, without a group: filled with q's by tile."""
    from bebop_kernels import cpu_loops

    parts = cpu_loops.scale_parts(temperature)
    num_rows, width = draft_logits.shape
    alpha = torch.empty(num_rows)
    saved = torch.empty(num_rows, 5)
    masses = torch.empty(num_rows, 0) if masses is None else masses

    def whole(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        cpu_loops.overlap(*pair, *parts, *(x[block].numpy() for x in (alpha, saved, masses)))

    if group is None:
        in_blocks(num_rows, width, whole)
        _check(saved, names)
        return alpha.clamp_(max=1), saved

    def peaks(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        cpu_loops.softmax(*pair, *parts, saved[block].numpy())

    def given(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        cpu_loops.overlap_given(*pair, *parts, alpha[block].numpy(), saved[block].numpy())

    in_blocks(num_rows, width, peaks)
    saved[:, :4] = _over_ranks(saved[:, :4], temperature, group)
    _check(saved, names)
    in_blocks(num_rows, width, given)
    alpha, saved[:, 4] = ordered_sum(torch.stack((alpha, saved[:, 4])), group)
    return alpha.clamp_(max=1), saved


def _over_ranks(mine: Tensor, temperature: float, group: Any) -> Tensor:
    """Maxima and 1 / Z [N, 4] of whole rows, from each rank's."""
    peaks, inverse = gather(mine, group).double().split(2, -1)
    top = peaks.amax(0)
    shift = ((peaks - top.masked_fill(top == -torch.inf, 0)) / temperature).exp()
    sums = torch.where(inverse == 0, 0, 1 / inverse)
    z = ordered_sum_of((sums * shift).unbind(0))
    return torch.cat((top, torch.where(z == 0, 0, 1 / z)), -1).float()


def backward(
    grad_alpha: Tensor,
    draft_logits: Tensor,
    target_logits: Tensor,
    saved: Tensor,
    temperature: float,
    group: Any,
    masses: Tensor | None = None,
    least: float = 0.0,
) -> Tensor:
    """masses: as forward filled them; tiles below `least` get a gradient of 0."""
    from bebop_kernels import cpu_loops

    masses = saved.new_empty(len(saved), 0) if masses is None else masses
    parts = cpu_loops.scale_parts(temperature)
    grad = fresh(draft_logits.shape, draft_logits.dtype)
    factor = (grad_alpha.float() / temperature).contiguous().numpy()
    direct = grad.dtype in (torch.float32, torch.bfloat16)

    def work(block: slice) -> None:
        out = rows_of(grad[block]) if direct else np.empty(grad[block].shape, np.float32)
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        cpu_loops.gradient(*pair, *parts, saved[block].numpy(), factor[block], out, masses[block].numpy(), least)
        if not direct:
            grad[block] = torch.from_numpy(out)

    in_blocks(*grad.shape, work)
    return grad


def _check(saved: Tensor, names: tuple[str, str]) -> None:
    for name, inverse in zip(names, saved[:, 2:4].unbind(1), strict=True):
        check_sums(name, inverse)
