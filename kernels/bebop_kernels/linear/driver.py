"""Forward and backward of the linear form, given an implementation's sweep over chunks of anchors.

A sweep calls `use(at, value, alpha, grad)` once per chunk:

    at                a place in [K, N]: one depth or all depths, and a slice of anchors
    value, alpha      of the anchors there; for linear_tv_overlap value is alpha
    grad [rows, V]    scale[at] times the gradient of value on the draft logits W h (scale None: 1); None if not wanted

`grad` may lie in a buffer that the next chunk overwrites. For a frozen head, forward computes the row gradients
grad W [K, N, D] while the logits of the chunk exist, and backward only scales them. For a trained head, backward
computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from bebop_kernels.arguments import check_float, check_ids, check_range, check_temperature
from bebop_kernels.rows import slices
from bebop_kernels.tensor_parallel import Group, all_sum, check_whole


class Inputs(NamedTuple):
    """draft_hidden [K, N, D], target_hidden [M, D], weight [V, D], target_index long [K, N]."""

    draft_hidden: Tensor
    target_hidden: Tensor
    weight: Tensor
    target_index: Tensor
    temperature: float
    group: Group

    def check(self) -> None:
        """Everything that can be checked without reading values."""
        draft_hidden, target_hidden, weight, target_index, temperature, group = self
        check_temperature(temperature)
        check_whole("weight", weight, group)
        check_float("draft_hidden", draft_hidden, "[K, N, D]", None, None, None)
        depths, anchors, width = draft_hidden.shape
        check_float("target_hidden", target_hidden, "[M, D] with draft_hidden's D", None, width, like=draft_hidden)
        check_float("weight", weight, "[V, D] with draft_hidden's D", None, width, like=draft_hidden)
        for argument, value in (("target_hidden", target_hidden), ("weight", weight)):
            if value.dtype != draft_hidden.dtype:
                raise ValueError(f"{argument}: got dtype {value.dtype}, expected {draft_hidden.dtype} as draft_hidden")
        check_ids("target_index", target_index, (depths, anchors), like=draft_hidden)

    def chunks(self, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunks of `step` anchors: the anchors, the hidden states of the targets they need, and the row in these of
        each depth and anchor. Depths look at the same positions, shifted by one, so they share targets."""
        check_range("target_index", self.target_index, len(self.target_hidden), "rows of target_hidden")
        for anchors in slices(self.target_index.shape[1], step):
            needed, index = self.target_index[:, anchors].unique(return_inverse=True)
            yield anchors, self.target_hidden[needed], index


Place: TypeAlias = tuple[int | slice, slice]
Use: TypeAlias = Callable[[Place, Tensor, Tensor, Tensor | None], None]
# (inputs, scale [K, N] or None, whether gradients are wanted, use)
Sweep: TypeAlias = Callable[[Inputs, Tensor | None, bool, Use], None]


def forward(sweep: Sweep, inputs: Inputs, want_row_grad: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """value and alpha [K, N], and if wanted the gradient of value on draft_hidden [K, N, D], summed over the group."""
    hidden, weight = inputs.draft_hidden, inputs.weight
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    value = hidden.new_empty(hidden.shape[:2], dtype=dtype)
    alpha = torch.empty_like(value)
    row_grad = torch.empty_like(hidden, memory_format=torch.contiguous_format) if want_row_grad else None

    def use(at: Place, chunk_value: Tensor, chunk_alpha: Tensor, grad: Tensor | None) -> None:
        value[at], alpha[at] = chunk_value, chunk_alpha
        if row_grad is not None and grad is not None:
            row_grad[at] = (grad @ weight).view_as(row_grad[at])

    sweep(inputs, None, want_row_grad, use)
    return value, alpha, None if row_grad is None else all_sum(row_grad, inputs.group)


def backward(sweep: Sweep, inputs: Inputs, grad_value: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of draft_hidden, summed over the group, and of the weight, summed over chunks in float32 or wider."""
    hidden, weight = inputs.draft_hidden, inputs.weight
    grad_draft = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def use(at: Place, value: Tensor, alpha: Tensor, grad: Tensor | None) -> None:
        assert grad is not None
        grad_draft[at] = (grad @ weight).view_as(grad_draft[at])
        rows = hidden[at].reshape(-1, hidden.shape[-1])
        if grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.T, rows)
        else:
            grad_weight.add_(grad.T @ rows)

    sweep(inputs, grad_value, True, use)
    return all_sum(grad_draft, inputs.group), grad_weight.to(weight.dtype)


def scale_rows(row_grad: Tensor, grad_value: Tensor) -> Tensor:
    """row_grad [K, N, D] times grad_value [K, N], multiplied in the wider type and rounded once."""
    return torch.mul(row_grad, grad_value[..., None], out=torch.empty_like(row_grad))
