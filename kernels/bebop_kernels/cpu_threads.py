"""Rows over threads: compiled loops that let go of the interpreter, on torch's number of threads.

numba's own pools are not used: one of them aborts when two Python threads meet in it, the others load a second OpenMP.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 19  # of one piece of work: where rows must be copied, this bounds the copy
HUGE_PAGE, MADV_HUGEPAGE = 1 << 21, 14
FEW_ELEMENTS = 1 << 18  # half a millisecond of one thread: below it, waking a second one gains nothing


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why the compiled loops cannot take these tensors here, or None."""
    if device.type != "cpu":
        return f"needs CPU tensors (they are on {device.type})"
    if torch.float64 in dtypes:
        return "computes in float32; for float64 set impl='reference'"
    return _missing()


@functools.cache
def _missing() -> str | None:
    try:
        import llvmlite.binding
        import numba  # noqa: F401
    except ImportError as error:
        return f"needs numba, which cannot be imported ({error}); pip install numba, or set impl='reference'"
    if platform.machine().lower() in ("x86_64", "amd64") and not llvmlite.binding.get_host_cpu_features().get("fma"):
        return "needs a CPU with fused multiply-add; set impl='reference'"
    return None


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, on huge pages where Linux has them: first touching 4 KiB at a time costs more than writing."""
    values = torch.empty(shape, dtype=dtype)
    start, size = values.data_ptr(), values.numel() * values.element_size()
    if sys.platform == "linux" and size >= 4 * HUGE_PAGE:
        first = -(-start // HUGE_PAGE) * HUGE_PAGE
        whole = (start + size - first) // HUGE_PAGE * HUGE_PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), MADV_HUGEPAGE)  # advice: may fail
    return values


def rows_of(values: Tensor) -> np.ndarray:
    """[N, V] of float32, or of bfloat16's bits as int16, for compiled loops; shares memory where it can."""
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
    blocks = [slice(a, min(a + step, num_rows)) for a in range(0, num_rows, step)]
    if threads == 1:
        for block in blocks:
            work(block)
        return
    left = iter(blocks)  # next() is atomic under the interpreter's lock

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
