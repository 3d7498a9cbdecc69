"""The helper process of the box: `python -m bebop.verifiers.helper SETTINGS`, started by `bebop.verifiers.box`.

It imports the verifier, gives up its rights, and forks a process for each response. Every fork starts from the same
state, so an answer cannot change how the next one is scored.

A function may have an attribute `prepare`. The helper calls prepare(None) after the import and prepare(ground_truth)
before each fork, for work that all scores share. It never sees a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bebop.verifiers import rights

PR_SET_PDEATHSIG = 1


def main(settings: Mapping[str, Any]) -> None:
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    try:
        function, folder = load(settings["function"])
        prepare = getattr(function, "prepare", None)
        if prepare:
            prepare(None)
        settings = {**settings, "held": _held_bytes()}
        protections = ["time, memory, open files and file sizes"]
        if settings["sealed"]:
            protections += rights.give_up(folder)
    except BaseException as error:
        _send(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(answers, {"protections": protections})
    Helper(function, prepare, settings, requests, answers).serve()


def load(name: str) -> tuple[Callable[..., Any], Path | None]:
    """The function "module:name" or "file.py:name", and the folder of the file if it is one."""
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), attribute), None
    spec = importlib.util.spec_from_file_location("bebop_reward_function", where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute), Path(where).resolve().parent


class Helper:
    """Reads requests, runs at most `at_once` processes, ends those over the time limit, and sends the answers."""

    def __init__(
        self,
        function: Callable[..., Any],
        prepare: Callable[[Any], None] | None,
        settings: Mapping[str, Any],
        requests: int,
        answers: int,
    ) -> None:
        self.function, self.prepare, self.settings = function, prepare, settings
        self.requests, self.answers = requests, answers
        self.queue: deque[dict[str, Any]] = deque()
        self.running: dict[int, tuple[int, int, float, bytearray]] = {}  # pipe -> (request id, pid, deadline, bytes)
        self.selector = selectors.DefaultSelector()
        self.selector.register(requests, selectors.EVENT_READ)
        self.unread = b""

    def serve(self) -> None:
        """Answer requests until the caller closes the pipe, or ends."""
        while True:
            while self.queue and len(self.running) < self.settings["at_once"]:
                self.start(self.queue.popleft())
            soonest = min((deadline for _, _, deadline, _ in self.running.values()), default=None)
            wait = None if soonest is None else max(0.0, soonest - time.monotonic())
            for key, _ in self.selector.select(wait):
                if key.fd == self.requests:
                    if not self.read_requests():
                        return self.end_all()
                else:
                    self.read_result(key.fd)
            now = time.monotonic()
            for pipe, (_, _, deadline, _) in list(self.running.items()):
                if deadline <= now:
                    self.finish(pipe, {"failure": "timeout", "detail": f"over {self.settings['timeout_s']} s"})

    def read_requests(self) -> bool:
        data = os.read(self.requests, 1 << 20)
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.queue.extend(json.loads(line) for line in lines)
        return bool(data)

    def start(self, request: Mapping[str, Any]) -> None:
        if self.prepare:
            with contextlib.suppress(Exception):  # it is raised again in the fork, where it is reported
                self.prepare(request["arguments"]["ground_truth"])
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            for fd in (self.requests, self.answers, *self.running):
                os.close(fd)
            score_here(self.function, request["arguments"], self.settings, writing)
        os.close(writing)
        deadline = time.monotonic() + self.settings["timeout_s"]
        self.running[reading] = (request["id"], pid, deadline, bytearray())
        self.selector.register(reading, selectors.EVENT_READ)

    def read_result(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        self.running[pipe][3].extend(data)
        if data:
            return
        try:
            result = json.loads(self.running[pipe][3])
        except ValueError:
            result = {"failure": "died", "detail": "the process ended without a score"}
        self.finish(pipe, result)

    def finish(self, pipe: int, result: Mapping[str, Any]) -> None:
        number, pid, _, _ = self.running.pop(pipe)
        self.selector.unregister(pipe)
        os.close(pipe)
        _kill(pid)
        os.waitpid(pid, 0)
        _send(self.answers, {"id": number, **result})

    def end_all(self) -> None:
        for _, pid, _, _ in self.running.values():
            _kill(pid)


def score_here(function: Callable[..., Any], arguments: Mapping[str, Any], settings: Mapping[str, Any], pipe: int):
    """In the forked process: score, write the result, end. Never returns."""
    # A new session, so that all processes that it starts can be ended with it.
    os.setsid()
    _end_with_parent()
    result: dict[str, Any]
    try:
        _limit(settings)
        seen = rights.watch() if settings["sealed"] else []
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = _awaited(value, sealed=settings["sealed"])
        value = value["score"] if isinstance(value, Mapping) else value
        score = float(value)
        if seen:
            result = {"failure": "forbidden", "detail": seen[0]}
        elif not math.isfinite(score):
            result = {"failure": "value", "detail": f"the score is {score}"}
        else:
            result = {"score": score}
    except MemoryError:
        result = {"failure": "memory", "detail": f"over {settings['memory_mib']} MiB"}
    except PermissionError as error:
        result = {"failure": "forbidden", "detail": str(error)}
    except BaseException as error:
        result = {"failure": "exception", "detail": type(error).__name__}
    try:
        os.write(pipe, json.dumps(result).encode())
    finally:
        os._exit(0)


def _awaited(coroutine: Any, *, sealed: bool) -> Any:
    """The result of an async function. A sealed one runs without an event loop, which would need a socket."""
    if not sealed:
        return asyncio.run(coroutine)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a sealed reward function waits for something outside of it")


def _limit(settings: Mapping[str, Any]) -> None:
    seconds = math.ceil(settings["timeout_s"]) + 1
    limits = {
        resource.RLIMIT_AS: settings["held"] + settings["memory_mib"] * 2**20,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_CORE: 0,
    }
    if settings["sealed"]:
        limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64}
    for name, limit in limits.items():
        hard = resource.getrlimit(name)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (limit, limit))


def _held_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _end_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(pipe: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
