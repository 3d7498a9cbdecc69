"""topk: torch.topk with stable ties, which draft trees use to choose their tokens.

torch.topk may return any of equal logits. Half-precision logits tie often, and a tree must not depend on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.arguments import check_float
from bebop_kernels.dispatch import check_impl, load


@torch.no_grad()
def topk(logits: Tensor, k: int, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """The k highest logits of each row and their ids, both [N, k]: highest first, lowest id first among equals.

    logits [N, V], any float type, -inf allowed. Values are float32, or float64 if the logits are. In a row with NaN,
    the first value is NaN and the rest of the row is undefined. Raises ValueError that names the argument.
    """
    check_impl(impl)
    check_float("logits", logits, "[N, V]", None, None)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: got {k!r}, expected an integer in [1, V = {logits.shape[1]}]")
    values, ids = load(impl, "topk", logits).topk(logits, k)
    return values, ids
