"""Launching the row kernels: grids, splits, and the merging of their parts, over programs and over ranks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from bebop_kernels import triton_rows as kernels
from bebop_kernels.rows import check_sums
from bebop_kernels.tensor_parallel import gather, ordered_sum
from bebop_kernels.triton_rows import MERGE_ROWS, num_splits, scales, span_of, tile_for


def sums(first: Tensor, second: Tensor | None, temperature: float, group: Any, out: Tensor | None = None) -> Tensor:
    """max and sum exp((z - max) / T) of whole rows [R, 2], of both tensors [R, 4]. NaN sums mark bad rows.

    out: rows of at least as many numbers to write to.
    """
    num_rows, vocab_size = first.shape
    pairs = 1 if second is None else 2
    if out is None:
        out = first.new_empty(num_rows, 2 * pairs, dtype=torch.float32)
    if not num_rows:
        return out
    if vocab_size:
        splits = num_splits(num_rows, vocab_size, first.device)
        parts = first.new_empty(splits, num_rows, 2 * pairs, dtype=torch.float32)
        tile = tile_for(vocab_size)
        kernels.row_sums[(num_rows, splits)](
            first,
            first if second is None else second,
            parts,
            vocab_size,
            first.stride(0),
            first.stride(0) if second is None else second.stride(0),
            span_of(vocab_size, splits),
            *scales(temperature),
            BOTH=second is not None,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
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


def check(argument: str, sums_of_rows: Tensor) -> None:
    """Refuse bad rows. Waits for the device."""
    check_sums(argument, sums_of_rows)


def overlap(
    draft: Tensor,
    target: Tensor,
    index: Tensor | None,
    draft_sums: Tensor,
    target_sums: Tensor,
    temperature: float,
    group: Any,
) -> Tensor:
    """overlap and S [R, 2]."""
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return ordered_sum(draft.new_zeros(num_rows, 2, dtype=torch.float32), group)
    splits = num_splits(num_rows, vocab_size, draft.device)
    parts = draft.new_empty(splits, num_rows, 2, dtype=torch.float32)
    tile = tile_for(vocab_size)
    kernels.row_overlap[(num_rows, splits)](
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
        span_of(vocab_size, splits),
        *scales(temperature),
        INDEXED=index is not None,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return ordered_sum(parts[0] if splits == 1 else parts.sum(0), group)


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
    """out [R, V] = row_scale[:, None] * q (S - [q > p]) / T; out may be draft itself."""
    num_rows, vocab_size = draft.shape
    if not num_rows or not vocab_size:
        return out
    splits = num_splits(num_rows, vocab_size, draft.device)
    tile = tile_for(vocab_size)
    kernels.row_gradient[(num_rows, splits)](
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
        span_of(vocab_size, splits),
        *scales(temperature),
        1.0 / temperature,
        INDEXED=index is not None,
        SCALED=row_scale is not None,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return out
