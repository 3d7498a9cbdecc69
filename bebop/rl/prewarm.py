"""Imports ahead of time: the minute that verl, vLLM and torch take to import, done side by side.

verl starts its actors one after the other, and each spends most of its start importing. Here Ray workers import while
the rest of Ray comes up; the actors are then placed into these warm workers. For machines without GPUs: a worker that
has been warmed has already looked for its devices.
"""

from __future__ import annotations

import importlib
import threading

import ray

MODULES = ("bebop.rl.worker", "bebop.rl.server")  # the trainer's worker and the rollout server
WORKERS = 2

_pending: list[ray.ObjectRef] = []
_here: threading.Thread | None = None


def start() -> None:
    """Begin importing in WORKERS Ray workers, and what the trainer itself will need in a thread here."""
    global _here
    warm = ray.remote(num_cpus=1)(_import)
    _pending.extend(warm.remote(MODULES) for _ in range(WORKERS))
    _here = threading.Thread(target=_import, args=(MODULES[1:],), daemon=True, name="bebop-prewarm")
    _here.start()


def wait() -> None:
    """Until the Ray workers are warm; the thread is left to itself."""
    ray.get(_pending)
    _pending.clear()


def _import(modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
