"""tv_statistics on CPUs: one read of both rows, every figure from the exponentials in cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bebop_kernels import cpu_threads
from bebop_kernels.cpu_threads import in_blocks, rows_of
from bebop_kernels.rows import check_sums

unavailable = cpu_threads.unavailable


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    from bebop_kernels import cpu_loops

    parts = cpu_loops.scale_parts(temperature)
    num_rows, width = draft_logits.shape
    fields = torch.empty(num_rows, 9)

    chosen = np.empty(0, np.int64) if tokens is None else tokens.contiguous().numpy()

    def work(block: slice) -> None:
        pair = rows_of(draft_logits[block]), rows_of(target_logits[block])
        cpu_loops.statistics(*pair, chosen[block], *parts, temperature, fields[block].numpy())

    in_blocks(num_rows, width, work)
    check_sums("draft_logits", fields[:, 7])
    check_sums("target_logits", fields[:, 8])
    return list(fields.T[: 5 if tokens is None else 7])
