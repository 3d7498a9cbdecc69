"""A sample of recipes/verifiers: odd answers to reasoning-gym's verifiers, in the box. The recipe runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bebop.verifiers import TASKS_FUNCTION, VerifierBox

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "verifiers"))
import odd_answers

EVALUATE = ("countdown", "game_of_life")  # these two run code that stands in an answer
FEW = ("shell", "memory", "round brackets", "nan", "megabytes", "lone surrogates", "NUL bytes")


@pytest.fixture(scope="module")
def box():
    with VerifierBox(TASKS_FUNCTION, timeout_s=2.0, at_once=2, bounds=(0.0, 1.0)) as made:
        yield made


@pytest.fixture
def bait():
    made = odd_answers.Bait()
    yield made
    made.close()


@pytest.mark.parametrize("task", EVALUATE)
def test_no_odd_answer_writes_connects_or_breaks_a_verifier(box, bait, task):
    row = odd_answers.judge(box, task, odd_answers.odd_answers(bait.target, bait.port))
    assert len(row.verdicts) >= 30 and not row.faults() and not bait.faults()


def test_every_fourth_task_scores_odd_answers_between_0_and_1(box, bait):
    from reasoning_gym.factory import DATASETS

    every = odd_answers.odd_answers(bait.target, bait.port)
    answers = {name: every[name] for name in FEW}
    for task in sorted(set(DATASETS) - {"composite"})[::4]:
        assert not odd_answers.judge(box, task, answers).faults()
    assert not bait.faults()
