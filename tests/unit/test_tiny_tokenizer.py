"""The tiny policy's tokenizer, as transformers loads it beside `model_type: qwen2`."""

from __future__ import annotations

import json

import pytest

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tokenizer import encode_prompt, load_tokenizer, write_integer_tokenizer, write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_random):
    return load_tokenizer(tiny_random)


def test_tokenizer_loads_through_qwen2s_class_with_its_special_tokens(tokenizer):
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert 300 < len(tokenizer) < 600
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_digits_and_fixed_words_are_single_tokens(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("12 + 93 = 105\nAnswer: 105")["input_ids"])
    assert tokens == ["1", "2", "Ġ+", *"Ġ93", "Ġ=", *"Ġ105", "Ċ", "Answer", ":", *"Ġ105"]
    question = tokenizer("State the final answer to the following arithmetic problem:")["input_ids"]
    assert len(question) == 10


def test_prompt_is_one_user_turn_and_the_generation_prompt(tokenizer):
    (prompt,) = make_prompts([Task(name="chain_sum")], 1, 0, "rl")
    ids = encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(ids) == f"<|user|>{prompt.text}<|assistant|>"
    solved = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": "Answer: 1"}]
    whole = tokenizer.apply_chat_template(solved, tokenize=True, return_dict=False)
    assert whole[: len(ids)] == ids
    assert whole[-1] == tokenizer.eos_token_id


def test_solutions_are_40_to_200_tokens_or_close(tokenizer):
    task = Task(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2})
    lengths = [len(tokenizer(p.solution)["input_ids"]) + 1 for p in make_prompts([task], 200, 0, "train")]
    assert min(lengths) >= 30
    assert 45 < sum(lengths) / 200 < 90
    assert max(lengths) <= 200


def test_the_same_files_are_written_each_time(tmp_path):
    for name in ("one", "two"):
        write_tiny_tokenizer(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


def test_integer_vocabulary_has_exactly_the_asked_size(tmp_path):
    write_integer_tokenizer(tmp_path, 8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert len(load_tokenizer(tmp_path)) == 8
    with pytest.raises(ValueError, match="vocab=3"):
        write_integer_tokenizer(tmp_path, 3)


def test_missing_chat_template_is_named(tmp_path):
    write_integer_tokenizer(tmp_path, 8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (prompt,) = make_prompts([Task(name="chain_sum")], 1, 0, "rl")
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(load_tokenizer(tmp_path), prompt)
