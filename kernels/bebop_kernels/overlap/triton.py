"""tv_overlap in Triton: one sweep for the normalisers of both rows, one for overlap and S, one for the gradient.

`saved` [N, 5]: maximum and sum of the draft row, of the target row, S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels._triton import launch
from bebop_kernels._triton.launch import unavailable, unit_columns
from bebop_kernels.rows import check_sums
from bebop_kernels.tensor_parallel import Group

__all__ = ["backward", "forward", "unavailable"]


def forward(draft_logits: Tensor, target_logits: Tensor, temperature: float, group: Group) -> tuple[Tensor, Tensor]:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    saved = draft.new_empty(len(draft), 5, dtype=torch.float32)
    launch.sums(draft, target, temperature, group, out=saved)
    check_sums("draft_logits", saved[:, 1])
    check_sums("target_logits", saved[:, 3])
    alpha, saved[:, 4] = launch.overlap(draft, target, None, saved, saved[:, 2:], temperature, group).unbind(1)
    return alpha.clamp(max=1), saved


def backward(
    grad_alpha: Tensor, draft_logits: Tensor, target_logits: Tensor, saved: Tensor, temperature: float, group: Group
) -> Tensor:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    grad = torch.empty(draft.shape, dtype=draft.dtype, device=draft.device)
    return launch.gradient(
        draft, target, None, saved, saved[:, 2:], saved[:, 4], grad_alpha.contiguous(), temperature, grad
    )
