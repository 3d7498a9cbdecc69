"""Reads rows of files: parquet and JSON lines become chats, prompts or texts in one form.

| column                  | a cell                                                                              |
|-------------------------|-------------------------------------------------------------------------------------|
| `messages`              | a list of {role, content}; optionally a column `tools` that the model may call      |
| `prompt` and `response` | text, or messages                                                                   |
| `prompt`                | text, or one message of the user                                                    |
| `text`                  | text                                                                                |

`content` is text or a list of text parts, which are joined; a message with `tool_calls` needs no content. Lists,
objects and the arguments of a call may also be given as JSON text.

Arrow gives every struct all keys of its column, and pandas writes NaN for missing values. So keys without a value are
dropped at every level. A row with nothing to use (a null, an empty list) is left out and counted by its reason. Any
other type raises BadInput with file and row.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.errors import BadInput, ConfigError, first_line

COLUMNS = ("messages", "prompt", "text")
BESIDE = ("response", "tools")
JSON_LINES = (".jsonl", ".ndjson", ".json")
Kind = Literal["messages", "pair", "prompt", "text"]


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them, and the tools that it may name."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Rows:
    """The usable rows of a file, by their number in it: a Chat for messages or a pair, else a string."""

    kind: Kind
    rows: dict[int, Any]
    left_out: Counter[str]  # rows by why they can't be used


class _LeftOut(Exception):
    """A row has nothing to use; the text is the reason."""


class _Wrong(Exception):
    """A row has a value that is not allowed."""


def read_file(path: Path) -> Rows:
    """The rows of a parquet or JSON lines file. Raises BadInput if none is usable, or one has a wrong type."""
    lines = path.suffix.lower() in JSON_LINES
    if path.is_dir():
        raise BadInput(f"data.path={path}: got a folder, expected a parquet or JSON lines file")
    if not path.exists():
        raise ConfigError(f"data.path={path}: no such file; expected a parquet or JSON lines file")
    try:
        names, rows = _json_lines(path) if lines else _parquet(path)
    except OSError as error:
        raise BadInput(f"data.path={path}: {(error.strerror or str(error)).lower()}; expected a file") from None
    kind, left_out = _kind(names, path), Counter[str]()
    made: dict[int, Any] = {}
    for number, row in rows:
        try:
            made[number] = _used(kind, row)
        except _LeftOut as reason:
            left_out[str(reason)] += 1
        except _Wrong as fault:
            raise _refused(path, number, lines, str(fault)) from None
    if not made:
        why = told(left_out) or "it has none"
        raise BadInput(f"data.path={path}: 0 of {len(rows)} rows can be used: {why}; give rows with {_needed(kind)}")
    return Rows(kind, made, left_out)


def check_given(path: Path | None) -> None:
    """Raise BadInput if a file cannot be used. Call it before any work."""
    if path is not None:
        read_file(path)


def told(left_out: Mapping[str, int]) -> str:
    """The counts as text, largest first: `3 response is null, 1 messages is empty`."""
    return ", ".join(f"{n} {reason}" for reason, n in sorted(left_out.items(), key=lambda each: (-each[1], each[0])))


def _used(kind: Kind, row: Mapping[str, Any]) -> Any:
    try:
        return _MAKERS[kind](row)
    except RecursionError:
        raise _Wrong("its values are nested too deep") from None


def _kind(names: list[str], path: Path) -> Kind:
    column = next((name for name in COLUMNS if name in names), None)
    if column is None:
        shown = ", ".join(names[:12]) or "none"
        raise BadInput(f"data.path={path}: has columns {shown}, expected one of {', '.join(COLUMNS)}")
    if column == "prompt":
        return "pair" if "response" in names else "prompt"
    return "messages" if column == "messages" else "text"


def _needed(kind: Kind) -> str:
    return {
        "messages": "messages, an assistant's among them",
        "pair": "a prompt and a response",
        "prompt": "a prompt",
        "text": "text",
    }[kind]


def _chat(row: Mapping[str, Any]) -> Chat:
    messages = _messages(row.get("messages"), "messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise _LeftOut("no assistant turn")
    return Chat(messages, _tools(row))


def _pair(row: Mapping[str, Any]) -> Chat:
    prompt = _turns(row.get("prompt"), "prompt", "user")
    response = _turns(row.get("response"), "response", "assistant")
    if not any(message["role"] == "assistant" for message in response):
        raise _LeftOut("no assistant turn")
    return Chat([*prompt, *response], _tools(row))


def _prompt(row: Mapping[str, Any]) -> str:
    turns = _turns(row.get("prompt"), "prompt", "user")
    if len(turns) != 1 or turns[0]["role"] != "user" or "content" not in turns[0]:
        roles = ", ".join(turn["role"] for turn in turns)
        raise _Wrong(f"prompt: got messages of {roles:.80}, expected text or one message of the user")
    return turns[0]["content"]


def _text(row: Mapping[str, Any]) -> str:
    text = _clean(row.get("text"), "text")
    if text is None or text == "":
        raise _LeftOut("text is null" if text is None else "text is empty")
    if not isinstance(text, str):
        raise _Wrong(f"text: got {_shown(text)}, expected a string")
    return text


_MAKERS: dict[Kind, Callable[[Mapping[str, Any]], Any]] = {
    "messages": _chat,
    "pair": _pair,
    "prompt": _prompt,
    "text": _text,
}


def _turns(cell: Any, column: str, role: str) -> list[dict[str, Any]]:
    """A `prompt` or `response`: text becomes one message of `role`."""
    cell = _clean(cell, column)
    if cell == "":
        raise _LeftOut(f"{column} is empty")
    if isinstance(cell, str):
        return [{"role": role, "content": cell}]
    if not (cell is None or isinstance(cell, (dict, list))):
        raise _Wrong(f"{column}: got {_shown(cell)}, expected text or messages")
    return _messages([cell] if isinstance(cell, dict) else cell, column)


def _messages(cell: Any, column: str) -> list[dict[str, Any]]:
    cell = _parsed(_clean(cell, column))
    if cell is None or cell == []:
        raise _LeftOut(f"{column} is null" if cell is None else f"{column} is empty")
    if not isinstance(cell, list):
        raise _Wrong(f"{column}: got {_shown(cell)}, expected a list of {{role, content}}")
    return [_message(message, f"{column}[{i}]") for i, message in enumerate(cell)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _Wrong(f"{where}: got {_shown(message)}, expected {{role, content}}")
    message = dict(message)
    if not isinstance(message.get("role"), str):
        raise _Wrong(f"{where}.role: got {_shown(message.get('role'))}, expected text")
    calls = _parsed(message.pop("tool_calls", None))
    if calls is not None and not isinstance(calls, list):
        raise _Wrong(f"{where}.tool_calls: got {_shown(calls)}, expected a list")
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise _Wrong(f"{where}.content: got {_shown(content)}, expected text or a list of text parts")
    if content is None and not calls:
        raise _LeftOut("content is null")
    return message


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _Wrong(f"{where}: got {_shown(part)}, expected a part {{type: text, text}}")
    if part.get("type", "text") != "text":
        raise _Wrong(f"{where}: got a part of type {_shown(part['type'])}, expected text; leave out rows with others")
    text = part.get("text", "")
    if not isinstance(text, str):
        raise _Wrong(f"{where}.text: got {_shown(text)}, expected text")
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, because chat templates convert them to JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Wrong(f"{where}: got {_shown(call)}, expected {{function: {{name, arguments}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise _LeftOut("a tool call's arguments are not a JSON object")
    if not isinstance(arguments, dict):
        raise _Wrong(f"{where}.arguments: got {_shown(arguments)}, expected an object or its JSON")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = _parsed(_clean(row.get("tools"), "tools"))
    if tools is None or tools in ([], ""):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Wrong(f"tools: got {_shown(tools)}, expected a list of objects")
    return tools


def _parsed(value: Any) -> Any:
    """The list or object in a JSON string; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return _clean(json.loads(value), "its JSON")
    except ValueError:
        return value


