"""The random numbers of one round, made in one call: a tree needs two dozen draws, each of a hundred small operations.

The numbers are those of `bebop.spec.Streams`, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.spec import StreamId, Streams
from bebop.spec.random import MAX_DEPTH


class RoundDraws:
    """Streams that compute the numbers of some streams in advance.

    sizes: stream -> (depths, rows) to compute in advance; other numbers are computed on demand.
    """

    def __init__(self, streams: Streams, sizes: Mapping[StreamId, tuple[int, int]]) -> None:
        self._streams = streams
        self._made: dict[StreamId, Tensor] = {}
        # one call for all streams: Streams' counter has `depth` in its low part and the stream in its high part
        depth = [
            (int(p) - int(StreamId.DRAFT)) * MAX_DEPTH + d for p, (depths, _) in sizes.items() for d in range(depths)
        ]
        rows = max((rows for _, rows in sizes.values()), default=0)
        if not depth:
            return
        where = torch.tensor([depth], device=streams.seeds.device)
        numbers = streams.uniforms(StreamId.DRAFT, where, rows=rows)  # [B, all depths, rows]
        first = 0
        for stream, (depths, own_rows) in sizes.items():
            self._made[stream] = numbers[:, first : first + depths, :own_rows]
            first += depths

    def uniforms(self, stream: StreamId, depth: int | Tensor, *, rows: int | None = None) -> Tensor:
        """As `bebop.spec.Streams.uniforms`."""
        made = self._made.get(stream)
        if made is None or (rows or 1) > made.shape[2]:
            return self._streams.uniforms(stream, depth, rows=rows)
        if isinstance(depth, int):
            if depth >= made.shape[1]:
                return self._streams.uniforms(stream, depth, rows=rows)
            found = made[:, depth]
        else:
            batch = torch.arange(len(made), device=made.device)
            found = made[batch if depth.ndim < 2 else batch.unsqueeze(1), depth]
        return found[..., 0] if rows is None else found[..., :rows]
