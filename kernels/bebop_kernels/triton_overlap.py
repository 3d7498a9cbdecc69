"""tv_overlap in Triton: one sweep for both rows' normalisers, one for overlap and S, one for the gradient.

`saved` [N, 5]: maximum and sum of the draft row, of the target row, S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels import triton_launch as launch
from bebop_kernels.triton_rows import unavailable, unit_columns

__all__ = ["backward", "forward", "unavailable"]


def forward(draft_logits: Tensor, target_logits: Tensor, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    saved = draft.new_empty(len(draft), 5, dtype=torch.float32)
    launch.sums(draft, target, temperature, group, out=saved)
    launch.check("draft_logits", saved[:, 1])
    launch.check("target_logits", saved[:, 3])
    alpha, saved[:, 4] = launch.overlap(draft, target, None, saved, saved[:, 2:], temperature, group).unbind(1)
    return alpha.clamp(max=1), saved


def backward(
    grad_alpha: Tensor, draft_logits: Tensor, target_logits: Tensor, saved: Tensor, temperature: float, group: Any
) -> Tensor:
    draft, target = unit_columns(draft_logits), unit_columns(target_logits)
    grad = torch.empty(draft.shape, dtype=draft.dtype, device=draft.device)
    return launch.gradient(
        draft, target, None, saved, saved[:, 2:], saved[:, 4], grad_alpha.contiguous(), temperature, grad
    )
