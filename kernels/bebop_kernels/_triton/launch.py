"""Launching the row kernels: tiles, splits and grids, and merging the parts of a row over programs and ranks."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bebop_kernels._triton import rows as kernels
from bebop_kernels.tensor_parallel import Group, gather, ordered_sum

LOG2E = 1.4426950408889634
MERGE_ROWS = 128
PROGRAMS_PER_PROCESSOR = 4


class Tile(NamedTuple):
    """Columns per step, and the warps that share them."""

    columns: int
    warps: int


TILES = (Tile(1024, 4), Tile(4096, 8))


def tile_for(vocab_size: int) -> Tile:
    return TILES[0] if vocab_size <= 4 * TILES[0].columns else TILES[1]


class Grid(NamedTuple):
    """Programs (rows, splits); each split sweeps `span` columns, tile by tile."""

    num_rows: int
    splits: int
    span: int
    tile: Tile

    @property
    def programs(self) -> tuple[int, int]:
        return self.num_rows, self.splits

    @property
    def options(self) -> dict[str, int]:
        return {"COLUMNS": self.tile.columns, "num_warps": self.tile.warps}


def grid_of(logits: Tensor) -> Grid:
    """Enough splits per row to fill the processors, each of at least one tile. logits [R, V], V > 0."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, max(num_rows, 1))
    tile = tile_for(vocab_size)
    tiles = triton.cdiv(vocab_size, tile.columns)
    splits = triton.cdiv(tiles, triton.cdiv(tiles, min(wanted, tiles)))
    return Grid(num_rows, splits, triton.cdiv(tiles, splits) * tile.columns, tile)


def scales(temperature: float) -> tuple[float, float]:
    """log2(e) / T as a float32, and the remainder."""
    scale = LOG2E / temperature
    high: float = struct.unpack("f", struct.pack("f", scale))[0]
    return high, scale - high


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why these kernels cannot run tensors of these dtypes, or None."""
    wrong = [dtype for dtype in dtypes if dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return f"takes float32, bfloat16 and float16 (got {str(wrong[0]).removeprefix('torch.')})" if wrong else None


def unit_columns(logits: Tensor) -> Tensor:
    """The logits with neighbouring columns adjacent in memory; rows may have any stride."""
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def sums(first: Tensor, second: Tensor | None, temperature: float, group: Group, out: Tensor | None = None) -> Tensor:
    """max and sum exp((z - max) / T) of whole rows: [R, 2], or [R, 4] for two tensors. NaN sums mark bad rows.

    out: rows with room for at least as many numbers, to write to.
    """
    num_rows, vocab_size = first.shape
    pairs = 1 if second is None else 2
    if out is None:
        out = first.new_empty(num_rows, 2 * pairs, dtype=torch.float32)
    if not num_rows:
        return out
    if vocab_size:
        grid = grid_of(first)
        parts = first.new_empty(grid.splits, num_rows, 2 * pairs, dtype=torch.float32)
        kernels.row_sums[grid.programs](
            first,
            first if second is None else second,
            parts,
            vocab_size,
            first.stride(0),
            first.stride(0) if second is None else second.stride(0),
            grid.span,
            *scales(temperature),
            BOTH=second is not None,
            **grid.options,
        )
    else:
        parts = first.new_tensor([-torch.inf, 0.0] * pairs, dtype=torch.float32).expand(1, num_rows, -1).contiguous()
    if group is not None:
        whole = torch.empty_like(parts[0])
        _merge(parts, whole, pairs, temperature)
        parts = gather(whole, group)
    _merge(parts, out, pairs, temperature)
    return out


def _merge(parts: Tensor, out: Tensor, pairs: int, temperature: float) -> None:
    num_pairs = parts.shape[1] * pairs
    kernels.merge_sums[(triton.cdiv(num_pairs, MERGE_ROWS),)](
        parts, out, len(parts), num_pairs, pairs, out.stride(0), *scales(temperature), ROWS=MERGE_ROWS
    )


def overlap(
    draft: Tensor,
    target: Tensor,
    index: Tensor | None,
    draft_sums: Tensor,
    target_sums: Tensor,
    temperature: float,
    group: Group,
) -> Tensor:
    """overlap and S [R, 2]."""
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return ordered_sum(draft.new_zeros(num_rows, 2, dtype=torch.float32), group)
    grid = grid_of(draft)
    parts = draft.new_empty(grid.splits, num_rows, 2, dtype=torch.float32)
    kernels.row_overlap[grid.programs](
        draft,
        target,
        draft if index is None else index,
        draft_sums,
        target_sums,
        parts,
        vocab_size,
        draft.stride(0),
        target.stride(0),
        draft_sums.stride(0),
        target_sums.stride(0),
        grid.span,
        *scales(temperature),
        INDEXED=index is not None,
        **grid.options,
    )
    return ordered_sum(parts[0] if grid.splits == 1 else parts.sum(0), group)


def gradient(
    draft: Tensor,
    target: Tensor,
    index: Tensor | None,
    draft_sums: Tensor,
    target_sums: Tensor,
    over_mass: Tensor,
    row_scale: Tensor | None,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """out [R, V] = row_scale[:, None] * q (S - [q > p]) / T; out may be draft."""
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return out
    grid = grid_of(draft)
    kernels.row_gradient[grid.programs](
        draft,
        target,
        draft if index is None else index,
        draft_sums,
        target_sums,
        over_mass,
        over_mass if row_scale is None else row_scale,
        out,
        vocab_size,
        draft.stride(0),
        target.stride(0),
        draft_sums.stride(0),
        target_sums.stride(0),
        over_mass.stride(0),
        out.stride(0),
        grid.span,
        *scales(temperature),
        1.0 / temperature,
        INDEXED=index is not None,
        SCALED=row_scale is not None,
        **grid.options,
    )
    return out
