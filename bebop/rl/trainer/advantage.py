"""Group advantages of GRPO: (reward - mean) / standard deviation, both over the group's n responses (arXiv 2402.03300).

verl 0.9.1's `grpo` divides by the deviation with n - 1 in its denominator: the first advantage of rewards [1, 0, 0, 0]
is 1.5 there, and 1.732 here.
Registered with verl as `bebop_grpo`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

NAME = "bebop_grpo"


@register_adv_est(NAME)
def group_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, the same [B, T] tensor.

    token_level_rewards, response_mask: [B, T]; index: [B], the group of each row. Equal rewards in a group give
    advantages of 0. With `algorithm.norm_adv_by_std_in_grpo=false` nothing is divided (arXiv 2503.20783).
    """
    if config is not None:
        norm_adv_by_std_in_grpo = config.get("norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    with torch.no_grad():
        scores = token_level_rewards.sum(dim=-1)
        groups = torch.as_tensor(np.unique(index, return_inverse=True)[1], device=scores.device)
        centred, spread = torch.empty_like(scores), torch.empty_like(scores)
        for group in groups.unique():
            rows = groups == group
            centred[rows] = scores[rows] - scores[rows].mean()
            spread[rows] = scores[rows].std(correction=0)
        if norm_adv_by_std_in_grpo:
            centred = torch.where(spread > epsilon, centred / spread.clamp(min=epsilon), torch.zeros_like(centred))
        advantages = centred.unsqueeze(-1) * response_mask
    return advantages, advantages
