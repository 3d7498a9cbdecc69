"""Independent uniform random numbers per request, round and purpose, addressed instead of drawn in turn.

A number is a pure function of where it is used, so a request gets the same tokens alone, in any batch and in any
order. The function is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):

    key      the request's seed, 64 bits
    counter  (position, purpose and depth, row, item), 32 bits each
    uniform  53 of the first 64 output bits, times 2^-53: in [0, 1)

position is the request's number of tokens at the start of the round, the same for all draws of the round; depth counts
within the round. Addressing by the token's own position instead (position + depth) would hand a rejected draft's number
to the next round. Where what is accepted depends on later drafts (block verification, a pruned tree) that number is no
longer uniform by then, and the output is biased.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from bebop.errors import BadInput

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
MAX_DEPTH = 1 << 24  # depths of one purpose; the purpose counts above them


class Purpose(IntEnum):
    """What a number decides. Two purposes never share one: a shared stream biases the output."""

    DRAFT = 0  # a draft token, or a tree's probe
    ACCEPT = 1
    LEAD = 2  # RRSw's draw among the leads
    FINAL = 3  # the token behind what was accepted; every token of plain decoding


class Uniforms(Protocol):
    """Where the rules take their random numbers from: Streams, or fixed numbers in a proof."""

    def uniforms(
        self, purpose: Purpose, depth: int | Tensor, *, rows: int | None = None, items: int | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Streams:
    """Streams of B requests in one round. seeds, positions: long [B]; position < 2^32, at the start of the round."""

    seeds: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        for name in ("seeds", "positions"):
            value = getattr(self, name)
            if value.dtype != torch.int64 or value.shape != self.seeds.shape or value.ndim != 1:
                came = f"{value.dtype} {list(value.shape)}"
                raise BadInput(f"{name}: {came} came, expected int64 [B], B = {self.seeds.shape[0]}")

    @classmethod
    def from_generator(
        cls, generator: torch.Generator | None, batch: int, device: torch.device | str | None = None
    ) -> Streams:
        """Fresh seeds for one round of B requests, one number each from the generator (None: torch's own)."""
        where = generator.device if generator is not None else "cpu"
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator, device=where).to(device or where)
        return cls(seeds, torch.zeros_like(seeds))

    def uniforms(
        self, purpose: Purpose, depth: int | Tensor, *, rows: int | None = None, items: int | None = None
    ) -> Tensor:
        """float64 in [0, 1) of shape [B, *depth.shape[1:], rows?, items?].

        depth: one number; or long [B] or [B or 1, ...], a depth per request. rows, items: add an axis of that length,
        items the last; they count draws of one purpose and depth (a frontier's nodes; the vocabulary).
        """
        axes = [n for n in (rows, items) if n is not None]
        depth = torch.as_tensor(depth, device=self.seeds.device)
        lead = max(depth.ndim, 1)

        def broadcast(value: Tensor, ahead: int) -> Tensor:
            return value.reshape(value.shape + (1,) * (ahead + len(axes)))

        position, seed = (broadcast(value, lead - 1) for value in (self.positions, self.seeds))
        counter = [position & _MASK, broadcast(depth, 0) + int(purpose) * MAX_DEPTH]
        count = torch.arange(max(axes, default=1), device=self.seeds.device)
        counter.append(count[:rows].reshape((rows,) + (1,) * (items is not None)) if rows is not None else position * 0)
        counter.append(count[:items] if items is not None else position * 0)
        words = philox(torch.broadcast_tensors(*counter), (seed & _MASK, (seed >> 32) & _MASK))
        return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox(counter: tuple[Tensor, ...] | list[Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four and two int64 tensors of 32-bit words -> four. int64 products wrap, as they should."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
