"""tv_statistics on CPUs: both rows are read once, and all statistics computed from the exponentials in cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bebop_kernels._cpu import loops
from bebop_kernels._cpu.threads import in_blocks, rows_of, unavailable
from bebop_kernels.rows import check_sums

__all__ = ["statistics", "unavailable"]


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    parts = loops.scale_parts(temperature)
    num_rows, width = draft_logits.shape
    fields = torch.empty(num_rows, 9)
    ids = np.empty(0, np.int64) if tokens is None else tokens.contiguous().numpy()

    def work(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        loops.statistics(*pair, ids[block], *parts, temperature, fields[block].numpy())

    in_blocks(num_rows, width, work)
    check_sums("draft_logits", fields[:, 7])
    check_sums("target_logits", fields[:, 8])
    return list(fields.T[: 5 if tokens is None else 7])
