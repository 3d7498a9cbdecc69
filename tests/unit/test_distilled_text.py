"""Text that heads are trained on: given files, masks, and text sets that runs share."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bebop.data import load_tokenizer
from bebop.data.distill import TextRow, read_rows, text_set
from bebop.data.given import load_parquet, require_supervision
from bebop.records import Prompt

CHAT = [
    {"role": "user", "content": "Calculate 1 + 2"},
    {"role": "assistant", "content": "Answer: 3"},
    {"role": "user", "content": "Calculate 2 + 2"},
    {"role": "assistant", "content": "Answer: 4"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_random):
    return load_tokenizer(tiny_random)


def _file(tmp_path, rows):
    path = tmp_path / "given.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def _supervised(row, tokenizer):
    return tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m])


def test_only_the_assistants_turns_are_supervised(tmp_path, tokenizer):
    (row,) = load_parquet(_file(tmp_path, [{"messages": CHAT}]), tokenizer, max_tokens=512)
    assert _supervised(row, tokenizer) == "Answer: 3<|endoftext|>Answer: 4<|endoftext|>"
    assert "Calculate 1 + 2" in tokenizer.decode(row.prompt_ids)
    assert row.logprobs is None


def test_given_text_is_supervised_whole_but_for_its_first_token(tmp_path, tokenizer):
    (row,) = load_parquet(_file(tmp_path, [{"text": "Calculate 1 + 2"}]), tokenizer, max_tokens=512)
    assert tokenizer.decode(row.input_ids) == "Calculate 1 + 2"
    assert row.loss_mask == [0] + [1] * (len(row.input_ids) - 1)


def test_prompts_alone_are_for_the_policy_to_answer(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "Calculate 2 + 2"}]
    rows = load_parquet(_file(tmp_path, [{"prompt": chat}]), tokenizer, max_tokens=512)
    assert rows == [Prompt("given/0", "given", "Calculate 2 + 2")]


def test_prompt_and_response_make_a_chat(tmp_path, tokenizer):
    file = _file(tmp_path, [{"prompt": "Calculate 1 + 2", "response": "Answer: 3"}])
    (row,) = load_parquet(file, tokenizer, max_tokens=512)
    assert _supervised(row, tokenizer) == "Answer: 3<|endoftext|>"


def test_long_text_is_cut(tmp_path, tokenizer):
    (row,) = load_parquet(_file(tmp_path, [{"text": "1 + 2 " * 50}]), tokenizer, max_tokens=20)
    assert len(row.input_ids) == len(row.loss_mask) == 20


def test_unknown_columns_are_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"has columns body, expected one of messages, prompt, text"):
        load_parquet(_file(tmp_path, [{"body": "x"}]), tokenizer, max_tokens=20)


def test_a_set_without_supervision_blames_the_chat_template(tmp_path, tokenizer):
    """A template that renders turns otherwise than their prompts leaves every mask at zero."""
    broken = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    broken.chat_template = (
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = load_parquet(_file(tmp_path, [{"messages": CHAT}] * 2), broken, max_tokens=512)
    with pytest.raises(ValueError, match=r"0 supervised tokens in 2 sequences.*chat_template"):
        require_supervision(rows, "given.parquet")


def test_one_unsupervised_row_among_good_ones_is_fine():
    rows = [TextRow("a", "t", (1,), (2, 3), (0, 0)), TextRow("b", "t", (1,), (2, 3), (1, 1))]
    require_supervision(rows, "given")


def test_a_text_set_is_made_once_for_the_same_parts(tmp_path):
    rows = [TextRow("a/0", "a", (1, 2), (3, 4), (1, 1), (-0.5, -1.0)), TextRow("a/1", "a", (1,), (5,), (1,), (-0.25,))]
    made = []

    def make():
        made.append(1)
        return {"train": rows, "heldout": rows[:1]}

    folder, meta = text_set(tmp_path, {"seed": 0}, make)
    again, _ = text_set(tmp_path, {"seed": 0}, make)
    other, _ = text_set(tmp_path, {"seed": 1}, make)
    assert folder == again != other
    assert len(made) == 2
    assert read_rows(folder / "train.parquet") == rows
    assert (meta["num_train"], meta["num_train_response_tokens"], meta["sampled_by_policy"]) == (2, 3, True)


def test_a_set_that_was_not_finished_is_made_again(tmp_path):
    def fails():
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        text_set(tmp_path, {}, fails)
    assert not list(tmp_path.iterdir())
    rows = [TextRow("a", "t", (1,), (2,), (1,))]
    folder, meta = text_set(tmp_path, {}, lambda: {"train": rows, "heldout": rows})
    assert read_rows(folder / "heldout.parquet") == rows
    assert meta["sampled_by_policy"] is False
