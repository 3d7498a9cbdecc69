"""Rows of parquet and JSON lines as users have them: what becomes text, what is left out, what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bebop.data import load_tokenizer
from bebop.data.batches import trainable
from bebop.data.packing import pack
from bebop.data.prompts import encode_prompts
from bebop.data.provided import load_file
from bebop.data.rows import read_file
from bebop.errors import BadInput, BebopError
from bebop.records import Prompt

USER, ANSWER = {"role": "user", "content": "Calculate 1 + 2"}, {"role": "assistant", "content": "Answer: 3"}


@pytest.fixture(scope="module")
def tokenizer(tiny_random):
    return load_tokenizer(tiny_random)


@pytest.fixture(params=["parquet", "jsonl"])
def write(request, tmp_path):
    def write(*rows) -> Path:
        path = tmp_path / f"given.{request.param}"
        if request.param == "parquet":
            parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def _text(path, tokenizer, **options):
    return [tokenizer.decode(row.input_ids) for row in load_file(path, tokenizer, max_tokens=512, **options)]


def test_nulls_are_left_out_and_counted_and_never_become_text(write, tokenizer):
    nothing = {"role": "assistant", "content": None}
    path = write(
        {"messages": [USER, ANSWER]},
        {"messages": [USER, nothing]},
        {"messages": None},
        {"messages": []},
        {"messages": [USER]},
    )
    left_out = Counter()
    texts = _text(path, tokenizer, left_out=left_out)
    assert texts == ["<|user|>Calculate 1 + 2<|assistant|>Answer: 3<|endoftext|>"]
    assert left_out == {"content is null": 1, "messages is null": 1, "messages is empty": 1, "no assistant turn": 1}


def test_a_missing_response_is_no_word(write, tokenizer):
    path = write(*({"prompt": "Calculate 1 + 2", "response": response} for response in ("Answer: 3", None, "")))
    left_out = Counter()
    assert len(_text(path, tokenizer, left_out=left_out)) == 1
    assert left_out == {"response is null": 1, "response is empty": 1}


def test_text_parts_are_joined(write, tokenizer):
    parts = [{"type": "text", "text": "Calculate "}, {"type": "text", "text": "1 + 2"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Answer: 3"}]}
    (text,) = _text(write({"messages": [{"role": "user", "content": parts}, answer]}), tokenizer)
    assert text.startswith("<|user|>Calculate 1 + 2<|assistant|>")


def test_keys_that_arrow_fills_with_nulls_are_dropped(write):
    arguments = {"city": "Rome", "unit": None}
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    spelled = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Rome"}'}}]}
    for message in (call, spelled):
        (chat,) = read_file(write({"messages": [USER, message], "tools": None}, {"messages": None})).rows.values()
        first, second = chat.messages
        assert first == USER and set(second) == {"role", "tool_calls"} and chat.tools is None
        assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Rome"}}


def test_failing_chat_template_drops_the_row_with_a_reason(write, tokenizer):
    strict = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    chat = [USER, ANSWER]
    left_out = Counter()
    path = write({"messages": chat}, {"messages": [{"role": "system", "content": "Be short."}, *chat]})
    assert len(_text(path, strict, left_out=left_out)) == 1
    assert left_out == {"the chat template raises: no system role": 1}
    strict.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(BadInput, match=r"given.*: 0 of 2 rows can be used: 2 the chat template raises: never; give"):
        _text(path, strict)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": "hello"}, r"messages: got 'hello' \(str\), expected a list of \{role, content\}"),
        ({"messages": [{"role": "assistant", "content": 3}]}, r"messages\[0\]\.content: got 3 \(int\)"),
        ({"messages": [{"role": 1, "content": "x"}]}, r"messages\[0\]\.role: got 1 \(int\), expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, r"a part of type 'image'"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {"name": 1}}]}]}, r"tool_calls\[0\]: got"),
        ({"prompt": 3}, r"prompt: got 3 \(int\), expected text or messages"),
        ({"prompt": [USER, ANSWER]}, r"prompt: got messages of user, assistant, expected text or one message of the"),
        ({"text": 3}, r"text: got 3 \(int\), expected a string"),
    ],
)
def test_another_type_is_refused_with_file_and_row(write, row, words):
    path = write(row)
    where = "row 0" if path.suffix == ".parquet" else "line 1"
    with pytest.raises(BadInput, match=rf"data\.path={path}: {where}: .*{words}") as caught:
        read_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"PAR1 no more", "cannot be read as parquet"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2: is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: is not JSON"),
        ("a.jsonl", b"[1]", "line 1: got"),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000, "line 1: is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: text: got"),
        ("a.jsonl", b"", "has columns none, expected one of"),
        ("a.jsonl", b'{"body": "x"}', "has columns body, expected one of"),
        ("a.jsonl", b'{"text": null}', "0 of 1 rows can be used: 1 text is null"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words) as caught:
        read_file(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_binary_text_names_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    column = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), path)
    with pytest.raises(BadInput, match="row 1: cannot be read"):
        read_file(path)


WORDS = ("Calculate 1 + 2", "Answer: 3", "", " ", "été \U0001f600", "<|user|>", "{% x %}", "\x00", "[1", '{"a": 1}')
ODD = (None, 0, -1.5, True, [], {}, [None], {"a": None}, [[]], {"type": "text"}, 2**70, 1e300)


def _value(draw: random.Random, depth: int = 0):
    if depth < 3 and draw.random() < 0.3:
        return [_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if depth < 3 and draw.random() < 0.3:
        return {draw.choice(("role", "content", "type", "text", "name")): _value(draw, depth + 1) for _ in range(2)}
    return draw.choice((*WORDS, *ODD))


def _maybe(draw: random.Random, right, wrong: float):
    return _value(draw) if draw.random() < wrong else right


def _chat(draw: random.Random, wrong: float):
    turns = []
    for i in range(draw.choice((0, 1, 2, 2, 2, 3, 4))):
        content = draw.choice(WORDS)
        if draw.random() < 0.2:
            content = [_maybe(draw, {"type": "text", "text": draw.choice(WORDS)}, wrong) for _ in range(2)]
        turn = {"role": _maybe(draw, ("user", "assistant")[i % 2], wrong), "content": _maybe(draw, content, wrong)}
        if draw.random() < 0.2:
            arguments = draw.choice(({"a": 1, "b": None}, '{"a": 1}', "{", None))
            call = {"function": {"name": "f", "arguments": _maybe(draw, arguments, wrong)}}
            turn["tool_calls"] = _maybe(draw, [_maybe(draw, call, wrong)], wrong)
        turns.append(_maybe(draw, turn, wrong))
    return turns


def _row(draw: random.Random, kind: str, wrong: float):
    if kind == "messages":
        row = {"messages": _maybe(draw, _chat(draw, wrong), wrong)}
        if draw.random() < 0.2:
            row["tools"] = _maybe(draw, draw.choice((None, "[]", [{"name": "f"}])), wrong)
        return row
    row = {name: _maybe(draw, draw.choice(WORDS), wrong) for name in kind.split()}
    if "prompt" in row and draw.random() < 0.3:
        row["prompt"] = _maybe(draw, [USER], wrong)
    return row


def _write_any(draw: random.Random, rows: list, path: Path) -> Path:
    """The rows as parquet, where Arrow has a type for them; else as JSON lines, some of them broken."""
    if draw.random() < 0.5:
        try:
            given = [{k: np.asarray(v) if isinstance(v, list) and not v else v for k, v in row.items()} for row in rows]
            parquet.write_table(pa.Table.from_pylist(given), path.with_suffix(".parquet"))
            return path.with_suffix(".parquet")
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            pass
    lines = [json.dumps(row) for row in rows]
    if draw.random() < 0.1:
        lines[draw.randrange(len(lines))] = draw.choice(("", "{", "[]", "null", '{"text": NaN}', '"x"', "\x00"))
    path.with_suffix(".jsonl").write_text("\n".join(lines))
    return path.with_suffix(".jsonl")


def test_random_files_are_trained_or_refused_in_one_line(tmp_path, tokenizer):
    ends = Counter()
    for seed in range(300):
        draw = random.Random(seed)
        wrong = draw.choice((0.0, 0.02, 0.1, 0.3))
        kind = draw.choice(("messages", "messages", "prompt response", "prompt", "text"))
        rows = [_row(draw, kind, wrong) for _ in range(draw.randrange(1, 7))]
        path, left_out = _write_any(draw, rows, tmp_path / f"f{seed}"), Counter()
        try:
            made = load_file(path, tokenizer, max_tokens=64, left_out=left_out)
            chats = {row.prompt_id.split("/")[1] for row in made}
            assert len(chats) + sum(left_out.values()) == sum(bool(line.strip()) for line in _lines(path, rows))
            if isinstance(made[0], Prompt):
                assert all("None" not in prompt.text for prompt in made)
                encode_prompts(made, 64, tokenizer, left_out)
            else:
                assert all("None" not in tokenizer.decode(row.input_ids) for row in made)
                kept = trainable(made, 1, "text", left_out)
                pack([(row.input_ids, row.loss_mask) for row in kept], 64)
            ends["left out" if left_out else "whole"] += 1
        except BebopError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, str(error)
            ends["refused"] += 1
    assert min(ends["whole"], ends["left out"], ends["refused"]) >= 30, ends


def _lines(path: Path, rows: list) -> list[str]:
    return path.read_text().splitlines() if path.suffix == ".jsonl" else ["row"] * len(rows)
