"""Provided data: the rows of a file (bebop.data.rows) as token ids.

In `messages`, the assistant's turns are supervised; `prompt` with `response` is such a chat. In `text`, all tokens are
supervised. A `prompt` without a response is answered by the policy.

A chat is one row if its template appends each turn to the unchanged turns before it. Some templates rewrite the
history: those of thinking models remove the reasoning of earlier turns. Then each turn with another history is a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from bebop.data.rows import Chat, read_file, told
from bebop.data.self_distill import TextRow
from bebop.data.tokenizer import TemplateRaised, render
from bebop.errors import BadInput
from bebop.records import Prompt

log = logging.getLogger(__name__)
Ids = list[int]


@dataclass(frozen=True)
class _Made:
    """The sequences from one row of a file, each (prompt ids, response ids, response mask)."""

    rows: list[tuple[Ids, Ids, Ids]]
    turns: int = 0  # of the assistant
    lost: int = 0  # turns of the assistant that are not supervised


def load_file(
    path: Path, tokenizer: Any, *, max_tokens: int, left_out: Counter[str] | None = None
) -> list[TextRow] | list[Prompt]:
    """Given text, or the prompts of a file that has only prompts.

    max_tokens: rollout.max_model_len, where sequences are cut. What is cut, and assistant turns that cannot be
    supervised, are counted in one line of the log each; rows that are left out are, and are added to `left_out` by
    their reason. The prompt_id of a row is NAME/ROW of the file, with the row's number behind it where a chat makes
    several (`chat_of`). Raises BadInput where no row can be used, or one is refused (bebop.data.rows).
    """
    given, name = read_file(path), path.stem
    counts = Counter(given.left_out)
    if given.kind == "prompt":
        _report_left_out(path, counts, left_out)
        return [Prompt(f"{name}/{i}", name, text) for i, text in given.rows.items()]
    made: dict[int, _Made] = {}
    for i, row in given.rows.items():
        try:
            made[i] = _from_chat(row, tokenizer) if isinstance(row, Chat) else _from_text(row, tokenizer)
        except TemplateRaised as reason:
            counts[str(reason)] += 1
    if not made:
        raise BadInput(
            f"data.path={path}: 0 of {sum(counts.values())} rows can be used: {told(counts)}; give messages that the "
            "policy's chat template takes"
        )
    _report_left_out(path, counts, left_out)
    whole = [
        (f"{name}/{i}" + (f"/{number}" if len(each.rows) > 1 else ""), *row)
        for i, each in made.items()
        for number, row in enumerate(each.rows)
    ]
    _report(path, whole, list(made.values()), max_tokens)
    return [_cut(*row, name, max_tokens) for row in whole]


def chat_of(row: TextRow | Prompt) -> str:
    """The part of a row's prompt_id that is the same for all rows of one chat."""
    return "/".join(row.prompt_id.split("/")[:2])


def _cut(prompt_id: str, prompt_ids: Ids, response_ids: Ids, mask: Ids, task: str, max_tokens: int) -> TextRow:
    prompt_ids, room = prompt_ids[:max_tokens], max(0, max_tokens - len(prompt_ids))
    return TextRow(prompt_id, task, tuple(prompt_ids), tuple(response_ids[:room]), tuple(mask[:room]), None)


def _report_left_out(path: Path, counts: Counter[str], left_out: Counter[str] | None) -> None:
    if counts:
        log.warning("text: %d rows of data.path=%s are left out: %s", sum(counts.values()), path, told(counts))
    if left_out is not None:
        left_out.update(counts)


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
    """Raise ValueError if no token of the whole set is supervised: then the template or the limit is wrong."""
    if not any(any(row.response_mask) for row in rows):
        raise BadInput(
            f"{source}: 0 supervised tokens in {len(rows)} sequences; the tokenizer's chat template renders no "
            "assistant turn behind its generation prompt: check chat_template in the policy's tokenizer files, or give "
            "the text in a column `text`; or raise rollout.max_model_len if the prompts by themselves are as long"
        )


def _from_text(text: str, tokenizer: Any) -> _Made:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _Made([(ids[:1], ids[1:], [1] * max(0, len(ids) - 1))])  # nothing predicts the first token


def _from_chat(chat: Chat, tokenizer: Any) -> _Made:
    """Supervise the tokens that each assistant turn adds to its prompt, as the policy would have seen it.

    The prompt is the chat before the turn, with the generation prompt. A turn begins at its first token that differs
    from the prompt: usually after it, or inside it if the generation prompt contains something that the turn lacks (a
    thinking template's `<think>`). A turn that shares nothing with its generation prompt is not supervised.
    """
    messages = chat.messages

    def seen(upto: int, prompt: bool) -> Ids:
        return render(tokenizer, messages[:upto], prompt=prompt, tools=chat.tools)

    # a turn without one before it has no prompt of its own
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    rows: list[tuple[Ids, list[tuple[int, int]]]] = []  # ids, and the spans of them that are supervised
    for i in filter(None, turns):
        before, after = seen(i, True), seen(i + 1, False)
        start = _shared(before, after)
        if start == len(after) or (start < len(before) and start <= _shared(before, seen(i, False))):
            continue
        last, spans = rows[-1] if rows else ([], [])
        if rows and start >= len(last) and after[: len(last)] == last:
            rows[-1] = after, [*spans, (start, len(after))]
        else:
            rows.append((after, [(start, len(after))]))
    supervised = sum(len(spans) for _, spans in rows)
    if not rows:
        return _Made([(seen(len(messages), False), [], [])], len(turns), len(turns))
    return _Made([_masked(ids, spans) for ids, spans in rows], len(turns), len(turns) - supervised)


def _shared(a: Ids, b: Ids) -> int:
    """Number of tokens in the common prefix of two renderings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _masked(ids: Ids, spans: Sequence[tuple[int, int]]) -> tuple[Ids, Ids, Ids]:
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    first = spans[0][0]
    return ids[:first], ids[first:], mask[first:]
