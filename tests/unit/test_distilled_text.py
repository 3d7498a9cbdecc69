"""Text that heads are trained on: given files, masks, and text sets that runs share."""

import logging
import shutil

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bebop.config import Data, Loss, Model, RolloutSection, Sft, SftConfig, Task
from bebop.data import load_tokenizer
from bebop.data.batches import trainable
from bebop.data.packing import pack
from bebop.data.provided import chat_of, load_file, require_supervision
from bebop.data.self_distill import TextRow, read_rows, text_set
from bebop.records import Prompt
from bebop.sft.training_sequences import prepare_text

CHAT = [
    {"role": "user", "content": "Calculate 1 + 2"},
    {"role": "assistant", "content": "Answer: 3"},
    {"role": "user", "content": "Calculate 2 + 2"},
    {"role": "assistant", "content": "Answer: 4"},
]
# As thinking models have them: the prompt opens the reasoning, a turn without any does not, and turns before the last
# question lose theirs.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>\n{% if m.reasoning and loop.index0 > ns.last %}<think>\n{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_random):
    return load_tokenizer(tiny_random)


@pytest.fixture
def thinking(tokenizer):
    other = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    other.chat_template = THINKING
    return other


def _file(tmp_path, rows):
    path = tmp_path / "given.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def _supervised(row, tokenizer):
    return tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m])


def test_only_the_assistants_turns_are_supervised(tmp_path, tokenizer):
    (row,) = load_file(_file(tmp_path, [{"messages": CHAT}]), tokenizer, max_tokens=512)
    assert _supervised(row, tokenizer) == "Answer: 3<|endoftext|>Answer: 4<|endoftext|>"
    assert "Calculate 1 + 2" in tokenizer.decode(row.prompt_ids)
    assert row.logprobs is None


def test_given_text_is_supervised_whole_but_for_its_first_token(tmp_path, tokenizer):
    (row,) = load_file(_file(tmp_path, [{"text": "Calculate 1 + 2"}]), tokenizer, max_tokens=512)
    assert tokenizer.decode(row.input_ids) == "Calculate 1 + 2"
    assert row.loss_mask == [0] + [1] * (len(row.input_ids) - 1)


def test_prompts_alone_are_for_the_policy_to_answer(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "Calculate 2 + 2"}]
    rows = load_file(_file(tmp_path, [{"prompt": chat}]), tokenizer, max_tokens=512)
    assert rows == [Prompt("given/0", "given", "Calculate 2 + 2")]


def test_prompt_and_response_make_a_chat(tmp_path, tokenizer):
    file = _file(tmp_path, [{"prompt": "Calculate 1 + 2", "response": "Answer: 3"}])
    (row,) = load_file(file, tokenizer, max_tokens=512)
    assert _supervised(row, tokenizer) == "Answer: 3<|endoftext|>"


def test_long_text_is_cut(tmp_path, tokenizer):
    (row,) = load_file(_file(tmp_path, [{"text": "1 + 2 " * 50}]), tokenizer, max_tokens=20)
    assert len(row.input_ids) == len(row.loss_mask) == 20


def test_cut_sequences_are_counted_in_one_line_with_the_key(tmp_path, tokenizer, caplog):
    file = _file(tmp_path, [{"text": "1 + 2 " * 50}, {"text": "1 + 2"}, {"text": "3 + 4 " * 30}])
    with caplog.at_level(logging.INFO):
        load_file(file, tokenizer, max_tokens=20)
        (line,) = caplog.messages
        assert line.startswith("text: 2 of 3 rows") and "cut at 20 tokens; raise rollout.max_model_len" in line
        caplog.clear()
        load_file(file, tokenizer, max_tokens=512)
    assert not caplog.messages


def test_a_prompt_above_the_limit_is_cut_as_well(tmp_path, tokenizer):
    file = _file(tmp_path, [{"prompt": "1 + 2 " * 50, "response": "Answer: 3"}])
    (row,) = load_file(file, tokenizer, max_tokens=20)
    assert len(row.input_ids) == 20 and not any(row.loss_mask)


