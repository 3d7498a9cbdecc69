"""topk in torch: torch.topk over integers, no two of which are equal."""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.topk import naive

_CHUNK = 32  # neighbouring ids per chunk of the vocabulary


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:
        return naive.topk(logits, k)
    logits = logits.float()
    largest = logits.amax(-1)  # NaN in rows that hold one
    ids = _ids(logits, k)
    values = logits.gather(-1, ids)
    values[:, 0] = largest
    return values, ids


def _ids(logits: Tensor, k: int) -> Tensor:
    """A long vocabulary is searched by chunks: the k chunks that are first by (largest logit, then lowest id) hold all
    of the top k, because each of them holds an id that precedes every id of the other chunks.
    """
    if logits.shape[-1] < 2 * _CHUNK * k:
        return _first(_keys(logits, torch.arange(logits.shape[-1], device=logits.device)), k)
    if logits.shape[-1] % _CHUNK:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % _CHUNK), value=-torch.inf)
    largest = logits.unflatten(-1, (-1, _CHUNK)).amax(-1)
    chunks = _first(_keys(largest, torch.arange(largest.shape[-1], device=logits.device)), k)
    within = torch.arange(_CHUNK, device=logits.device).unsqueeze(-1)
    # The ids of a chunk are spread out: torch.topk takes three times as long over values that fall block by block.
    ids = (chunks.unsqueeze(-2) * _CHUNK + within).flatten(-2)
    return _first(_keys(logits.gather(-1, ids), ids), k)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Distinct integers ordered by (value, then lowest id): the bits of a float32, in the order of the values, above
    the id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - ids


def _first(keys: Tensor, k: int) -> Tensor:
    return -keys.topk(k, dim=-1).values & 0xFFFFFFFF
