"""Rows over threads: compiled loops that release the interpreter lock, on as many threads as torch uses.

numba's own thread pools are not used: one aborts when two Python threads enter it, the others load a second OpenMP.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor

from bebop_kernels.rows import slices

BLOCK_ELEMENTS = 1 << 19  # per piece of work; bounds the copy of rows that must be copied
HUGE_PAGE, MADV_HUGEPAGE = 1 << 21, 14
FEW_ELEMENTS = 1 << 18  # half a millisecond on one thread; with less work, waking a second thread gains nothing


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why the compiled loops cannot take these tensors, or None."""
    if torch.float64 in dtypes:
        return "computes in float32 (got float64)"
    if platform.machine().lower() in ("x86_64", "amd64") and not _has_fma():
        return "needs a CPU with fused multiply-add"
    return None


@functools.cache
def _has_fma() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("fma"))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.empty on huge pages if Linux has them: the first touch of 4 KiB pages costs more than the writing."""
    values = torch.empty(shape, dtype=dtype)
    start, size = values.data_ptr(), values.numel() * values.element_size()
    if sys.platform == "linux" and size >= 4 * HUGE_PAGE:
        first = -(-start // HUGE_PAGE) * HUGE_PAGE
        whole = (start + size - first) // HUGE_PAGE * HUGE_PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), MADV_HUGEPAGE)  # advice: may fail
    return values


def rows_of(values: Tensor) -> np.ndarray[Any, Any]:
    """[N, V] as float32, or bfloat16's bits as int16, for compiled loops. Shares memory where possible."""
    values = values.detach()
    if values.dtype not in (torch.float32, torch.bfloat16):
        values = values.float()
    values = values.contiguous()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def in_blocks(num_rows: int, row_elements: int, work: Callable[[slice], None]) -> None:
    """work(rows) over [0, num_rows) in slices, on as many threads as torch would use."""
    step = max(1, min(BLOCK_ELEMENTS // max(row_elements, 1), num_rows))
    threads = min(torch.get_num_threads(), num_rows)
    if threads > 1 and num_rows * row_elements > FEW_ELEMENTS:
        step = min(step, -(-num_rows // threads))
    else:
        threads = 1
    blocks = list(slices(num_rows, step))
    if threads == 1:
        for block in blocks:
            work(block)
        return
    left = iter(blocks)  # next() is atomic under the interpreter lock

    def drain() -> None:
        for block in left:
            work(block)

    others = [_pool(os.getpid(), threads - 1).submit(drain) for _ in range(threads - 1)]
    try:
        drain()
    finally:
        for other in others:
            other.result()


@functools.cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Idle threads of this process; a forked child gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bebop-kernels")
