"""highest in torch: topk over integers of which no two are equal."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 32  # ids of the vocabulary in a chunk


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def highest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)  # NaN sorts as the largest
        return values[:, :num], ids[:, :num]
    logits = logits.float()
    largest = logits.amax(-1)  # NaN where the row has one
    ids = _ids(logits, num)
    values = logits.gather(-1, ids)
    values[:, 0] = largest
    return values, ids


def _ids(logits: Tensor, num: int) -> Tensor:
    """Where the vocabulary is long, they lie in the `num` highest of its chunks, by (largest logit, then lowest id):
    each of those holds an id that comes before all of any other chunk.
    """
    if logits.shape[-1] < 2 * _CHUNK * num:
        return _first(_keys(logits, torch.arange(logits.shape[-1], device=logits.device)), num)
    if logits.shape[-1] % _CHUNK:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % _CHUNK), value=-torch.inf)
    largest = logits.unflatten(-1, (-1, _CHUNK)).amax(-1)
    chunks = _first(_keys(largest, torch.arange(largest.shape[-1], device=logits.device)), num)
    within = torch.arange(_CHUNK, device=logits.device).unsqueeze(-1)
    # a chunk's ids apart: topk takes three times as long over values that fall by blocks
    ids = (chunks.unsqueeze(-2) * _CHUNK + within).flatten(-2)
    return _first(_keys(logits.gather(-1, ids), ids), num)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Integers in the order of (value, then lowest id): a float32's bits, in the order of their values, above the id's.

    Half types tie often, and topk takes any of equal values; of these no two are equal.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: no -0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - ids


def _first(keys: Tensor, num: int) -> Tensor:
    return -keys.topk(num, dim=-1).values & 0xFFFFFFFF
