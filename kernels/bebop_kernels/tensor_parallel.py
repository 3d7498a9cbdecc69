"""Rows whose vocabulary is split over the ranks of a group: uneven shards, and shards without a column, are welcome.

Two exchanges of a few numbers per row: the maxima and sums, gathered and combined, and then the overlaps and S,
gathered and summed. Both go in the order of the ranks, so that every rank computes the same bits. Hidden gradients are
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_name(tp_group: Any) -> str:
    """How an operator, whose arguments are plain, is told of a group; "" without one."""
    return "" if tp_group is None else tp_group.group_name


def group_of(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name) if name else None


def gather(value: Tensor, group: Any) -> Tensor:
    """[ranks, ...] of a small tensor."""
    if group is None:
        return value[None]
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.stack(parts)


def ordered_sum(value: Tensor, group: Any) -> Tensor:
    """Sum over the ranks, in their order; for what is small."""
    return value if group is None else ordered_sum_of(gather(value, group).unbind(0))


def ordered_sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors from the first to the last."""
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


def all_sum(value: Tensor, group: Any) -> Tensor:
    """Sum over the ranks, in place; for what is large."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def check_whole(argument: str, value: Tensor, tp_group: Any) -> None:
    """Refuse what is known to be a part of the vocabulary where no group says how to complete it.

    A DTensor says so by itself; Megatron marks its sharded parameters `tensor_model_parallel`.
    """
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        raise ValueError(
            f"{argument}: a DTensor, expected a plain tensor; pass its to_local() with tp_group, or its full_tensor()"
        )
    if tp_group is None and getattr(value, "tensor_model_parallel", False):
        raise ValueError(f"{argument}: one rank's shard of the vocabulary, expected tp_group with it")
