"""Rows whose vocabulary is split over the ranks of a group. Shards may differ in width, and may be empty.

Two exchanges of a few numbers per row: first the maxima and sums, then the overlaps and S. Each is gathered and
combined in the order of the ranks, so that every rank computes the same bits. Gradients of hidden states are
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = "dist.ProcessGroup | None"


def group_name(group: Group) -> str:
    """The group's name, "" for None: the operators of torch.library accept no process groups."""
    return "" if group is None else group.group_name


def group_of(name: str) -> Group:
    if not name:
        return None
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def gather(value: Tensor, group: Group) -> Tensor:
    """[ranks, ...] from every rank's `value`, which should be small."""
    if group is None:
        return value[None]
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.stack(parts)


def widest(vocab_size: int, group: Group, device: torch.device) -> int:
    """The largest vocabulary shard of the group."""
    return vocab_size if group is None else int(gather(torch.tensor([vocab_size], device=device), group).max())


def ordered_sum(value: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, in their order. For small tensors."""
    return value if group is None else ordered_sum_of(gather(value, group).unbind(0))


def ordered_sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors, from the first to the last."""
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


def all_sum(value: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, in place. For large tensors."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def check_whole(argument: str, value: Tensor, group: Group) -> None:
    """Refuse a tensor that is known to hold only part of the vocabulary, if no group can complete it.

    A DTensor shows this by its type; Megatron marks sharded parameters with `tensor_model_parallel`.
    """
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        raise ValueError(
            f"{argument}: got a DTensor, expected a plain tensor; pass its to_local() with tp_group, or full_tensor()"
        )
    if group is None and getattr(value, "tensor_model_parallel", False):
        raise ValueError(f"{argument}: got one rank's shard of the vocabulary, expected tp_group with it")
