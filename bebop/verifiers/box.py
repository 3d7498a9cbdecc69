"""The caller's side of the box: starts the helper, sends it responses, returns verdicts.

The helper (`bebop.verifiers.helper`) reads one JSON object per line and answers in any order. If it dies, it is started
again, and the responses that it had get the failure `died`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bebop.errors import BadInput, VerifierError
from bebop.processes import RUN_ENV
from bebop.registry import PLUGINS_ENV

TASKS_FUNCTION = "bebop.data.tasks:compute_score"  # the verifiers of data.tasks
# Kinds of failure: over the time limit; over the memory limit; a right that the box refuses; an exception; a value that
# is not a finite number; the process ended without an answer.
FAILURES = ("timeout", "memory", "forbidden", "exception", "value", "died")
START_S = 120.0  # for the helper to import the verifier


@dataclass(frozen=True)
class Verdict:
    """The score of one response. failure: None, or its kind from FAILURES, and then the score is 0."""

    score: float
    failure: str | None = None
    detail: str = ""


class VerifierBox:
    """Scores responses with one function, each in a process of its own. Safe to use from several threads.

    function: "module:name" or "path/to/file.py:name", called as verl calls a reward function:
    name(data_source, solution_str, ground_truth, extra_info=...) -> a number, or a mapping with "score".
    sealed: no network and no files outside the Python installation; False only for a function that needs them (a judge,
    a sandbox of its own): it keeps the limits on time and memory.
    timeout_s: for one response. memory_mib: in addition to the helper's own memory. at_once: processes at a time.
    bounds: the range of valid scores, None for any finite number.
    """

    def __init__(
        self,
        function: str = TASKS_FUNCTION,
        *,
        sealed: bool = True,
        timeout_s: float = 4.0,
        memory_mib: int = 1024,
        at_once: int | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        if ":" not in function:
            raise BadInput(f"reward function {function!r}: expected module:name or path/to/file.py:name")
        self.failures: Counter[str] = Counter()
        self.num_scored = 0
        self.num_restarts = 0
        self.protections: list[str] = []  # what this machine's kernel enforces, as the helper reported it
        self._bounds = bounds
        self._settings = {
            "function": function,
            "sealed": sealed,
            "timeout_s": timeout_s,
            "memory_mib": memory_mib,
            "at_once": at_once or max(1, min(4, os.cpu_count() or 1)),
        }
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Verdict]] = {}
        self._helper: subprocess.Popen[str] | None = None
        self._closed = False
        self._folder = tempfile.TemporaryDirectory(prefix="bebop-verifier-")

    def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Verdict:
        """The verdict on one response; waits for it. Raises VerifierError if the function cannot be imported."""
        return self.submit(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        ).result()

    def submit(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> Future[Verdict]:
        """`score` without waiting. Values in extra_info and ground_truth that JSON cannot hold become text."""
        number, future = next(self._ids), Future()
        arguments = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        line = json.dumps({"id": number, "arguments": arguments}, default=_plain)
        with self._lock:
            if self._closed:
                raise VerifierError("the verifier box is closed; make a new one")
            helper = self._running()
            self._waiting[number] = future
            with contextlib.suppress(OSError):  # the helper died: its reader thread answers
                helper.stdin.write(line + "\n")
                helper.stdin.flush()
        return future

    def counts(self) -> dict[str, float]:
        """Numbers for a run's metrics since the start: responses scored, failures by kind, restarts of the helper."""
        kinds = {f"failed_{kind}": float(self.failures[kind]) for kind in FAILURES}
        return {"scored": float(self.num_scored), "restarts": float(self.num_restarts), **kinds}

    def close(self) -> None:
        """End the helper and every process that it started. May be called more than once."""
        with self._lock:
            self._closed, helper, self._helper = True, self._helper, None
        if helper is not None:
            helper.kill()
            helper.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        """The helper, started if there is none; the lock is held."""
        if self._helper is None:
            self._helper = self._start()
        return self._helper

    def _start(self) -> subprocess.Popen[str]:
        # Only the variables that Python needs to import, so no keys or tokens, and the mark of the run.
        kept = (
            RUN_ENV,
            "PATH",
            "HOME",
            "LANG",
            "LC_ALL",
            "PYTHONPATH",
            "PYTHONHOME",
            "VIRTUAL_ENV",
            "LD_LIBRARY_PATH",
            PLUGINS_ENV,
        )
        env = os.environ if not self._settings["sealed"] else {n: os.environ[n] for n in kept if n in os.environ}
        plain = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        helper = subprocess.Popen(
            [sys.executable, "-m", "bebop.verifiers.helper", json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env={**env, **plain, "PYTHONPATH": _import_path()},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with contextlib.suppress(OSError, AttributeError):  # fewer turns for a long response; Linux only, if allowed
            fcntl.fcntl(helper.stdin, fcntl.F_SETPIPE_SZ, 2**20)
        timer = threading.Timer(START_S, helper.kill)
        timer.start()
        first = helper.stdout.readline()
        timer.cancel()
        hello = json.loads(first) if first else {"error": "it ended before it was ready"}
        if "error" in hello:
            helper.kill()
            helper.wait()
            raise VerifierError(f"the reward function {self._settings['function']} cannot be used: {hello['error']}")
        self.protections = hello["protections"]
        threading.Thread(target=self._read, args=(helper,), daemon=True, name="bebop-verifier").start()
        return helper

    def _read(self, helper: subprocess.Popen[str]) -> None:
        for line in helper.stdout:
            answer = json.loads(line)
            self._answer(answer["id"], self._judged(answer))
        helper.wait()
        with self._lock:
            if self._closed or self._helper is not helper:
                return
            self._helper, lost = None, list(self._waiting)
            self.num_restarts += 1
        for number in lost:
            self._answer(number, Verdict(0.0, "died", "the helper process ended"))

    def _answer(self, number: int, verdict: Verdict) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
            if future is None:
                return
            self.num_scored += 1
            if verdict.failure is not None:
                self.failures[verdict.failure] += 1
        future.set_result(verdict)

    def _judged(self, answer: Mapping[str, Any]) -> Verdict:
        if answer.get("failure"):
            return Verdict(0.0, answer["failure"], str(answer.get("detail", ""))[:500])
        score = float(answer["score"])
        if self._bounds is not None and not self._bounds[0] <= score <= self._bounds[1]:
            return Verdict(0.0, "value", f"{score} is outside {list(self._bounds)}")
        return Verdict(score)


def _plain(value: Any) -> Any:
    """numpy numbers and arrays as Python's; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _import_path() -> str:
    """The folders that this process imports from, so that the helper finds the same modules from its empty folder."""
    return os.pathsep.join(str(Path(folder).resolve()) for folder in sys.path)
