"""Processes that a command starts: they end with it, are found by a mark, and leave their error in a file.

    parent: env = child_environment(run_dir); Popen(..., env=env); finally: end_marked(run_dir, grace_s=2)
    child:  end_with_parent(); try: ... except BaseException as error: ErrorFile(path).write(error); leave(1)
    parent: raise SftError(ErrorFile(path).message(code, "above"))

Two functions need Linux. On other systems, `end_with_parent` only checks once, when it is called, that the parent is
still there, and `marked` finds nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bebop.errors import BadInput, BebopError
from bebop.store.files import disk_fault, read_json, write_json

PARENT_ENV = "BEBOP_PARENT"  # process id of the process that started this one
RUN_ENV = "BEBOP_RUN"  # folder of the run that a process belongs to
_PR_SET_PDEATHSIG = 1
_SOCKET_PATH_BYTES = 107  # of Linux, without the closing zero


def child_environment(run_dir: Path | str | None = None) -> dict[str, str]:
    """Variables that a child needs for `end_with_parent` and, with a run_dir, to be found by `marked`."""
    mark = {} if run_dir is None else {RUN_ENV: str(run_dir)}
    return {PARENT_ENV: str(os.getpid()), **mark}


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however that dies (Linux: PR_SET_PDEATHSIG).

    parent: id of the process that started this one, default $BEBOP_PARENT. If that has died already, this process exits
    with code 1. In a container the parent may be process 1.
    """
    if parent is None:
        parent = int(os.environ.get(PARENT_ENV, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {os.getpid()}: the process that started it, {parent}, has ended")


def marked(run_dir: Path | str) -> list[int]:
    """Ids of the live processes that were started with RUN_ENV=run_dir; never this process's own (Linux: /proc)."""
    mark = f"{RUN_ENV}={run_dir}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def end_marked(run_dir: Path | str, *, grace_s: float) -> int:
    """Wait `grace_s` for the marked processes to end, then kill them. Returns how many had to be killed."""
    deadline = time.monotonic() + grace_s
    while (left := marked(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    killed = len(left)
    while left := marked(run_dir):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    return killed


def end_marked_after_me(run_dir: Path | str, *, grace_s: float) -> None:
    """Fork a process that waits for the end of this one, even by kill -9, and then calls `end_marked`."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)  # `writing` stays open as long as this process lives
        return
    os.setsid()
    os.close(writing)
    os.read(reading, 1)
    end_marked(run_dir, grace_s=grace_s)
    os._exit(0)


def socket_folder(room: int) -> Path:
    """The temporary folder; or /tmp, where that leaves fewer than `room` bytes for the name of a Unix socket."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) + room <= _SOCKET_PATH_BYTES else "/tmp")


def leave(code: int) -> None:
    """End this process without Python's teardown, which threads of gloo (torch 2.13), Ray and verl can abort or hang.

    multiprocessing's own clean-up is run, since semaphores that it would delete, such as tqdm's lock, are reported.
    """
    with contextlib.suppress(Exception):
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class ErrorFile:
    """The error of a child process, for the process that started it to show in one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Delete what an earlier start left."""
        self.path.unlink(missing_ok=True)

    def write(self, error: BaseException) -> None:
        """Write type, message and traceback; a later error does not replace the first.

        If the file cannot be written, because the disk is full, they are printed.
        """
        if self.path.exists():
            return
        details = "".join(traceback.format_exception(error)).splitlines()
        if fault := disk_fault(error, self.path.parent):
            error = fault
        try:
            write_json(self.path, {"type": type(error).__name__, "message": message_of(error), "details": details})
        except OSError:
            print(*details, message_of(error), sep="\n", file=sys.stderr, flush=True)

    def message(self, exit_code: int, output: str, pick: Callable[[str], str] | None = None) -> str:
        """What the child wrote; else how it ended, by `exit_code` (negative: a signal), and where its `output` is.

        pick: chooses the line to show from what the child wrote; default: all of it, as one line.
        """
        try:
            written = read_json(self.path).get("message")
        except BadInput:
            written = None
        if written:
            shown = pick(written) if pick else " ".join(written.split())
            return f"{shown} (traceback in {self.path}, output {output})"
        if fault := disk_fault(ChildProcessError(), self.path.parent):  # a full disk took the error file too
            return f"{fault} (output {output})"
        how = f"exit code {exit_code}"
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            how = f"killed by {name}" + (", often by the kernel for lack of memory" if name == "SIGKILL" else "")
        return f"{how}, without an error of its own; its output is {output}"


def message_of(error: BaseException) -> str:
    """The text of an error; with its type where bebop did not raise it on purpose."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "stopped by a signal; the same command with the same run_dir resumes the run"
    text = str(error).strip()
    if isinstance(error, BebopError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} without a message"
