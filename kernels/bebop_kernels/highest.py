"""The highest logits of each row: the tokens to which a draft tree is confined."""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.dispatch import check_impl, load
from bebop_kernels.rows import check_float


@torch.no_grad()
def highest(logits: Tensor, num: int, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """The `num` highest logits of each row and their ids, [N, num] both: highest first, of equal ones the lowest id.

    logits [N, V], any float type, -inf allowed. Values are float32, float64 where logits are. In a row with NaN the
    first value is NaN and the rest of the row means nothing.
    Raises ValueError naming the argument.
    """
    check_impl(impl)
    check_float("logits", logits, "[N, V]", None, None)
    if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= logits.shape[1]:
        raise ValueError(f"num={num!r}: expected an integer in [1, V = {logits.shape[1]}]")
    return load(impl, "highest", logits).highest(logits, num)
