"""Keys and values of running requests, one slot each, and the attention that reads them.

Running requests have the first slots, without gaps. A slot's committed text is at columns 0, 1, ... A pass writes its
new entries (draft nodes, a chain, accepted positions) for all requests from one common column `start`, after the
longest text, so that a layer writes one slice. `keep` then moves the accepted entries to the end of each request's
text.

Legend: L layers, B requests, T new tokens of a pass, H query heads, G of them per key head, E head width, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop.errors import BadInput


class Cache:
    """Preallocated keys and values: entries [2, L, slots, key heads, columns, E], keys first."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        num_columns: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_slots, num_kv_heads, num_columns, head_dim)
        # zeros, because masked columns are multiplied by 0, and NaN times 0 is NaN
        self.entries = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        return self.entries.nbytes

    def keep(self, first: Tensor, source: Tensor) -> None:
        """Move columns `source` [B, A] to first [B] + 0, 1, ... of each request; -1: not accepted, nothing moves."""
        place = torch.arange(source.shape[1], device=source.device)
        target = first.unsqueeze(1) + place
        source = torch.where(source >= 0, source, target)
        row = torch.arange(len(source), device=source.device).unsqueeze(1)
        self.entries[:, :, row, :, target] = self.entries[:, :, row, :, source]

    def move(self, source: int, target: int, num_columns: int) -> None:
        """Copy one slot's first columns to another slot."""
        self.entries[:, :, target, :, :num_columns] = self.entries[:, :, source, :, :num_columns]

    def clear(self, slot: int) -> None:
        """Set a slot that may hold NaN to 0."""
        self.entries[:, :, slot] = 0


@dataclass(frozen=True)
class Window:
    """The part of a cache that a pass reads and writes: slots first .. first + B, columns start .. start + T.

    mask: [B, 1, T * G, C] additive, C = start + T, from `fold`; None: every query attends to every column.
    causal: the pass begins at column 0 and is causal; then there is no mask.
    """

    cache: Cache
    first: int
    start: int
    mask: Tensor | None = None
    causal: bool = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, H, E]; k, v [B, T, H/G, E], written to the cache -> [B, T, H * E]."""
        batch, tokens, heads, width = q.shape
        stop = self.start + tokens
        held = self.cache.entries[:, layer, self.first : self.first + batch, :, :stop]
        keys, values = held[0], held[1]
        keys[:, :, self.start :] = k.transpose(1, 2)
        values[:, :, self.start :] = v.transpose(1, 2)
        groups = heads // k.shape[2]
        if self.causal:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=groups > 1)
            return out.transpose(1, 2).reshape(batch, tokens, -1)
        # query heads that share a key head become rows of it, so that no key is repeated
        folded = (
            q.view(batch, tokens, -1, groups, width).permute(0, 2, 1, 3, 4).reshape(batch, -1, tokens * groups, width)
        )
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        return out.view(batch, -1, tokens, groups, width).permute(0, 2, 1, 3, 4).reshape(batch, tokens, -1)


def fold(committed: Tensor | None, own: Tensor | None, start: int, groups: int, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of a pass, [B, 1, T * G, start + T']; None if nothing is masked.

    committed: bool [B, start], the columns of each request's text; None: all columns. own: bool [B, T, T'], the new
    columns to which each new token attends; None: all.
    """
    if committed is None and own is None:
        return None
    if own is None:
        raise BadInput("own: got None with committed columns, expected bool [B, T, T']")
    batch, tokens, _ = own.shape
    before = own.new_ones(1, 1, 1) if committed is None else committed.unsqueeze(1)
    seen = torch.cat([before.expand(batch, tokens, start), own], dim=-1)
    additive = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    return (additive.repeat_interleave(groups, 1) if groups > 1 else additive).unsqueeze(1)
