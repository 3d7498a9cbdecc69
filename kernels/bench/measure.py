"""Time and memory of one forward and backward, contestants in turns so that a machine that slows down slows all.

Time: after a warm-up each, `repeats` rounds; median, fastest and slowest. Memory: one more run, the peak above what was
held before it: on a GPU by torch's allocator, on a CPU the process's peak resident set (VmHWM, reset before; Linux),
buffers of libraries and the gradient included.
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
    """Milliseconds of forward and backward, MiB above what was held; peak None where it cannot be known."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    peak_mib: float | None


class Rates(NamedTuple):
    """What the machine does in the same run: bytes/s of copying (read and written), FLOP/s of a product."""

    bandwidth: float
    product: float


def run_once(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float:
    """Seconds of forward, and of backward where something has a gradient."""
    tensors[0].grad = None
    _wait(tensors[0])
    started = time.perf_counter()
    made = function(*tensors)
    if made.requires_grad:
        made.sum().backward()
    _wait(tensors[0])
    return time.perf_counter() - started


def compare(
    found: dict[str, Callable[..., Tensor]], tensors: tuple[Tensor, ...], repeats: int
) -> tuple[dict[str, Cost], dict[str, str]]:
    """(name -> cost, name -> error of what failed in its warm-up)."""
    seconds: dict[str, list[float]] = {}
    failed = {}
    for name, function in found.items():
        try:
            run_once(function, tensors)
            seconds[name] = []
        except Exception as error:  # a rival that breaks is reported, whatever it raises
            if name in ("triton", "cpu", "reference"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    names = list(seconds)
    for turn in range(repeats):
        for name in names if turn % 2 else names[::-1]:
            seconds[name].append(run_once(found[name], tensors))
    return {
        name: Cost(
            statistics.median(values) * 1e3, min(values) * 1e3, max(values) * 1e3, peak_mib(found[name], tensors)
        )
        for name, values in seconds.items()
    }, failed


def peak_mib(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float | None:
    """Peak of one forward and backward above what was held before, in MiB."""
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
            file.write("5")  # the peak becomes what is resident now
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
