"""Config fields whose value is a name in a registry, and the check that the name exists.

Building a section does not import losses, engines and the like. `check_members` does, after all other checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bebop import registry
from bebop.errors import BadInput, ConfigError


@dataclass(frozen=True)
class Member:
    """Marks a string as a name in a registry, `Annotated[str, Member("LOSSES")]`; see bebop.registry.HOMES."""

    axis: str


def axis_of(info: FieldInfo) -> str | None:
    """The registry whose names the field accepts, or None. The field may also accept other values, such as null."""
    for part in (*info.metadata, *(each for arm in get_args(info.annotation) for each in get_args(arm))):
        if isinstance(part, Member):
            return part.axis
    return None


def check_members(config: BaseModel) -> None:
    """Raise ConfigError if a name is not in its registry, or if the member does not support the section's other keys.

    A member may have a method `check_section(section, key, name)`, which raises BadInput for what it does not support.
    """
    for key, axis, name, section in _named(config, ""):
        try:
            member = registry.find(axis).lookup(name, key=key)
            if hasattr(member, "check_section"):
                member.check_section(section, key, name)
        except BadInput as error:
            raise ConfigError(str(error)) from None


def _named(section: BaseModel, prefix: str) -> Iterator[tuple[str, str, str, BaseModel]]:
    """(dotted key, axis, name, section) of every registry name in a section and in the sections below it."""
    for field, info in type(section).model_fields.items():
        value, key = getattr(section, field), prefix + field
        axis = axis_of(info)
        if axis is not None:
            if value is not None and value not in _literals(info.annotation):
                yield key, axis, value, section
        elif isinstance(value, BaseModel):
            yield from _named(value, f"{key}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _named(item, f"{key}.{i}.")


def _literals(annotation: Any) -> tuple[Any, ...]:
    return tuple(v for arm in get_args(annotation) if get_origin(arm) is Literal for v in get_args(arm))
