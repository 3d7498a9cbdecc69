"""Checks of the arguments that users pass. Each raises a ValueError that names the argument."""

from __future__ import annotations

from torch import Tensor, int64

from bebop_kernels.dispatch import check_impl
from bebop_kernels.tensor_parallel import Group, check_whole


def check_logits(
    draft_logits: Tensor, target_logits: Tensor, temperature: float, impl: str, group: Group = None
) -> None:
    """Everything about a pair of logits [N, V] that can be checked without reading values."""
    check_impl(impl)
    check_temperature(temperature)
    for argument, value in (("draft_logits", draft_logits), ("target_logits", target_logits)):
        check_whole(argument, value, group)
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape, like=draft_logits)


def check_temperature(temperature: float) -> None:
    if not 0 < float(temperature) < float("inf"):
        raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")


def check_float(argument: str, value: Tensor, shape: str, *sizes: int | None, like: Tensor | None = None) -> None:
    """Check type, device, rank, and the sizes that are not None. The message describes what was expected as `shape`."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: got {got}, expected a floating-point tensor {shape}")
    fits = value.dim() == len(sizes) and all(e in (None, a) for a, e in zip(value.shape, sizes, strict=True))
    if not fits:
        expected = "[" + ", ".join("*" if e is None else str(e) for e in sizes) + "]"
        raise ValueError(f"{argument}: got shape {list(value.shape)}, expected {shape}, here {expected}")
    _check_device(argument, value, like)


def check_ids(argument: str, value: Tensor, shape: tuple[int, ...], *, like: Tensor) -> None:
    """Check type and shape of a long tensor. `check_range` checks its values, inside the operator."""
    if not isinstance(value, Tensor) or value.dtype != int64 or tuple(value.shape) != shape:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: got {got}, expected torch.int64 {list(shape)}")
    _check_device(argument, value, like)


def check_range(argument: str, value: Tensor, limit: int, meaning: str) -> None:
    """Check that values are in [0, limit)."""
    if value.numel() and (int(value.min()) < 0 or int(value.max()) >= limit):
        got = f"{int(value.min())}..{int(value.max())}"
        raise ValueError(f"{argument}: got values {got}, expected {meaning} in [0, {limit})")


def _check_device(argument: str, value: Tensor, like: Tensor | None) -> None:
    if like is not None and value.device != like.device:
        raise ValueError(f"{argument}: got a tensor on {value.device}, expected {like.device}, as for the others")
