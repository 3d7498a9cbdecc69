"""Restrictions on a verifier: the kernel's if the machine has them, and Python's audit hook everywhere.

| means             | refuses                                                           | needs                     |
|-------------------|-------------------------------------------------------------------|---------------------------|
| network namespace | every network interface                                           | user namespaces           |
| Landlock          | files outside the Python installation, all writing, TCP           | Linux 5.13 (TCP: 6.7)     |
| audit hook        | opening for writing, files elsewhere, processes, sockets, ctypes  | nothing; Python code only |
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
PR_SET_NO_NEW_PRIVS = 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file rights in each version of Landlock; later: 16
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READING_EVENTS = ("open", "os.listdir", "os.scandir")
FORBIDDEN_EVENTS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "subprocess.Popen",
    "pty.spawn", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr", "os.kill", "os.killpg",
    "signal.pthread_kill", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp", "webbrowser.open",
    "mmap.__new__", "resource.setrlimit", "resource.prlimit", "sys.addaudithook", "fcntl.ioctl", "sqlite3.connect",
)  # fmt: skip
FORBIDDEN_PREFIXES = ("socket.", "ctypes.", "http.", "urllib.", "ftplib.", "smtplib.", "winreg.", "msvcrt.")


def readable(folder: Path | None) -> list[str]:
    """Folders that a verifier may read: Python's own, its packages, bebop's source, and that of its own file."""
    named = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *([str(folder)] if folder else [])]
    found = {os.path.realpath(name) for name in (*named, *SYSTEM_LIBRARIES) if name and os.path.isdir(name)}
    return sorted(found - {"/", os.path.realpath(os.getcwd())})


_readable: list[str] = []


def give_up(folder: Path | None) -> list[str]:
    """Give up the rights of this process and of those that it starts; returns the restrictions that are enforced."""
    global _readable
    _readable = readable(folder)
    libc = ctypes.CDLL(None, use_errno=True)
    done = []
    if _leave_network(libc):
        done.append("no network (namespace)")
    if _landlock(libc, _readable):
        done.append("no files (Landlock)")
    return [*done, "no files, processes or sockets from Python (audit hook)"]


def watch() -> list[str]:
    """Raise PermissionError for forbidden events from now on. Returns a list that collects them, in case the verifier
    catches the error."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in READING_EVENTS:
            refused = not _may_read(event, arguments)
        else:
            refused = event in FORBIDDEN_EVENTS or event.startswith(FORBIDDEN_PREFIXES)
        if refused:
            seen.append(event)
            raise PermissionError(f"{event} is not allowed in a verifier")

    sys.addaudithook(hook)
    return seen


def _may_read(event: str, arguments: tuple[Any, ...]) -> bool:
    path = arguments[0]
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        return False
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        return False
    if not isinstance(path, (str, bytes)):
        return False
    real = os.path.realpath(os.fsdecode(path))
    return any(real == folder or real.startswith(folder + os.sep) for folder in _readable)


def _leave_network(libc: Any) -> bool:
    """Enter new user and network namespaces, in which no network interface is up."""
    if not hasattr(libc, "unshare"):
        return False
    return libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0 or libc.unshare(CLONE_NEWNET) == 0


def _landlock(libc: Any, folders: list[str]) -> bool:
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    files = (1 << FILE_RIGHTS_BY_ABI.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    for folder in folders:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR, fd)
        added = libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        os.close(fd)
        if added != 0:
            return False
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restricted = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)