def test_turn_without_its_generation_prompt_is_supervised_from_the_difference(tmp_path, thinking, caplog):
    """Without reasoning behind an opened <think>: as far as both go, the role alone, is the prompt."""
    (row,) = load_file(_file(tmp_path, [{"messages": CHAT[:2]}]), thinking, max_tokens=512)
    assert _supervised(row, thinking) == "Answer: 3<|endoftext|>"
    assert thinking.decode(row.prompt_ids).endswith("<|assistant|>\n")
    (row,) = load_file(_file(tmp_path, [{"messages": CHAT}]), thinking, max_tokens=512)
    assert _supervised(row, thinking) == "Answer: 3<|endoftext|>Answer: 4<|endoftext|>"
    assert not caplog.messages


def test_rewritten_history_makes_a_row_of_each_turn(tmp_path, thinking, caplog):
    chat = [m | {"reasoning": "So " if m["role"] == "assistant" else None} for m in CHAT]
    first, second, plain = load_file(
        _file(tmp_path, [{"messages": chat}, {"messages": chat[:2]}]), thinking, max_tokens=512
    )
    assert thinking.decode(first.prompt_ids) == "<|user|>Calculate 1 + 2<|assistant|>\n<think>\n"
    assert thinking.decode(second.prompt_ids) == (
        "<|user|>Calculate 1 + 2<|assistant|>\nAnswer: 3<|endoftext|><|user|>Calculate 2 + 2<|assistant|>\n<think>\n"
    )
    assert [_supervised(row, thinking) for row in (first, second)] == [
        "So </think>Answer: 3<|endoftext|>",
        "So </think>Answer: 4<|endoftext|>",
    ]
    assert all(all(row.response_mask) for row in (first, second))
    assert [row.prompt_id for row in (first, second, plain)] == ["given/0/0", "given/0/1", "given/1"]
    assert [chat_of(row) for row in (first, second, plain)] == ["given/0", "given/0", "given/1"]
    assert not caplog.messages


def test_turns_that_cannot_be_supervised_are_counted_in_one_line(tmp_path, tokenizer, caplog):
    """A template that renders some turns under a role that it does not prompt for."""
    odd = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    odd.chat_template = tokenizer.chat_template.replace("<|assistant|>{{", "{{ m }}<|assistant|>{{").replace(
        "{{ m }}", "{% if 'odd' in message['content'] %}<|user|>{% endif %}"
    )
    chat = [*CHAT[:2], CHAT[2], {"role": "assistant", "content": "odd"}]
    with caplog.at_level(logging.INFO):
        (row,) = load_file(_file(tmp_path, [{"messages": chat}]), odd, max_tokens=512)
    assert _supervised(row, odd) == "Answer: 3<|endoftext|>"
    (line,) = caplog.messages
    assert line.startswith("text: 1 of 2 assistant turns") and "generation prompt" in line


def test_unknown_columns_are_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"has columns body, expected one of messages, prompt, text"):
        load_file(_file(tmp_path, [{"body": "x"}]), tokenizer, max_tokens=20)


