"""The random numbers of one round, made in one go: a tree takes two dozen draws, each a hundred small operations.

The numbers are those of `bebop.spec.Streams`, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.spec import Purpose, Streams
from bebop.spec.random import MAX_DEPTH


class RoundDraws:
    """Streams whose numbers for the named purposes are at hand.

    sizes: purpose -> (depths, rows); numbers outside are computed when asked for.
    """

    def __init__(self, streams: Streams, sizes: Mapping[Purpose, tuple[int, int]]) -> None:
        self._streams = streams
        self._made: dict[Purpose, Tensor] = {}
        # one call: `depth` of Streams is the low part of a counter whose high part is the purpose
        depth = [
            (int(p) - int(Purpose.DRAFT)) * MAX_DEPTH + d for p, (depths, _) in sizes.items() for d in range(depths)
        ]
        rows = max((rows for _, rows in sizes.values()), default=0)
        if not depth:
            return
        where = torch.tensor([depth], device=streams.seeds.device)
        numbers = streams.uniforms(Purpose.DRAFT, where, rows=rows)  # [B, all depths, rows]
        first = 0
        for purpose, (depths, own_rows) in sizes.items():
            self._made[purpose] = numbers[:, first : first + depths, :own_rows]
            first += depths

    def uniforms(
        self, purpose: Purpose, depth: int | Tensor, *, rows: int | None = None, items: int | None = None
    ) -> Tensor:
        """As `bebop.spec.Streams.uniforms`."""
        made = self._made.get(purpose)
        if made is None or items not in (None, 1) or (rows or 1) > made.shape[2]:
            return self._streams.uniforms(purpose, depth, rows=rows, items=items)
        if isinstance(depth, int):
            if depth >= made.shape[1]:
                return self._streams.uniforms(purpose, depth, rows=rows, items=items)
            found = made[:, depth]
        else:
            batch = torch.arange(len(made), device=made.device)
            found = made[batch if depth.ndim < 2 else batch.unsqueeze(1), depth]
        found = found[..., 0] if rows is None else found[..., :rows]
        return found if items is None else found.unsqueeze(-1)
