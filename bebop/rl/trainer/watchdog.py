"""A thread that watches the run's actors. Without it, verl would send requests to a dead engine forever.

`replying` actors answer `health` at any time, so they count as dead after `limit_s` without an answer. `living` actors
may be busy for long, so they count as dead only when Ray says so. The trainer raises the fault when it next calls
`raise_fault`. If it does not within `grace_s`, because it waits in a call that never returns, `on_stuck` is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bebop.errors import WorkerDied

INTERVAL_S = 2.0


class Watchdog:
    """See the module's docstring. Call `watch` once actors exist, `raise_fault` in the training loop."""

    def __init__(self, limit_s: float, on_stuck: Callable[[Exception], None], grace_s: float = 5.0) -> None:
        self.limit_s, self.on_stuck, self.grace_s = limit_s, on_stuck, grace_s
        self.fault: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: dict[Any, tuple[Any, float | None]] = {}  # actor -> reference, asked at (None: may be busy)

    def watch(self, replying: Sequence[Any] = (), living: Sequence[Any] = ()) -> None:
        """Watch these actors too."""
        self._asked |= {actor: _health(actor) for actor in replying} | {actor: _life(actor) for actor in living}
        if self._thread is None:
            self._thread = threading.Thread(target=self._guarded, daemon=True, name="bebop-watchdog")
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def raise_fault(self) -> None:
        """Raise what was found, if anything."""
        if self.fault is not None:
            raise self.fault

    def _guarded(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._found(WorkerDied(f"the watchdog itself failed: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        import ray

        while not self._stop.wait(INTERVAL_S):
            for actor, (reference, since) in list(self._asked.items()):
                done, _ = ray.wait([reference], timeout=0)
                if not done:
                    if since is not None and time.monotonic() - since > self.limit_s:
                        return self._found(
                            WorkerDied(f"{actor} did not answer for {self.limit_s:.0f} s (grpo.watchdog_s)")
                        )
                    continue
                try:
                    ray.get(reference)
                except Exception as error:
                    return self._found(WorkerDied(_reason(actor, error)))
                self._asked[actor] = _life(actor) if since is None else _health(actor)

    def _found(self, fault: Exception) -> None:
        if self._stop.is_set():
            return
        self.fault = fault
        if not self._stop.wait(self.grace_s):
            self.on_stuck(fault)


def _health(actor: Any) -> tuple[Any, float]:
    return actor.health.remote(), time.monotonic()


def _life(actor: Any) -> tuple[Any, None]:
    return actor.__ray_call__.remote(_nothing), None


def _nothing(self: Any) -> None:
    return None


def _reason(actor: Any, error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{lines[0] if lines else type(cause).__name__} ({actor})"
