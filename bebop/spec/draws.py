"""Draw one id from weights, as a function of uniform numbers: by inverting the CDF or by the Gumbel-max race.

Both have the law weights / sum(weights) and never return an id of weight 0. Inversion spends one uniform per draw and
is the default; Gumbel-max spends one per id, as engines with fused samplers do. The tokens of the two differ.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.spec.random import Purpose, Uniforms

Sampler = Literal["inversion", "gumbel"]


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose CDF exceeds u * sum. weights [..., V] >= 0, uniform [...] in [0, 1) -> long [...].

    Summed in float64. A row without weight gives V - 1, for the caller to discard.
    """
    cdf = weights.double().cumsum(-1)
    total = cdf[..., -1:]
    # u * sum may round up to the sum itself; one step below it is still inside the last id that has weight
    threshold = torch.minimum(uniform.double().unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def gumbel_max(weights: Tensor, uniform: Tensor) -> Tensor:
    """argmax of log w - log(-log u). weights, uniform [..., V] -> long [...]; 0 where a row has no weight.

    An id wins with probability w / sum(w): the race of exponential clocks -log(u) / w, written in logarithms.
    """
    smallest = torch.finfo(torch.float64).tiny
    noise = -torch.log(-torch.log(uniform.double().clamp(min=smallest)))
    return (weights.double().log() + noise).argmax(-1)


def sample(
    weights: Tensor, draws: Uniforms, purpose: Purpose, depth: int | Tensor, sampler: Sampler = "inversion"
) -> Tensor:
    """One id per row of weights [B, V] or [B, W, V] -> long [B] or [B, W]; rows are told apart by their number."""
    if sampler not in get_args(Sampler):
        raise BadInput(f"sampler={sampler!r}: expected one of {', '.join(get_args(Sampler))}")
    rows = weights.shape[1] if weights.ndim == 3 else None
    if sampler == "inversion":
        return invert(weights, draws.uniforms(purpose, depth, rows=rows))
    return gumbel_max(weights, draws.uniforms(purpose, depth, rows=rows, items=weights.shape[-1]))
