"""Rewards per second in the box and in this process, for the answers to one step of GRPO: chain_sum, 128 responses."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import compute_score, pack
from bebop.verifiers import VerifierBox

NUM_PROMPTS, GROUP, REPEATS = 16, 8, 5


def cpu_seconds() -> float:
    """Of this process and of those children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(name: str, score_all: Callable[[], list[float]], count: int) -> list[float]:
    """Print the fastest of REPEATS; returns the scores."""
    seconds = []
    for _ in range(REPEATS):
        start = time.monotonic()
        scores = score_all()
        seconds.append(time.monotonic() - start)
    print(f"{name}: {count} responses in {min(seconds):.3f} s, {count / min(seconds):.0f} a second (best of {REPEATS})")
    return scores


def main() -> int:
    prompts = make_prompts([Task(name="chain_sum")], NUM_PROMPTS, 0, "rl")
    answers = [
        {"data_source": prompt.task, "solution_str": f"Answer: {number}", "ground_truth": pack(prompt)}
        for prompt in prompts
        for number in (prompt.entry["answer"], *range(1, GROUP))
    ]
    count = len(answers)
    plain = measured("in this process", lambda: [compute_score(**answer) for answer in answers], count)
    before = cpu_seconds()
    with VerifierBox(bounds=(0.0, 1.0)) as box:
        box.score(**answers[0])  # starts the helper
        boxed = measured(
            "in the box",
            lambda: [future.result().score for future in [box.submit(**answer) for answer in answers]],
            count,
        )
    used = cpu_seconds() - before
    print(f"CPU seconds of the box with its start, {REPEATS * count + 1} responses: {used:.2f}")
    return 0 if plain == boxed else 1


if __name__ == "__main__":
    sys.exit(main())
