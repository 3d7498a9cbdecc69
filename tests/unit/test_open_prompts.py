"""Open prompts train and score heads; a reward for them is refused, not invented."""

from __future__ import annotations

import pytest

from bebop.config import Task
from bebop.data import make_prompts, score
from bebop.data.prompts import split_of


def test_open_prompts_fall_into_splits_that_share_no_question():
    questions = {
        split: {prompt.text for prompt in make_prompts([Task(name="open_prompts")], 60, 0, split)}
        for split in ("train", "heldout", "eval")
    }
    for split, texts in questions.items():
        assert len(texts) > 20
        assert {split_of(text) for text in texts} == {split}


def test_a_reward_for_an_open_prompt_is_refused():
    (prompt,) = make_prompts([Task(name="open_prompts")], 1, 0, "eval")
    with pytest.raises(ValueError, match="open_prompts: has no verifier"):
        score(prompt, "Answer: 3")


def test_open_prompts_take_no_parameters():
    with pytest.raises(ValueError, match="takes no params"):
        make_prompts([Task(name="open_prompts", params={"max_terms": 2})], 1, 0, "train")
