"""How a config fault is told: one line with the key, what came, what was expected, and the nearest key that exists."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from bebop.registry import nearest


def field_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a config model, sections included."""
    names = []
    for name, info in section.model_fields.items():
        names.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            names += field_names(info.annotation, f"{prefix}{name}.")
    return names


def one_line(fault: dict[str, Any], known: list[str]) -> str:
    """One of pydantic's errors as a sentence; `known` are the keys that exist."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        like = nearest(key, known)
        return f"{key}={fault['input']!r}: no such key" + (f"; did you mean {like}?" if like else "")
    if fault["type"] == "missing":
        return f"{key}: missing; set {key}=<value>"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{key}={fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
