"""Given text: parquet files of chats, of plain text, or of prompts.

Columns: `messages` (chats; the assistant's turns are supervised), `text` (all tokens are supervised), or `prompt` with
`response`; `prompt` alone is for the policy to answer.

A chat is one row where its template renders every turn behind the turns before it, as they were. Templates that rewrite
history (a thinking model's, which strip the reasoning of earlier turns) make a row of each turn that sees another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from bebop.data.self_distill import TextRow
from bebop.errors import BadInput
from bebop.records import Prompt

log = logging.getLogger(__name__)
COLUMNS = ("messages", "prompt", "text")
Ids = list[int]


@dataclass(frozen=True)
class _Made:
    """What one row of a file is made of: (prompt ids, response ids, response mask) each."""

    rows: list[tuple[Ids, Ids, Ids]]
    turns: int = 0  # of the assistant
    lost: int = 0  # those among them that are not supervised


def load_parquet(path: Path, tokenizer: Any, *, max_tokens: int) -> list[TextRow] | list[Prompt]:
    """Given text, or the prompts of a file that has prompts alone.

    max_tokens: rollout.max_model_len, where sequences are cut. What is cut, and assistant turns that cannot be
    supervised, are counted in one line of the log each. The prompt_id of a row is NAME/ROW of the file, with the row's
    number behind it where a chat makes several (`chat_of`). Raises ValueError where no known column is there, or where
    a column has a type that it cannot have.
    """
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    column = _column(table.column_names, path)
    rows = table.to_pylist()
    name = path.stem
    if _prompts_alone(table.column_names, path):
        return [Prompt(f"{name}/{i}", name, _user_text(row["prompt"], path)) for i, row in enumerate(rows)]
    makers: dict[str, Callable[..., _Made]] = {"messages": _from_messages, "prompt": _from_pair, "text": _from_text}
    made = [makers[column](row, tokenizer, path) for row in rows]
    whole = [
        (f"{name}/{i}" + (f"/{number}" if len(each.rows) > 1 else ""), *row)
        for i, each in enumerate(made)
        for number, row in enumerate(each.rows)
    ]
    _report(path, whole, made, max_tokens)
    return [_cut(*row, name, max_tokens) for row in whole]


def is_text(path: Path) -> bool:
    """Whether a file holds text, and not prompts alone. Raises ValueError where no known column is there."""
    import pyarrow.parquet as parquet

    return not _prompts_alone(parquet.read_schema(path).names, path)


def chat_of(row: TextRow | Prompt) -> str:
    """The part of a row's prompt_id that the rows of one chat share."""
    return "/".join(row.prompt_id.split("/")[:2])


def _column(names: Sequence[str], path: Path) -> str:
    column = next((name for name in COLUMNS if name in names), None)
    if column is None:
        raise BadInput(f"data.path={path}: has columns {', '.join(names)}, expected one of {', '.join(COLUMNS)}")
    return column


def _prompts_alone(names: Sequence[str], path: Path) -> bool:
    return _column(names, path) == "prompt" and "response" not in names


def _cut(prompt_id: str, prompt_ids: Ids, response_ids: Ids, mask: Ids, task: str, max_tokens: int) -> TextRow:
    prompt_ids, room = prompt_ids[:max_tokens], max(0, max_tokens - len(prompt_ids))
    return TextRow(prompt_id, task, tuple(prompt_ids), tuple(response_ids[:room]), tuple(mask[:room]), None)


def _report(path: Path, rows: Sequence[tuple[str, Ids, Ids, Ids]], made: Sequence[_Made], max_tokens: int) -> None:
    cut = sum(len(prompt) + len(response) > max_tokens for _, prompt, response, _ in rows)
    if cut:
        log.warning(
            "text: %d of %d rows of data.path=%s are cut at %d tokens; raise rollout.max_model_len to keep them whole",
            cut,
            len(rows),
            path,
            max_tokens,
        )
    turns, lost = sum(each.turns for each in made), sum(each.lost for each in made)
    if lost:
        log.warning(
            "text: %d of %d assistant turns of data.path=%s are not supervised: the chat template does not render them "
            "behind its generation prompt",
            lost,
            turns,
            path,
        )


def require_supervision(rows: Sequence[TextRow], source: str) -> None:
    """Raise ValueError where no token of the whole set is supervised: the template or the limit is wrong, not a row."""
    if not any(any(row.response_mask) for row in rows):
        raise BadInput(
            f"{source}: 0 supervised tokens in {len(rows)} sequences; the tokenizer's chat template renders no "
            "assistant turn behind its generation prompt: check chat_template in the policy's tokenizer files, or give "
            "the text in a column `text`; or raise rollout.max_model_len where prompts alone are as long"
        )


def _from_text(row: Mapping[str, Any], tokenizer: Any, path: Path) -> _Made:
    if not isinstance(row["text"], str):
        raise BadInput(f"data.path={path}: column text holds {type(row['text']).__name__}, expected a string")
    ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
    return _Made([(ids[:1], ids[1:], [1] * max(0, len(ids) - 1))])  # nothing predicts the first token


def _from_pair(row: Mapping[str, Any], tokenizer: Any, path: Path) -> _Made:
    prompt = [{"role": "user", "content": _user_text(row["prompt"], path)}]
    return _from_messages({"messages": [*prompt, {"role": "assistant", "content": row["response"]}]}, tokenizer, path)


def _from_messages(row: Mapping[str, Any], tokenizer: Any, path: Path) -> _Made:
    """Supervise what each assistant turn adds to its own prompt, as the policy would have seen it.

    A turn begins where its rendering leaves that of the chat before it with the generation prompt: behind the whole
    prompt, or inside it where the prompt opens what the turn does not have (a thinking template's `<think>`). A turn
    that has nothing of its generation prompt is not supervised.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise BadInput(f"data.path={path}: column messages expects lists of {{role, content}}, got {messages!r:.80}")

    def render(upto: int, prompt: bool) -> Ids:
        return list(
            tokenizer.apply_chat_template(
                messages[:upto], add_generation_prompt=prompt, tokenize=True, return_dict=False
            )
        )

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    rows: list[tuple[Ids, list[tuple[int, int]]]] = []  # ids, and the spans of them that are supervised
    for i in turns:
        before, after = render(i, True), render(i + 1, False)
        start = _shared(before, after)
        if start == len(after) or (start < len(before) and start <= _shared(before, render(i, False))):
            continue
        last, spans = rows[-1] if rows else ([], [])
        if rows and start >= len(last) and after[: len(last)] == last:
            rows[-1] = after, [*spans, (start, len(after))]
        else:
            rows.append((after, [(start, len(after))]))
    supervised = sum(len(spans) for _, spans in rows)
    if not rows:
        return _Made([(render(len(messages), False), [], [])], len(turns), len(turns))
    return _Made([_masked(ids, spans) for ids, spans in rows], len(turns), len(turns) - supervised)


def _shared(a: Ids, b: Ids) -> int:
    """Tokens that two renderings begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _masked(ids: Ids, spans: Sequence[tuple[int, int]]) -> tuple[Ids, Ids, Ids]:
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    first = spans[0][0]
    return ids[:first], ids[first:], mask[first:]


def _user_text(prompt: Any, path: Path) -> str:
    """The user's turn of a `prompt` cell: a string, or a chat of one turn (verl's layout)."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping) and "content" in prompt[0]:
        return prompt[0]["content"]
    raise BadInput(
        f"data.path={path}: column prompt holds {prompt!r:.80}, expected a string or a list of one {{role, content}}"
    )
