"""The reward of a GRPO run: a verifier on the response's text, in the box (`bebop.verifiers`).

verl calls `compute_score` (`reward.custom_reward_function`) on its event loop, and passes `reward_kwargs` to it: the
settings of the box.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from bebop.verifiers import TASKS_FUNCTION, VerifierBox


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    function: str = TASKS_FUNCTION,
    sealed: bool = True,
    timeout_s: float = 4.0,
    **_: Any,
) -> dict[str, Any]:
    """Score of a response, under verl's names `score` and `acc`, and the kind of failure or "" as `verifier_failure`.

    function: see `VerifierBox`; for bebop's tasks, ground_truth is the prompt as data.tasks.pack wrote it.
    """
    box = _box(function, sealed, timeout_s)
    verdict = await asyncio.wrap_future(
        box.submit(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    )
    return {"score": verdict.score, "acc": verdict.score, "verifier_failure": verdict.failure or ""}


@functools.lru_cache(maxsize=4)
def _box(function: str, sealed: bool, timeout_s: float) -> VerifierBox:
    bounds = (0.0, 1.0) if function == TASKS_FUNCTION else None
    return VerifierBox(function, sealed=sealed, timeout_s=timeout_s, bounds=bounds)
