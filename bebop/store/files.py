"""Policies that bebop makes are cached by the hash of everything that went into them.

A policy is made in a folder beside its final place and moved there in one rename, under a lock: two processes make it
once, and a killed one leaves nothing that could be taken for a policy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_home() -> Path:
    """$BEBOP_HOME, or ~/.cache/bebop."""
    return Path(os.environ.get("BEBOP_HOME") or Path.home() / ".cache" / "bebop")


def content_hash(parts: Mapping[str, Any]) -> str:
    """12 hex digits over the JSON of `parts`, keys in order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def cached(name: str, parts: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """The directory `<cache>/policies/<name>-<hash of parts>`, filled by `make(directory)` if it is not there yet."""
    home = cache_home() / "policies"
    home.mkdir(parents=True, exist_ok=True)
    final = home / f"{name}-{content_hash(parts)}"
    if final.is_dir():
        return final
    with file_lock(home / f".{final.name}.lock"):
        if not final.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=home))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(final)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    return final


@contextmanager
def file_lock(path: Path):
    """Hold the lock file `path` against other processes of this machine; the kernel frees it when its holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
