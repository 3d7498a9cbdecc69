"""The reward is the task's own verifier, on prompts that travel as verl's rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import pack, score, unpack
from bebop.data.tokenizer import encode_prompt, load_tokenizer
from bebop.errors import BadInput
from bebop.rl.prompts import prompts_that_fit, rows, write_parquet
from bebop.rl.rollout import reward


def compute_score(*args) -> float:
    return asyncio.run(reward.compute_score(*args))["score"]


@pytest.fixture(scope="module")
def prompts():
    return make_prompts([Task(name="chain_sum")], 6, 0, "rl")


def test_right_and_wrong_answers_score_as_the_verifier_says(prompts):
    for prompt in prompts:
        for text in (prompt.solution, "no answer", f"Answer: {prompt.entry['answer']}", "Answer: -999999"):
            assert compute_score(prompt.task, text, pack(prompt)) == score(prompt, text)
        assert compute_score(prompt.task, prompt.solution, pack(prompt)) == 1.0
        assert compute_score(prompt.task, "Answer: -999999", pack(prompt)) < 1.0


def test_a_packed_prompt_keeps_all_but_its_worked_solution(prompts):
    again = unpack(pack(prompts[0]))
    assert (again.prompt_id, again.text, dict(again.entry)) == (
        prompts[0].prompt_id,
        prompts[0].text,
        dict(prompts[0].entry),
    )
    assert again.solution is None


def test_parquet_keeps_the_order_of_training(prompts, tmp_path: Path):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(write_parquet(prompts, tmp_path / "prompts.parquet")).to_pylist()
    assert [row["extra_info"]["prompt_id"] for row in table] == [prompt.prompt_id for prompt in prompts]
    assert table[0]["prompt"] == rows(prompts)[0]["prompt"]


def test_too_long_prompts_are_left_out_before_sampling(tiny_random: Path):
    tokenizer = load_tokenizer(tiny_random)
    tasks = [Task(name="chain_sum", params={"min_terms": 2, "max_terms": 6})]
    all_of_them, none = prompts_that_fit(tasks, 12, 0, tokenizer, 1000)
    assert none == 0
    lengths = sorted(len(encode_prompt(tokenizer, prompt)) for prompt in all_of_them)
    short, left_out = prompts_that_fit(tasks, 12, 0, tokenizer, lengths[5])
    assert len(short) == 12 and left_out >= 5
    assert all(len(encode_prompt(tokenizer, prompt)) <= lengths[5] for prompt in short)
    assert short[0] in all_of_them  # those that fit keep their order
    with pytest.raises(BadInput, match=r"max_prompt_tokens: got 3, and only 0 of"):
        prompts_that_fit(tasks, 12, 0, tokenizer, 3)
