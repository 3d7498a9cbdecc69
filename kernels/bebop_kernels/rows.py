"""Softmax over rows of logits, safe for -inf, in chunks that bound memory. Every reference kernel starts with it.

Shapes: N rows, V vocabulary (this rank's shard under tensor parallelism), D width, K depths, M target rows.
A row q = softmax(z / T) is kept as (z - max z) / T, log Z and q, so that log-probabilities need no second pass.
A row of only -inf has no distribution: its q is 0 everywhere, so its overlap and gradient are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bebop_kernels.tensor_parallel import Group, gather, ordered_sum_of, widest

# Elements of one [rows, V] buffer. Such a chunk stays near the last-level cache; about six buffers live at once.
CHUNK_ELEMENTS = 1 << 19
MIN_CHUNK_ROWS = 32  # with fewer rows, reading the weight bounds the matrix products of the linear kernels


class Rows(NamedTuple):
    """Normalised rows. shifted, probs [R, V]; log_z [R, 1]."""

    shifted: Tensor
    log_z: Tensor
    probs: Tensor

    @property
    def logprobs(self) -> Tensor:
        """[R, V], -inf where the logit was."""
        return self.shifted - self.log_z


def chunk_rows(vocab_size: int, group: Group, device: torch.device) -> int:
    """Rows per chunk, so that one [rows, V] buffer holds about CHUNK_ELEMENTS. The same on every rank of a group."""
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // max(widest(vocab_size, group, device), 1))


def slices(num_rows: int, step: int) -> Iterator[slice]:
    """[0, num_rows) in slices of `step` rows; the last may be shorter."""
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def normalise(logits: Tensor, temperature: float, argument: str, group: Group = None) -> Rows:
    """Rows of softmax(logits / temperature). logits [R, V] of any float type; computed in float32, or float64 if given.

    Raises ValueError that names `argument` if a row holds NaN or +inf, on every rank of the group.
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
    """The maximum to subtract: 0 for rows of only -inf."""
    return peak.masked_fill(peak == -torch.inf, 0)


def check_sums(argument: str, z: Tensor) -> None:
    """Refuse rows with NaN or +inf in their logits: sum exp(z - max z) is NaN for both. Waits for the device."""
    bad = int(z.isnan().sum())
    if bad:
        raise ValueError(f"{argument}: got NaN or +inf in the logits of {bad} rows, expected numbers or -inf")