def _clean(value: Any, where: str) -> Any:
    """`value` in JSON's own types, without the keys that have no value."""
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise _Wrong(f"{where}: got {value}, expected a finite number")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Wrong(f"{where}: got {_shown(value)}, expected text of whole characters") from None
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise _Wrong(f"{where}: got the key {_shown(odd[0])}, expected text")
        clean = {key: _clean(item, f"{where}.{key}" if len(where) < 80 else where) for key, item in value.items()}
        return {key: item for key, item in clean.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_clean(item, f"{where}[{i}]" if len(where) < 80 else where) for i, item in enumerate(value)]
    raise _Wrong(f"{where}: got {_shown(value)}, expected text, a number, a list or an object")


def _shown(value: Any) -> str:
    """A value in a few characters on one line, with its type."""
    if value is None:
        return "null"
    return f"{value!a:.60} ({type(value).__name__})"


def _parquet(path: Path) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """Names of the columns, and the rows with their numbers, from 0."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            table = file.read(columns=[name for name in (*COLUMNS, *BESIDE) if name in names])
    except (pyarrow.ArrowException, ValueError) as error:
        raise BadInput(f"data.path={path}: cannot be read as parquet: {first_line(error):.120}") from None
    return names, list(enumerate(_pythons(table, path)))


def _pythons(table: Any, path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from table.to_pylist(maps_as_pydicts="strict")
    except Exception:  # which of the values is no value of Python's
        for number in range(table.num_rows):
            try:
                table.slice(number, 1).to_pylist(maps_as_pydicts="strict")
            except Exception as error:
                raise _refused(path, number, False, f"cannot be read: {first_line(error):.120}") from None
        raise


def _json_lines(path: Path) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """All keys of the lines, and the rows with their line numbers, from 1."""
    names: dict[str, None] = {}
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _refused(path, number, True, f"is not JSON: {first_line(error):.120}") from None
            if not isinstance(row, dict):
                raise _refused(path, number, True, f"got {_shown(row)}, expected an object")
            names |= dict.fromkeys(row)
            rows.append((number, row))
    return list(names), rows


def _refused(path: Path, number: int, lines: bool, fault: str) -> BadInput:
    return BadInput(f"data.path={path}: {'line' if lines else 'row'} {number}: {fault}")
