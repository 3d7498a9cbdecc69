"""A run's folder: run.json (what made it), metrics.jsonl (its records), summary.json (its result), and who owns it.

One process owns a folder while it runs a command there (`owned`); a second start is refused. A folder is resumed only
by the command and config that began in it (`begin`).
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.errors import BadInput, ConfigError, DiskError
from bebop.processes import end_marked
from bebop.store.environment import git_revision, package_versions
from bebop.store.files import plain, read_json, remove, safe_name, try_lock, write_json

RUN = "run.json"
SUMMARY = "summary.json"
OWNER = ".owner"  # locked by the process that runs a command in the folder; names it
_owned: set[Path] = set()  # by this process


def new_folder(command: str, root: Path = Path("runs")) -> Path:
    """Make and return `<root>/<command>/<time>`; a second start in the same second gets "-2" after the time."""
    base = root / command / time.strftime("%Y%m%d-%H%M%S")
    folder, number = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise _unusable(folder, error) from None


def sweep_folder(base: Path, number: int, words: Sequence[str]) -> Path:
    """The folder of job `number` of a sweep: `<base>/<number>_<its swept overrides>`, a name that file systems take."""
    return base / safe_name(f"{number}_{'_'.join(words)}")


@contextmanager
def begin(run_dir: Path, command: str, config: Mapping[str, Any], *, free: Sequence[str] = ()) -> Iterator[None]:
    """Own `run_dir` while `command` runs there, and write its run.json.

    config: JSON values. free: keys in which a resumed run may differ. Raises DiskError if the folder has another owner,
    ConfigError if it cannot be written or holds a run of another command or config.
    """
    with owned(run_dir):
        if {path.name for path in run_dir.iterdir()} <= {RUN, OWNER}:  # an earlier start was refused before any work
            remove(run_dir / RUN)
        try:
            made_by = read_json(run_dir / RUN)
        except BadInput as error:
            raise ConfigError(f"{error}; choose another run_dir, or delete that file to start there again") from None
        if made_by and made_by.get("command") != command:
            raise ConfigError(
                f"run_dir={run_dir}: holds a run of `{made_by.get('command')}`, not of `{command}`; "
                "choose another run_dir"
            )
        if made_by:
            refuse_changes(run_dir, made_by.get("config", {}), config, free=free)
        write_run_json(run_dir, command, config)
        yield


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own `run_dir`, made if missing, for the block; blocks of one process may nest.

    Processes that an earlier, killed owner left are ended. Raises DiskError if another process owns the folder,
    ConfigError if it cannot be written.
    """
    run_dir = run_dir.resolve()
    if run_dir in _owned:
        yield
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / OWNER, "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise _unusable(run_dir, error) from None
    with file:
        if not try_lock(file.fileno()):
            file.seek(0)
            raise DiskError(
                f"run_dir={run_dir}: process {file.read().strip() or '(unknown)'} runs there; "
                "wait for its end or choose another run_dir"
            )
        file.truncate(0)
        file.write(f"{os.getpid()} ({' '.join(sys.argv[:2])[-80:]})")
        file.flush()
        _owned.add(run_dir)
        try:
            end_marked(run_dir, grace_s=0)
            yield
        finally:
            _owned.discard(run_dir)


def refuse_changes(run_dir: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, free: Sequence[str] = ()) -> None:
    """Raise ConfigError, with the first key, if config `new` differs from `old`, which began in run_dir.

    free: keys, or sections of keys, that may differ.
    """
    before, now = _flat(plain(old)), _flat(plain(new))
    for key in sorted(before.keys() | now.keys()):
        if any(key == name or key.startswith(name + ".") for name in free):
            continue
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"run_dir={run_dir}: holds a run with {key}={before.get(key)}, this one has {key}={now.get(key)}; "
                "choose another run_dir, or the same value to resume that run"
            )


def write_run_json(run_dir: Path | str, command: str, config: Mapping[str, Any]) -> Path:
    """Write what makes the run: command, arguments, config, git revision, package versions, machine, start time.

    In a folder that has a run.json the run is being resumed: the first start stays, this one joins its `resumed` list.
    """
    path = Path(run_dir) / RUN
    this_start = {
        "command": command,
        "argv": sys.argv,
        "config": config,
        "git_revision": git_revision(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    made_by = read_json(path)
    if made_by:
        made_by.setdefault("resumed", []).append(this_start)
    return write_json(path, made_by or this_start)


def write_summary(run_dir: Path | str, summary: Mapping[str, Any]) -> Path:
    """Write summary.json whole, or not at all."""
    return write_json(Path(run_dir) / SUMMARY, summary)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _unusable(folder: Path, error: OSError) -> ConfigError:
    why = (error.strerror or str(error)).lower()
    if folder.is_file():
        why = "is a file, expected a folder"
    return ConfigError(f"run_dir={folder}: {why}; choose a run_dir that can be written")
