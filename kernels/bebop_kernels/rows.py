"""Softmax over rows of logits, safe for -inf, in chunks that bound memory; the part every kernel here starts with.

Shapes: N rows, V vocabulary (the local shard of it under tensor parallelism), D width, K depths, M target rows.
A row q = softmax(z / T) is kept as (z - max z) / T, log Z and q itself, so that log-probabilities cost no second pass.
A row that is -inf throughout has no distribution: q is 0 everywhere, so its overlap and its gradient are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Elements of one [rows, V] buffer. A chunk this size stays near the last-level cache; about six such buffers live at
# once.
CHUNK_ELEMENTS = 1 << 19
MIN_CHUNK_ROWS = 32  # below this the matrix products of the linear kernels become bound by reading the weight

IMPLEMENTATIONS = ("auto", "reference")


class Rows(NamedTuple):
    """Normalised rows. shifted, probs [R, V]; log_z [R, 1]."""

    shifted: Tensor
    log_z: Tensor
    probs: Tensor

    @property
    def logprobs(self) -> Tensor:
        """[R, V], -inf where the logit was."""
        return self.shifted - self.log_z


def chunk_rows(vocab_size: int) -> int:
    """Rows per chunk so that one [rows, V] buffer holds about CHUNK_ELEMENTS."""
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // max(vocab_size, 1))


def normalise(logits: Tensor, temperature: float, argument: str, tp_group: Any = None) -> Rows:
    """Rows of softmax(logits / temperature). logits [R, V] of any float type; computed in float32, or float64 if given.

    Raises ValueError naming `argument` where a row holds NaN or +inf.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    peak = logits.amax(-1, keepdim=True)
    bad = peak.isnan() | (peak == torch.inf)
    if bad.any():
        raise ValueError(f"{argument}: NaN or +inf in the logits of {int(bad.sum())} rows, expected numbers or -inf")
    if tp_group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp_group)
    shifted = (logits - peak.masked_fill(peak == -torch.inf, 0)).div_(temperature)
    probs = shifted.exp()
    z = all_sum(probs.sum(-1, keepdim=True), tp_group)
    z = z.masked_fill_(z == 0, 1)
    return Rows(shifted, z.log(), probs.div_(z))


def all_sum(value: Tensor, tp_group: Any) -> Tensor:
    """Sum over the tensor-parallel ranks, in place; the value itself without a group."""
    if tp_group is not None:
        dist.all_reduce(value, dist.ReduceOp.SUM, group=tp_group)
    return value


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")


def check_temperature(temperature: float) -> None:
    if not 0 < float(temperature) < float("inf"):
        raise ValueError(f"temperature={temperature}: expected a finite number above 0")


def check_float(argument: str, value: Tensor, shape: str, *sizes: int | None) -> None:
    """Check type, rank and the sizes that are not None. `shape` is how the message writes what was expected."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: {came}, expected a floating-point tensor {shape}")
    fits = value.dim() == len(sizes) and all(e in (None, a) for a, e in zip(value.shape, sizes, strict=True))
    if not fits:
        expected = "[" + ", ".join("*" if e is None else str(e) for e in sizes) + "]"
        raise ValueError(f"{argument}: shape {list(value.shape)}, expected {shape}, here {expected}")


def check_indices(argument: str, value: Tensor, shape: tuple[int, ...], limit: int, what: str) -> None:
    """Check a long tensor of exactly `shape` with values in [0, limit)."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or tuple(value.shape) != shape:
        came = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: {came}, expected torch.int64 {list(shape)}")
    if value.numel() and (int(value.min()) < 0 or int(value.max()) >= limit):
        raise ValueError(f"{argument}: values {int(value.min())}..{int(value.max())}, expected {what} in [0, {limit})")
