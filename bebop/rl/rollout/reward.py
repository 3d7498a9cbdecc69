"""The reward: the task's own verifier on the response's text, through verl's `reward.custom_reward_function`.

A coroutine, so that verl calls it on its event loop one at a time: in a thread pool the first calls would race to
import reasoning-gym. Scoring takes half a millisecond.
"""

from __future__ import annotations

from typing import Any

from bebop.data.tasks import score
from bebop.rl.prompts import unpack


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Score in [0, 1] of a response. `ground_truth` is the prompt as `bebop.rl.prompts.pack` wrote it."""
    return float(score(unpack(ground_truth), solution_str))
