"""highest on CPUs: one read of the logits as they are, then what lies in the few chunks that can hold the highest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bebop_kernels import cpu_threads, reference_highest
from bebop_kernels.cpu_threads import in_blocks, rows_of

unavailable = cpu_threads.unavailable
CHEAP = 4  # an element takes a quarter of what cpu_threads counts for one, if not less


def highest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    from bebop_kernels import cpu_highest_loops

    num_rows, width = logits.shape
    if width < 2 * cpu_highest_loops.CHUNK * num:  # too few chunks to leave any out
        return reference_highest.highest(logits, num)
    ids, broken = torch.empty(num_rows, num, dtype=torch.long), np.empty(num_rows, np.bool_)

    def work(block: slice) -> None:
        rows = rows_of(logits[block])
        rows = rows if rows.dtype == np.int16 else rows.view(np.int32)
        magnitude, infinity = (0x7FFF, 0x7F80) if rows.dtype == np.int16 else (0x7FFFFFFF, 0x7F800000)
        cpu_highest_loops.highest(rows, np.int32(magnitude), np.int32(infinity), num, ids[block].numpy(), broken[block])

    in_blocks(num_rows, width // CHEAP, work)
    values = logits.gather(1, ids).float()
    if broken.any():
        values[torch.from_numpy(broken), 0] = torch.nan
    return values, ids
