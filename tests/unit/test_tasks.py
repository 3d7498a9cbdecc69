"""Tasks, their worked solutions and verifiers, and the splits that prompts come in."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from bebop.config import Task
from bebop.data.prompts import SPLITS, make_prompts, split_of
from bebop.data.tasks import extract_answer, score, worked_solution
from bebop.data.worked_solutions import Hand

CHAIN = Task(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2})
VARIANTS = [
    CHAIN,
    Task(name="chain_sum", params={"allow_negation": True, "max_digits": 4}),
]


@pytest.mark.parametrize("task", VARIANTS, ids=lambda task: f"{task.name}-{len(task.params)}")
def test_every_worked_solution_scores_one(task):
    prompts = make_prompts([task], 60, 3, "train")
    assert [score(prompt, prompt.solution) for prompt in prompts] == [1.0] * 60


def test_slips_make_solutions_wrong_and_keep_their_form():
    prompts = make_prompts([CHAIN], 200, 0, "pretrain")
    slipped = [worked_solution(p.task, p.entry, Hand(0.15, 0.0, i)) for i, p in enumerate(prompts)]
    rewards = [score(prompt, text) for prompt, text in zip(prompts, slipped, strict=True)]
    assert 0.3 < sum(reward == 1 for reward in rewards) / 200 < 0.75
    assert all(extract_answer(text).lstrip("-").isdigit() for text in slipped)


def test_an_unmarked_answer_scores_nothing():
    prompts = make_prompts([CHAIN], 50, 0, "pretrain")
    texts = [worked_solution(p.task, p.entry, Hand(0.0, 1.0, i)) for i, p in enumerate(prompts)]
    assert [score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)] == [0.0] * 50


def test_prompts_depend_only_on_arguments_and_seed():
    one, same, other = (make_prompts(VARIANTS, 40, seed, "rl") for seed in (1, 1, 2))
    assert one == same
    assert {prompt.text for prompt in one}.isdisjoint({prompt.text for prompt in other})
    assert len({prompt.prompt_id for prompt in one}) == 40


def test_splits_never_share_a_question():
    assert sorted(bucket for buckets in SPLITS.values() for bucket in buckets) == list(range(16))
    for split in SPLITS:
        assert all(split_of(p.entry["question"]) == split for p in make_prompts([CHAIN], 30, 0, split, solutions=False))


def test_weights_are_shares_of_prompts():
    tasks = [CHAIN.model_copy(update={"weight": 3.0}), Task(name="products")]
    prompts = make_prompts(tasks, 400, 0, "rl", solutions=False)
    assert 0.68 < sum(prompt.task == "chain_sum" for prompt in prompts) / 400 < 0.82


def test_instruction_follows_the_question():
    task = Task(name="gcd", instruction='End with a line "Answer: ...".')
    (prompt,) = make_prompts([task], 1, 0, "eval")
    assert prompt.text == prompt.entry["question"] + '\nEnd with a line "Answer: ...".'
    assert prompt.solution is None
    assert score(prompt, f"So it is.\nAnswer: {prompt.entry['answer']}") == 1.0


def test_score_survives_a_round_trip_through_json():
    (prompt,) = make_prompts([CHAIN], 1, 0, "rl")
    again = type(prompt)(**json.loads(json.dumps(dataclasses.asdict(prompt))))
    assert score(again, prompt.solution) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 42", "42"),
        ("Answer: 1\nno, Answer:  -7 \nthat is all", "-7"),
        ("Answer: 42<|endoftext|>", "42"),
        ("Answer:", None),
        ("42", None),
        ("", None),
    ],
)
def test_answer_is_the_rest_of_the_last_answer_line(response, answer):
    assert extract_answer(response) == answer


def test_a_response_without_an_answer_line_earns_nothing():
    (prompt,) = make_prompts([CHAIN], 1, 0, "rl")
    assert score(prompt, prompt.entry["answer"]) == 0.0
    assert score(prompt, "Answer: x") == 0.0


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(name="chain_sums"), ["chain_sums", "did you mean chain_sum"]),
        (Task(name="chain_sum", params={"max_term": 3}), ["max_term"]),
        (Task(name="chain_sum", params={"seed": 3}), ["params.seed"]),
        (Task(name="chain_sum", params={"min_terms": 5, "max_terms": 2}), ["max_terms"]),
    ],
)
def test_wrong_task_is_refused_by_name_in_one_line(task, words):
    with pytest.raises(ValueError) as error:
        make_prompts([task], 1, 0, "rl")
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_task_without_questions_in_the_split_is_an_error():
    single = Task(name="chain_sum", params={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    texts = {split_of(p.text) for split in SPLITS for p in _or_none(single, split)}
    assert texts <= set(SPLITS)
    with pytest.raises(ValueError, match="more digits, terms or values"):
        for split in SPLITS:
            make_prompts([single], 1, 0, split)


def _or_none(task, split):
    try:
        return make_prompts([task], 5, 0, split)
    except ValueError:
        return []


def test_concurrent_threads_in_a_new_process_find_the_task(repo):
    script = """
from concurrent.futures import ThreadPoolExecutor
from bebop.data.tasks import dataset
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda i: dataset("chain_sum", {"max_terms": 3 + i}), range(8)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]


def test_unknown_split_is_named():
    with pytest.raises(ValueError, match=r"split='test'.*rl"):
        make_prompts([CHAIN], 1, 0, "test")


@pytest.mark.parametrize("name", ["gsm_symbolic", "list_functions"])
def test_data_set_that_lists_its_items_is_made_once(name):
    """reasoning-gym keeps a list of `size` entries for these: 2^31 would be 17 GB."""
    from bebop.data.tasks import dataset

    prompts = make_prompts([Task(name=name)], 3, 0, "eval", solutions=False)
    assert len({prompt.text for prompt in prompts}) == 3
    assert len(dataset(name, {})) <= 2**20
