"""Time and memory of one forward and backward. Implementations take turns, so that a slower machine slows all of them.

Time: median, fastest and slowest of `repeats` rounds after a warm-up. Memory: the peak of one more run above what was
held before it. On a GPU torch's allocator reports it; on a CPU it is the peak resident set (VmHWM, reset before; Linux
only), which includes the gradient and buffers of libraries.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MIB = 1 << 20


class Cost(NamedTuple):
    """Forward and backward. The peak is above what was held before, and None if it cannot be measured."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    peak_mib: float | None


class Rates(NamedTuple):
    """The machine's rates in the same run: bytes/s of a copy (reads and writes), FLOP/s of a matrix product."""

    bandwidth: float
    product: float


def run_once(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float:
    """Seconds of forward, and of backward if the output has a gradient."""
    tensors[0].grad = None
    _wait(tensors[0])
    started = time.perf_counter()
    output = function(*tensors)
    if output.requires_grad:
        output.sum().backward()
    _wait(tensors[0])
    return time.perf_counter() - started


def compare(
    functions: dict[str, Callable[..., Tensor]], tensors: tuple[Tensor, ...], repeats: int
) -> tuple[dict[str, Cost], dict[str, str]]:
    """(name -> cost; name -> its error, for those that failed in the warm-up)."""
    seconds: dict[str, list[float]] = {}
    failed = {}
    for name, function in functions.items():
        try:
            run_once(function, tensors)
            seconds[name] = []
        except Exception as error:  # a baseline that breaks is reported, whatever it raises
            if name in ("triton", "cpu", "reference"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    names = list(seconds)
    for turn in range(repeats):
        for name in names if turn % 2 else names[::-1]:
            seconds[name].append(run_once(functions[name], tensors))
    return {
        name: Cost(
            statistics.median(values) * 1e3, min(values) * 1e3, max(values) * 1e3, peak_mib(functions[name], tensors)
        )
        for name, values in seconds.items()
    }, failed


def peak_mib(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float | None:
    """Peak of one forward and backward, in MiB above what was held before."""
    tensors[0].grad = None
    gc.collect()
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once(function, tensors)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak to what is resident now
    except OSError:
        return None
    before = _status("VmRSS")
    run_once(function, tensors)
    return (_status("VmHWM") - before) / 1024


def rates(device: str, dtype: torch.dtype) -> Rates:
    """Measured on this device, now."""
    source = torch.randn(1 << 26, device=device)
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source), source)
    size = 1024 if device == "cpu" else 8192
    left = torch.randn(size, 4096, device=device).to(dtype)
    right = torch.randn(4096, 4096, device=device).to(dtype)
    product = _fastest(lambda: left @ right, source)
    return Rates(2 * source.numel() * 4 / copy, 2 * size * 4096 * 4096 / product)


def _fastest(function: Callable[[], object], on: Tensor) -> float:
    seconds = []
    for _ in range(5):
        _wait(on)
        started = time.perf_counter()
        function()
        _wait(on)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _status(field: str) -> int:
    """KiB of a field of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":"))
