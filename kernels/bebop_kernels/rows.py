"""Softmax over rows of logits, safe for -inf, in chunks that bound memory; the part every kernel here starts with.

Shapes: N rows, V vocabulary (the local shard of it under tensor parallelism), D width, K depths, M target rows.
A row q = softmax(z / T) is kept as (z - max z) / T, log Z and q itself, so that log-probabilities cost no second pass.
A row that is -inf throughout has no distribution: q is 0 everywhere, so its overlap and its gradient are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bebop_kernels.tensor_parallel import gather, ordered_sum_of

# Elements of one [rows, V] buffer. A chunk this size stays near the last-level cache; about six such buffers live at
# once.
CHUNK_ELEMENTS = 1 << 19
MIN_CHUNK_ROWS = 32  # below this the matrix products of the linear kernels become bound by reading the weight


class Rows(NamedTuple):
    """Normalised rows. shifted, probs [R, V]; log_z [R, 1]."""

    shifted: Tensor
    log_z: Tensor
    probs: Tensor

    @property
    def logprobs(self) -> Tensor:
        """[R, V], -inf where the logit was."""
        return self.shifted - self.log_z


def chunk_rows(vocab_size: int, group: Any = None) -> int:
    """Rows per chunk so that one [rows, V] buffer holds about CHUNK_ELEMENTS; the same on every rank of a group."""
    if group is not None:
        vocab_size = int(gather(torch.tensor([vocab_size]), group).max())
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // max(vocab_size, 1))


def normalise(logits: Tensor, temperature: float, argument: str, group: Any = None) -> Rows:
    """Rows of softmax(logits / temperature). logits [R, V] of any float type; computed in float32, or float64 if given.

    Raises ValueError naming `argument` where a row holds NaN or +inf, on every rank of the group.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    peak = logits.amax(-1, keepdim=True) if logits.shape[1] else logits.new_full((len(logits), 1), -torch.inf)
    shifted = (logits - safe(peak)).div_(temperature)
    probs = shifted.exp()
    z = probs.sum(-1, keepdim=True)
    if group is not None:
        peaks, sums = gather(torch.stack((peak, z)), group).unbind(1)
        peak = peaks.amax(0)
        z = ordered_sum_of((sums * ((peaks - safe(peak)) / temperature).exp()).unbind(0))
        shifted = (logits - safe(peak)).div_(temperature)
        probs = shifted.exp()
    check_sums(argument, z)
    z = z.masked_fill_(z == 0, 1)
    return Rows(shifted, z.log(), probs.div_(z))


def safe(peak: Tensor) -> Tensor:
    """A maximum to subtract: 0 where there is nothing but -inf."""
    return peak.masked_fill(peak == -torch.inf, 0)


def check_sums(argument: str, z: Tensor) -> None:
    """Refuse rows with NaN or +inf in their logits, known by sum exp(z - max z): it is NaN for both."""
    bad = int(z.isnan().sum())
    if bad:
        raise ValueError(f"{argument}: NaN or +inf in the logits of {bad} rows, expected numbers or -inf")


def check_temperature(temperature: float) -> None:
    if not 0 < float(temperature) < float("inf"):
        raise ValueError(f"temperature={temperature}: expected a finite number above 0")


def check_float(argument: str, value: Tensor, shape: str, *sizes: int | None, like: Tensor | None = None) -> None:
    """Check type, device, rank and the sizes that are not None. `shape` is how the message writes what was expected."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: {came}, expected a floating-point tensor {shape}")
    fits = value.dim() == len(sizes) and all(e in (None, a) for a, e in zip(value.shape, sizes, strict=True))
    if not fits:
        expected = "[" + ", ".join("*" if e is None else str(e) for e in sizes) + "]"
        raise ValueError(f"{argument}: shape {list(value.shape)}, expected {shape}, here {expected}")
    check_device(argument, value, like)


def check_device(argument: str, value: Tensor, like: Tensor | None) -> None:
    if like is not None and value.device != like.device:
        raise ValueError(f"{argument}: on {value.device}, expected {like.device} as the other tensors")


def check_ids(argument: str, value: Tensor, shape: tuple[int, ...], *, like: Tensor) -> None:
    """Check type and shape of a long tensor. Its values are looked at inside the operator: `check_range`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or tuple(value.shape) != shape:
        came = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: {came}, expected torch.int64 {list(shape)}")
    check_device(argument, value, like)


def check_range(argument: str, value: Tensor, limit: int, what: str) -> None:
    """Check that values are in [0, limit)."""
    if value.numel() and (int(value.min()) < 0 or int(value.max()) >= limit):
        raise ValueError(f"{argument}: values {int(value.min())}..{int(value.max())}, expected {what} in [0, {limit})")
