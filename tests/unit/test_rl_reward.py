"""The reward is the task's own verifier, on prompts that travel as verl's rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import pack, score, unpack
from bebop.rl.prompts import rows, write_parquet
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