def test_a_set_without_supervision_blames_the_chat_template(tmp_path, tokenizer):
    """A template that renders turns otherwise than their prompts leaves every mask at zero."""
    broken = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    broken.chat_template = (
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = load_file(_file(tmp_path, [{"messages": CHAT}] * 2), broken, max_tokens=512)
    with pytest.raises(ValueError, match=r"0 supervised tokens in 2 sequences.*chat_template"):
        require_supervision(rows, "given.parquet")


def test_one_unsupervised_row_among_good_ones_is_fine():
    rows = [TextRow("a", "t", (1,), (2, 3), (0, 0)), TextRow("b", "t", (1,), (2, 3), (1, 1))]
    require_supervision(rows, "given")


def test_a_text_set_is_made_once_for_the_same_parts(tmp_path):
    rows = [TextRow("a/0", "a", (1, 2), (3, 4), (1, 1), (-0.5, -1.0)), TextRow("a/1", "a", (1,), (5,), (1,), (-0.25,))]
    made = []

    def make(inputs, left_out):
        made.append(inputs)
        left_out["odd"] += 2
        return {"train": rows, "heldout": rows[:1]}

    folder, meta = text_set(tmp_path, {"seed": 0}, make)
    again, _ = text_set(tmp_path, {"seed": 0}, make)
    other, _ = text_set(tmp_path, {"seed": 1}, make)
    assert meta["left_out"] == {"odd": 2}
    assert folder == again != other
    assert len(made) == 2
    assert read_rows(folder / "train.parquet") == rows
    assert (meta["num_train"], meta["num_train_response_tokens"], meta["sampled_by_policy"]) == (2, 3, True)


def test_a_set_that_was_not_finished_is_made_again(tmp_path):
    def fails(inputs, left_out):
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        text_set(tmp_path, {}, fails)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    rows = [TextRow("a", "t", (1,), (2,), (1,))]
    folder, meta = text_set(tmp_path, {}, lambda inputs, left_out: {"train": rows, "heldout": rows})
    assert read_rows(folder / "heldout.parquet") == rows
    assert meta["sampled_by_policy"] is False


def _config(path, policy, **rollout):
    source = "self_distill" if path is None else "parquet"
    data = Data(tasks=[Task(name="chain_sum")], num_prompts=8, num_heldout=1, path=path, source=source)
    return SftConfig(
        model=Model(name="hf", path=policy), data=data, loss=Loss(), sft=Sft(), rollout=RolloutSection(**rollout)
    )


def test_provided_text_is_remade_for_another_limit_or_template(tmp_path, tiny_random):
    policy = shutil.copytree(tiny_random, tmp_path / "policy")
    file = _file(tmp_path, [{"messages": CHAT}] * 3)

    def made(limit):
        return prepare_text(_config(file, policy, max_model_len=limit), policy, tmp_path)

    (folder, meta), (longer, _) = made(18), made(64)
    assert folder == made(18)[0] != longer
    assert meta["made_from"]["max_model_len"] == 18
    assert max(len(row.input_ids) for row in read_rows(folder / "train.parquet")) == 18
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|user|>", "<|user|> "))
    assert made(18)[0] != folder
    with pytest.raises(ValueError, match=r"0 supervised tokens in 1 sequences.*raise rollout.max_model_len if"):
        made(16)


def test_no_chat_is_both_trained_on_and_scored(tmp_path, tiny_random):
    policy = shutil.copytree(tiny_random, tmp_path / "policy")
    (policy / "chat_template.jinja").write_text(THINKING)
    chat = [m | {"reasoning": "So " if m["role"] == "assistant" else None} for m in CHAT]
    folder, _ = prepare_text(_config(_file(tmp_path, [{"messages": chat}] * 2), policy), policy, tmp_path)
    assert [row.prompt_id for row in read_rows(folder / "heldout.parquet")] == ["given/0/0"]
    assert [row.prompt_id for row in read_rows(folder / "train.parquet")] == ["given/1/0", "given/1/1"]
    with pytest.raises(ValueError, match=r"all 2 rows are of chats that data.num_heldout=1 sets aside"):
        prepare_text(_config(_file(tmp_path, [{"messages": chat}]), policy), policy, tmp_path)


def test_hints_name_the_keys_that_the_text_has(tiny_random):
    given, sampled = (TextRow("a", "t", (1,), (2, 3), (1, 1), logprobs) for logprobs in (None, (-1.0, -1.0)))
    with pytest.raises(ValueError, match=r"lower sft.depth, or give longer text or raise rollout.max_model_len"):
        trainable([given], 3, "training text")
    with pytest.raises(ValueError, match=r"lower sft.depth, or raise data.max_response_tokens"):
        trainable([sampled], 3, "training text")
    with pytest.raises(ValueError, match=r"lower data.max_response_tokens \(rollout.max_model_len where text is given"):
        pack([([1, 2, 3], [1, 1, 1])], 2)
