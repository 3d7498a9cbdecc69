"""Given text: parquet files of chats, of plain text, or of prompts.

Columns: `messages` (chats; the assistant's turns are supervised), `text` (all tokens are supervised), or `prompt` with
`response`; `prompt` alone is for the policy to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.data.distill import TextRow
from bebop.records import Prompt

COLUMNS = ("messages", "prompt", "text")


def load_parquet(path: Path, tokenizer: Any, *, max_tokens: int) -> list[TextRow] | list[Prompt]:
    """Given text, or the prompts of a file that has prompts alone.

    Sequences are cut after `max_tokens`. Raises ValueError where no known column is there, or where a column has a type
    that it cannot have.
    """
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    column = next((name for name in COLUMNS if name in table.column_names), None)
    if column is None:
        raise ValueError(
            f"data.path={path}: has columns {', '.join(table.column_names)}, expected one of {', '.join(COLUMNS)}"
        )
    rows = table.to_pylist()
    name = path.stem
    if column == "prompt" and "response" not in table.column_names:
        return [Prompt(f"{name}/{i}", name, _user_text(row["prompt"], path)) for i, row in enumerate(rows)]
    make = {"messages": _from_messages, "prompt": _from_pair, "text": _from_text}[column]
    made = []
    for i, row in enumerate(rows):
        prompt_ids, response_ids, mask = make(row, tokenizer, path)
        room = max(0, max_tokens - len(prompt_ids))
        made.append(
            TextRow(f"{name}/{i}", name, tuple(prompt_ids), tuple(response_ids[:room]), tuple(mask[:room]), None)
        )
    return made


def require_supervision(rows: Sequence[TextRow], source: str) -> None:
    """Raise ValueError where no token of the whole set is supervised: then the chat template is wrong, not a row."""
    if not any(any(row.response_mask) for row in rows):
        raise ValueError(
            f"{source}: 0 supervised tokens in {len(rows)} sequences; the tokenizer's chat template renders no "
            "assistant turn that continues its prompt: check chat_template in the policy's tokenizer files, or give "
            "the text in a column `text`"
        )


def _from_text(row: Mapping[str, Any], tokenizer: Any, path: Path) -> tuple[list[int], list[int], list[int]]:
    if not isinstance(row["text"], str):
        raise ValueError(f"data.path={path}: column text holds {type(row['text']).__name__}, expected a string")
    ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
    return ids[:1], ids[1:], [1] * max(0, len(ids) - 1)  # nothing predicts the first token


def _from_pair(row: Mapping[str, Any], tokenizer: Any, path: Path) -> tuple[list[int], list[int], list[int]]:
    prompt = [{"role": "user", "content": _user_text(row["prompt"], path)}]
    return _from_messages({"messages": [*prompt, {"role": "assistant", "content": row["response"]}]}, tokenizer, path)


def _from_messages(row: Mapping[str, Any], tokenizer: Any, path: Path) -> tuple[list[int], list[int], list[int]]:
    """Supervise what each assistant turn adds to its own prompt; turns that do not continue it stay unsupervised."""
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(f"data.path={path}: column messages expects lists of {{role, content}}, got {messages!r:.80}")

    def render(upto: int, prompt: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages[:upto], add_generation_prompt=prompt, tokenize=True, return_dict=False
            )
        )

    ids = render(len(messages), False)
    mask = [0] * len(ids)
    first = len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(i, True), render(i + 1, False)
        if after[: len(before)] == before and ids[: len(after)] == after:
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
            first = min(first, len(before))
    return ids[:first], ids[first:], mask[first:]


def _user_text(prompt: Any, path: Path) -> str:
    """The user's turn of a `prompt` cell: a string, or a chat of one turn (verl's layout)."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping) and "content" in prompt[0]:
        return prompt[0]["content"]
    raise ValueError(
        f"data.path={path}: column prompt holds {prompt!r:.80}, expected a string or a list of one {{role, content}}"
    )
