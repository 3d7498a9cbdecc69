"""Registries: the members of one axis by name, so that a new one is one new file.

| axis     | registry              | named by the config key              |
|----------|-----------------------|--------------------------------------|
| losses   | bebop.losses.LOSSES   | loss.name, loss.warmup               |
| rules    | bebop.spec.RULES      | rollout.rule                         |
| families | bebop.mtp.FAMILIES    | none: the policy's checkpoint has it |
| engines  | bebop.engines.ENGINES | rollout.engine, doctor.engine        |
| tasks    | bebop.data.TASKS      | data.tasks                           |

A member from outside the package is registered by a module in the key `plugins` (`plugins=[my_losses]`, or the path of
a file). `use` writes these names to the environment variable BEBOP_PLUGINS. Every process of a run inherits it, and its
first lookup in a registry imports them.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from bebop.errors import BadInput, ConfigError

T = TypeVar("T")
PLUGINS_ENV = "BEBOP_PLUGINS"  # module names and absolute file paths, separated by os.pathsep
HOMES = {
    "LOSSES": "bebop.losses",
    "RULES": "bebop.spec",
    "FAMILIES": "bebop.mtp",
    "ENGINES": "bebop.engines",
    "TASKS": "bebop.data",
}
_lock = threading.RLock()
_loaded: set[str] = set()


class Registry(Generic[T]):
    """Members of one axis, in the order of their registration. A lookup imports the plugins first."""

    def __init__(self, kind: str, *, key: str) -> None:
        """kind: what a member is called in messages ("loss"); key: the config key that names one."""
        self.kind, self.key = kind, key
        self._members: dict[str, T] = {}

    def register(self, name: str, member: T) -> T:
        """Add a member and return it. Raises BadInput if the name is taken."""
        if name in self._members:
            raise BadInput(f"{self.kind} {name!r} is registered already; choose another name")
        self._members[name] = member
        return member

    def __getitem__(self, name: str) -> T:
        return self.lookup(name)

    def lookup(self, name: str, *, key: str | None = None) -> T:
        """The member of that name. Raises BadInput with the known names; `key` is the config key that gave the name."""
        load_plugins()
        if name not in self._members:
            raise BadInput(f"{key or self.key}: got {name!r}, expected {one_of(name, self._members)}")
        return self._members[name]

    def __contains__(self, name: object) -> bool:
        load_plugins()
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(tuple(self._members))

    def __len__(self) -> int:
        load_plugins()
        return len(self._members)


def find(axis: str) -> Registry[Any]:
    """The registry of an axis (LOSSES, RULES, FAMILIES, ENGINES, TASKS). Imports the package that it lives in."""
    return getattr(importlib.import_module(HOMES[axis]), axis)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def one_of(name: str, known: Iterable[str]) -> str:
    """The expected names, for the message about an unknown one: the known names, and the nearest of them."""
    like = nearest(name, known)
    return f"one of {', '.join(known)}" + (f"; did you mean {like}?" if like else "")


def use(plugins: Sequence[str]) -> None:
    """Import plugins now, and in every process that is started later. Raises ConfigError if one does not exist.

    plugins: names of importable modules, or paths of Python files.
    """
    given = [str(_file(plugin)) if _is_file(plugin) else plugin for plugin in plugins]
    if given:
        os.environ[PLUGINS_ENV] = os.pathsep.join(dict.fromkeys([*_listed(), *given]))
    load_plugins()


def sources(plugins: Sequence[str]) -> list[Path]:
    """The file of each plugin; of a package its folder."""
    found = []
    for plugin in plugins:
        if _is_file(plugin):
            found.append(_file(plugin))
        elif (spec := importlib.util.find_spec(plugin)) is not None and spec.origin:
            origin = Path(spec.origin)
            found.append(origin.parent if origin.name == "__init__.py" else origin)
    return found


def load_plugins() -> None:
    """Import the modules in BEBOP_PLUGINS that this process has not imported yet."""
    if _loaded.issuperset(_listed()):
        return
    with _lock:  # other threads wait here until the plugins are imported
        for plugin in _listed():
            if plugin not in _loaded:
                _loaded.add(plugin)  # before its import: a plugin may look up members itself
                try:
                    _load_file(_file(plugin)) if _is_file(plugin) else _load_module(plugin)
                except BaseException:
                    _loaded.discard(plugin)
                    raise


def _listed() -> list[str]:
    return [name for name in os.environ.get(PLUGINS_ENV, "").split(os.pathsep) if name]


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py") or os.sep in plugin


def _file(plugin: str) -> Path:
    path = Path(plugin).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"plugins: got {plugin}, expected a Python file; there is none at {path}")
    return path


def _load_file(path: Path) -> None:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) != str(path):
            raise ConfigError(f"plugins: got {path}, but a module {name} is imported already; rename the file")
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: got {path}, expected a Python file that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _load_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent package is absent
        found = False
    if not found:
        raise ConfigError(
            f"plugins: got {name}, expected a module on Python's path; for a file give its path: plugins=[./{name}.py]"
        )
    importlib.import_module(name)
