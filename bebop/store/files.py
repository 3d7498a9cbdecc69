"""Files that are whole or absent, locks between processes, and folders that are made once.

Everything bebop writes goes through `replacing`: it is written next to its final path and takes that path in one
rename. A reader sees the old content or the new, and a killed process leaves nothing that looks finished.

Not-a-number and infinities, which JSON has no numbers for, are written as the strings "NaN", "Infinity" and "-Infinity"
and read back as floats.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bebop.errors import BadInput, ConfigError, DiskError

log = logging.getLogger(__name__)
PART = ".part"  # suffix of what is not finished
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a path at which to write a file or make a folder; it replaces `path` if the block succeeds.

    The yielded path does not exist yet, lies in the same folder and ends in ".part"; it is deleted if the block raises.
    Missing parents are made. A folder at `path` is replaced by two renames.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:8]}{PART}")
    try:
        yield part
        if path.is_dir() and not path.is_symlink():
            old = part.with_suffix(".old")
            path.rename(old)
            part.rename(path)
            remove(old)
        else:
            part.replace(path)
    except BaseException:
        remove(part)
        raise


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all, flushed to the disk. Returns the path.

    Bytes that were read with errors="surrogateescape" are written as they were.
    """
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(path)


def write_json(path: Path | str, value: Any) -> Path:
    """Write `plain(value)` as indented JSON, whole or not at all. Returns the path."""
    return write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file. Raises BadInput, with the path, if it holds anything else."""
    path = Path(path)
    if not path.exists():
        return {}
    try:
        value = revive(json.loads(path.read_bytes()))
    except ValueError as error:
        raise BadInput(f"{path}: is not JSON ({error})") from None
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}; expected a JSON file") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value


def plain(value: Any) -> Any:
    """`value` in JSON's own types: records, paths, tuples and arrays are converted, non-finite numbers are strings."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise BadInput(f"{value!r:.80}: got {type(value).__name__}, expected a value that JSON can hold")


def revive(value: Any) -> Any:
    """The inverse of `plain` for non-finite numbers."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revive(item) for item in value]
    return value


def remove(path: Path) -> None:
    """Delete a file or a folder with its contents; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            log.debug("%s: could not be deleted", path)


@contextmanager
def file_lock(path: Path | str) -> Iterator[None]:
    """Hold the lock file `path` against other processes of this machine, and wait for it if another one holds it.

    The kernel frees the lock when its holder dies.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        if not try_lock(handle.fileno()):
            log.info("%s: another process holds it; waiting", path)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_lock(fd: int) -> bool:
    """Take the lock of an open file until it is closed; False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        log.warning("the file system has no locks: a second start in the same folder would not be noticed")
    return True


def cache_home() -> Path:
    """$BEBOP_HOME, or ~/.cache/bebop. Raises ConfigError for a user without a home."""
    try:
        return Path(os.environ.get("BEBOP_HOME") or Path.home() / ".cache" / "bebop")
    except RuntimeError:
        raise ConfigError("this user has no home directory; set BEBOP_HOME=<folder for policies and text>") from None


def content_hash(parts: Mapping[str, Any], digits: int = 12) -> str:
    """`digits` hex digits over the JSON of `parts`, keys in order. Raises BadInput on a value that JSON can't hold."""
    return hashlib.sha256(json.dumps(plain(parts), sort_keys=True).encode()).hexdigest()[:digits]


def filled(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make(folder)` if it does not exist yet. Of two processes the second waits for the first."""
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(f"{folder.parent}: {why}; set BEBOP_HOME=<folder that can be made and written>") from None
        with file_lock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                remove_leftovers(folder)
                with replacing(folder) as part:
                    part.mkdir()
                    make(part)
    return folder


def remove_leftovers(path: Path) -> None:
    """Delete what killed processes began to write for `path`. Call it with a lock on `path` held."""
    for left in path.parent.glob(f".{glob.escape(path.name[:100])}.*{PART}"):
        remove(left)


def safe_name(text: str, limit: int = 80) -> str:
    """`text` as one name that file systems take: no slashes, spaces or control characters, at most `limit` bytes.

    A longer text is cut, and a hash of all of it keeps two of them apart.
    """
    name = "".join(c for c in text.replace("/", "-") if c.isprintable() and not c.isspace())
    if len(os.fsencode(name)) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return os.fsencode(name)[: limit - 9].decode(errors="ignore") + "-" + digest


def human_size(num_bytes: float) -> str:
    """Bytes in MiB, or in GiB from 1 GiB on."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def folder_size(folder: Path) -> int:
    """Bytes of the files in `folder`, without its subfolders."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise DiskError if the disk of `folder` has fewer than `num_bytes` free. what: subject of the message."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskError(
            f"{folder}: {what} needs {human_size(num_bytes)}, its disk has {human_size(free)} free; "
            "free some space or choose another run_dir"
        )


def disk_fault(error: BaseException, folder: Path) -> DiskError | None:
    """The full disk or missing right behind `error`, or behind an error that it was raised from; None if it is neither.

    Libraries hide a full disk in errors of their own, so a disk of `folder` without 1 MiB of room counts as full.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _DISK_FAULTS:
            where = seen.filename if seen.filename is not None else folder
            return DiskError(f"{where}: {_DISK_FAULTS[seen.errno]}")
        seen = seen.__cause__ or seen.__context__
    try:
        full = shutil.disk_usage(folder).free < 2**20
    except OSError:
        return None
    return DiskError(f"{folder}: {_DISK_FAULTS[errno.ENOSPC]}") if full else None


_AGAIN = "then run the same command again"
_DISK_FAULTS = {
    errno.ENOSPC: f"no space left on the disk; free some space, {_AGAIN}",
    errno.EDQUOT: f"the disk quota is used up; free some space, {_AGAIN}",
    errno.EROFS: "the disk is mounted read-only; choose a path that can be written",
    errno.EACCES: "permission denied; change its rights or choose another path",
    errno.EPERM: "permission denied; change its rights or choose another path",
}
