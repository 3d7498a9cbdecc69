"""Names of cached things, made from everything that made them.

What makes a thing is declared as a frozen dataclass, and its maker gets that object and nothing else of the run:

    @dataclass(frozen=True)
    class TinyInputs:
        seed: int
        source: Content                    # a file, by what it holds
        threads: int = unnamed()           # changes how fast it is made, not what

    folder = cached("tiny", TinyInputs(...), make)     # make(inputs, folder)

So whatever a maker can read is in the name, unless its field says that it changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from bebop.errors import BadInput
from bebop.store.environment import package_versions
from bebop.store.files import cache_home, content_hash, filled, safe_name

UNNAMED = "unnamed"
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Content:
    """Files by what they hold, wherever they lie: one file, or those of a folder."""

    path: Path
    skip: tuple[str, ...] = ()  # of a folder: endings of names that do not count

    def made_from(self) -> Any:
        if not self.path.is_dir():
            return _digest(self.path)
        files = sorted(file for file in self.path.iterdir() if file.is_file() and not file.name.endswith(self.skip))
        return {file.name: _digest(file) for file in files}


@dataclass(frozen=True)
class Stamps:
    """The files of a folder by place, name, size and time of change: for weights, too large to be read for a name."""

    path: Path

    def made_from(self) -> Any:
        files = sorted(file for file in self.path.iterdir() if file.is_file())
        stats = [(file.name, file.stat()) for file in files]
        return {"path": os.fspath(self.path), "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}


@dataclass(frozen=True)
class Keys:
    """A section of the config without the keys that change nothing."""

    section: BaseModel
    but: tuple[str, ...]

    def made_from(self) -> Any:
        return made_from(self.section.model_dump(exclude=set(self.but)))


def unnamed(**options: Any) -> Any:
    """A field of inputs that changes nothing of what is made: memory, threads, where to look."""
    return dataclasses.field(metadata={UNNAMED: True}, **options)


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages that compute or write a cached thing."""
    found = package_versions()
    return {name: found[name] for name in packages if name in found}


def made_from(inputs: Any) -> Any:
    """JSON values that stand for `inputs`: what its name is made from. Raises BadInput on a bare path."""
    if isinstance(inputs, os.PathLike):
        raise BadInput(f"{inputs}: a path does not say what lies there; declare it as Content or Stamps")
    if hasattr(inputs, "made_from"):
        return inputs.made_from()
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        fields = [field for field in dataclasses.fields(inputs) if not field.metadata.get(UNNAMED)]
        return {field.name: made_from(getattr(inputs, field.name)) for field in fields}
    if hasattr(inputs, "model_dump"):
        return made_from(inputs.model_dump())
    if isinstance(inputs, Mapping):
        return {str(key): made_from(value) for key, value in inputs.items()}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return [made_from(value) for value in inputs]
    return inputs


def name_of(inputs: Any, digits: int = 16) -> str:
    """Hex digits that differ where any named input does."""
    return content_hash({type(inputs).__name__: made_from(inputs)}, digits)


def cached(name: str, inputs: Inputs, make: Callable[[Inputs, Path], None], root: Path | None = None) -> Path:
    """The folder `<name>-<name_of(inputs)>`, filled by `make(inputs, folder)` if it does not exist.

    root: where it lies; None: <cache_home()>/policies.
    """
    folder = (root or cache_home() / "policies") / f"{safe_name(name)}-{name_of(inputs, 12)}"
    return filled(folder, lambda part: make(inputs, part))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
