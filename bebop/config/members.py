"""Config fields whose value is a name in a registry, and the check that the name exists.

Building a section does not import losses, engines and the like. `check_members` does, after all other checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bebop import registry
from bebop.errors import BadInput, ConfigError


@dataclass(frozen=True)
class Member:
    """Marks a string as a name in a registry, `Annotated[str, Member("LOSSES")]`; see bebop.registry.HOMES."""

    axis: str


def axis_of(info: FieldInfo) -> str | None:
    """The registry whose names the field accepts (also in a list, or beside other values such as null), or None."""
    return next((part.axis for part in (*info.metadata, *_parts(info.annotation)) if isinstance(part, Member)), None)


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
            own = [part for part in _parts(info.annotation) if isinstance(part, str)]
            names = value if isinstance(value, list) else [value]
            yield from ((key, axis, name, section) for name in names if name is not None and name not in own)
        elif isinstance(value, BaseModel):
            yield from _named(value, f"{key}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _named(item, f"{key}.{i}.")


def _parts(annotation: Any) -> Iterator[Any]:
    """What an annotation is made of, at any depth: types, markers, the values of a Literal."""
    for part in get_args(annotation):
        yield part
        yield from _parts(part)
