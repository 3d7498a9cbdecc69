"""New values for the tensors of a running engine, all or none; for every engine, and without importing any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.errors import BadInput

HEAD_PREFIX = "model.mtp_layers."


def _mimo(name: str) -> bool:
    return name.startswith(HEAD_PREFIX)


def replace_tensors(
    views: dict[str, Tensor], tensors: dict[str, Tensor], *, is_head: Callable[[str], bool] = _mimo
) -> None:
    """Copy `tensors` into the views of the same names. Raises ValueError before anything is copied."""
    heads = [name for name in tensors if is_head(name)]
    held = sum(name in views for name in heads)
    if held < len(heads):
        holds = sum(is_head(name) for name in views)
        raise BadInput(
            f"{held} of {len(heads)} head tensors can be loaded: the engine holds {holds}; "
            "heads need rollout.speculation=mtp and the checkpoint's own names"
        )
    for name, tensor in tensors.items():
        if name not in views:
            raise BadInput(f"{name}: the engine holds no tensor of this name")
        if tensor.shape != views[name].shape:
            raise BadInput(f"{name} has shape {list(tensor.shape)}, the engine holds {list(views[name].shape)}")
        if not torch.isfinite(tensor).all():
            raise BadInput(f"{name} holds values that are not finite; the update was refused")
    with torch.no_grad():
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
