"""Config errors as one line: the key, what it got, what it expected, and the nearest known key."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bebop.config.members import Member
from bebop.registry import nearest

# keys of earlier versions, and what to do instead
REMOVED = {
    "loss.temperature": "heads train at the temperature of the training sequences; set rollout.temperature",
    "grpo.online_heads": "heads are not updated during RL; leave it out",
}
PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def field_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a config model, sections included."""
    names = []
    for name, info in section.model_fields.items():
        names.append(prefix + name)
        if is_section(info.annotation):
            names += field_names(info.annotation, f"{prefix}{name}.")
    return names


def no_such_key(key: str, known: list[str], command: str = "the config") -> str:
    """Message for an unknown key: says whether it was removed, and names the nearest known key."""
    if key in REMOVED:
        return f"{key} is no longer a key: {REMOVED[key]}"
    like = nearest(key, known)
    return f"{command} has no key {key}" + (f"; did you mean {like}?" if like else "")


def expected(field: FieldInfo) -> str:
    """The values that a field accepts, in words: "an integer of at least 1", "a, b or null"."""
    return _either(_choices(field.annotation, field.metadata))


def one_line(faults: list[dict[str, Any]], model: type[BaseModel]) -> str:
    """The first of pydantic's errors, as one line."""
    fault = faults[0]
    key, field, inside, known = _locate(model, fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{key}: {no_such_key(key, known)}"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    wanted = _entry(field, inside) if field else "a section"
    if fault["type"] == "missing":
        return f"{key}: missing, expected {wanted}; set {key}=<value>"
    return f"{key}: got {_shown(fault['input'])}, expected {wanted}"


def _locate(
    model: type[BaseModel], where: tuple[int | str, ...]
) -> tuple[str, FieldInfo | None, tuple[int, ...], list[str]]:
    """(dotted key, its field or None, indices in the field's list, known keys) for the location of a pydantic error.

    Such a location also contains the branch of a union, which is left out here.
    """
    section: type[BaseModel] | None = model
    known, done, field, parts = field_names(model), [], None, list(where)
    while section is not None and parts:
        done.append(str(parts.pop(0)))
        field = section.model_fields.get(done[-1])
        section = field.annotation if field and is_section(field.annotation) else None
        entry = get_args(field.annotation)[0] if field and get_origin(field.annotation) is list else None
        if is_section(entry) and len(parts) > 1:  # a key in an entry of a list of sections
            done.append(str(parts.pop(0)))
            section, known = entry, field_names(entry, ".".join(done) + ".")
    inside = tuple(part for part in parts if isinstance(part, int))
    return ".".join([*done, *map(str, inside)]), field, inside, known


def _entry(field: FieldInfo, inside: tuple[int, ...]) -> str:
    """Expected values of the field, or of an entry of its list."""
    for arm in (field.annotation, *get_args(field.annotation)):
        if inside and get_origin(arm) is list:
            return _either(_choices(get_args(arm)[0]))
    return expected(field)


def _choices(annotation: Any, metadata: Iterable[Any] = ()) -> list[str]:
    """One entry for each kind of value."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for part in arguments[1:] for m in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _choices(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return [choice for arm in arguments for choice in _choices(arm, metadata)]
    if origin is Literal:
        return [str(value) for value in arguments]
    if annotation is type(None):
        return ["null"]
    if origin is list:
        filled = " of at least one entry" if any(isinstance(part, limits.MinLen) for part in metadata) else ""
        return [f"a list{filled}, each entry {_either(_choices(arguments[0]))}"]
    if origin is dict:
        return ["a mapping"]
    axis = next((part.axis for part in metadata if isinstance(part, Member)), None)
    return [f"a name in {axis}" if axis else PLAIN.get(annotation, "a section") + _limits(metadata)]


def _limits(metadata: Any) -> str:
    low = high = other = ""
    for part in metadata:
        if isinstance(part, limits.Ge):
            low = f" of at least {part.ge}"
        elif isinstance(part, limits.Gt):
            low = f" above {part.gt}"
        elif isinstance(part, limits.Le):
            high = f" at most {part.le}"
        elif isinstance(part, limits.Lt):
            high = f" below {part.lt}"
        elif isinstance(part, limits.MultipleOf):
            other = f", a multiple of {part.multiple_of}"
    if low.startswith(" of at least") and high.startswith(" at most"):
        return f" from {low.split()[-1]} to {high.split()[-1]}{other}"
    return low + (" and" if low and high else " of" if high.startswith(" at") else "") + high + other


def _either(choices: list[str]) -> str:
    if len(choices) == 1:
        return choices[0]
    comma = "," if ", " in choices[-2] else ""
    return f"{', '.join(choices[:-1])}{comma} or {choices[-1]}"


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
