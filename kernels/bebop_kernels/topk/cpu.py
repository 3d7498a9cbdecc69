"""topk on CPUs: one read of the logits in their own type, then a search of the few chunks that can hold the top k."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bebop_kernels._cpu.threads import in_blocks, rows_of, unavailable
from bebop_kernels.topk import cpu_loops, reference

__all__ = ["topk", "unavailable"]

CHEAPER = 4  # an element takes at most a quarter of the time that in_blocks assumes


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_rows, width = logits.shape
    if width < 2 * cpu_loops.CHUNK * k:  # too few chunks to skip any
        return reference.topk(logits, k)
    ids, has_nan = torch.empty(num_rows, k, dtype=torch.long), np.empty(num_rows, np.bool_)

    def work(block: slice) -> None:
        rows = rows_of(logits[block])
        rows = rows if rows.dtype == np.int16 else rows.view(np.int32)
        magnitude, infinity = (0x7FFF, 0x7F80) if rows.dtype == np.int16 else (0x7FFFFFFF, 0x7F800000)
        cpu_loops.topk(rows, np.int32(magnitude), np.int32(infinity), k, ids[block].numpy(), has_nan[block])

    in_blocks(num_rows, width // CHEAPER, work)
    values = logits.gather(1, ids).float()
    if has_nan.any():
        values[torch.from_numpy(has_nan), 0] = torch.nan
    return values, ids
