"""Independent uniform random numbers per request, round and stream, and draws from them.

A number is a pure function of its address, so a request gets the same tokens in any batch and in any order. The
function is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):

    key      the request's seed, 64 bits
    counter  (position, stream and depth, row, 0), 32 bits each
    uniform  53 of the first 64 output bits, times 2^-53: in [0, 1)

position is the request's number of tokens at the start of the round, the same for all draws of the round; depth counts
within the round. If numbers were addressed by the token's own position (position + depth), the next round would use the
number of a rejected draft token again. In block verification and pruned trees, how many tokens are accepted depends on
later draft tokens. Given that outcome the number is no longer uniform, and the output would be biased.
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
MAX_DEPTH = 1 << 24  # depths of one stream; the stream's number is in the bits above


class StreamId(IntEnum):
    """What a random number decides. Two streams never share a number, because that would bias the output."""

    DRAFT = 0  # a draft token, or a tree's probe
    ACCEPT = 1
    LEAD = 2  # RRSw's draw among the leads
    FINAL = 3  # the token after the accepted ones; every token of plain decoding


class Uniforms(Protocol):
    """Source of the rules' random numbers: Streams, or fixed numbers in a proof."""

    def uniforms(self, stream: StreamId, depth: int | Tensor, *, rows: int | None = None) -> Tensor:
        """float64 in [0, 1), see Streams."""


@dataclass(frozen=True)
class Streams:
    """Streams of B requests in one round. seeds, positions: long [B]; position < 2^32, at the start of the round."""

    seeds: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        for name in ("seeds", "positions"):
            value = getattr(self, name)
            if value.dtype != torch.int64 or value.shape != self.seeds.shape or value.ndim != 1:
                got = f"{value.dtype} {list(value.shape)}"
                raise BadInput(f"{name}: got {got}, expected int64 [B], B = {self.seeds.shape[0]}")

    @classmethod
    def from_generator(
        cls, generator: torch.Generator | None, batch: int, device: torch.device | str | None = None
    ) -> Streams:
        """New seeds for one round of B requests, each drawn from the generator (None: torch's default generator)."""
        where = generator.device if generator is not None else "cpu"
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator, device=where).to(device or where)
        return cls(seeds, torch.zeros_like(seeds))

    def uniforms(self, stream: StreamId, depth: int | Tensor, *, rows: int | None = None) -> Tensor:
        """float64 in [0, 1) of shape [B, *depth.shape[1:], rows?].

        depth: one number; or long [B] or [B or 1, ...], a depth per request. rows: add a last axis of that length; it
        counts draws of one stream and depth, such as one for each node of a frontier.
        """
        depth = torch.as_tensor(depth, device=self.seeds.device)
        extra = 0 if rows is None else 1

        def broadcast(value: Tensor, axes: int) -> Tensor:
            return value.reshape(value.shape + (1,) * (axes + extra))

        position, seed = (broadcast(value, max(depth.ndim, 1) - 1) for value in (self.positions, self.seeds))
        zero = position * 0
        row = zero if rows is None else torch.arange(rows, device=self.seeds.device)
        counter = (position & _MASK, broadcast(depth, 0) + int(stream) * MAX_DEPTH, row, zero)
        words = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
        return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four and two int64 tensors of 32-bit words -> four. int64 products wrap, as Philox needs."""
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


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose CDF exceeds u * sum. weights [..., V] >= 0, uniform [...] in [0, 1) -> long [...].

    Ids are drawn in proportion to their weights; an id of weight 0 is never returned. Sums are float64. A row whose
    weights are all 0 gives V - 1, which the caller must discard.
    """
    cdf = weights.double().cumsum(-1)
    total = cdf[..., -1:]
    # u * sum may round up to the sum itself; the next smaller float still falls on the last id with a weight above 0
    threshold = torch.minimum(uniform.double().unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def sample(weights: Tensor, draws: Uniforms, stream: StreamId, depth: int | Tensor) -> Tensor:
    """One id per row of weights [B, V] or [B, W, V] -> long [B] or [B, W]; each row uses its own random number."""
    rows = weights.shape[1] if weights.ndim == 3 else None
    return invert(weights, draws.uniforms(stream, depth, rows=rows))
