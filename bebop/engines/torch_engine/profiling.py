"""Time and threads of the engine.

A round spends its time in the model's passes and in growing and verifying drafts. The operations of the latter are
small, and each would wake a sleeping thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from threadpoolctl import ThreadpoolController

FEW_ELEMENTS = 1 << 18  # elements of an operation's operands; torch uses several threads from 2^15


@dataclass
class RoundClock:
    """Seconds since the engine started, spent in: whole rounds; drafting, with its random numbers and the head's
    passes; the head's passes; verifying, without the target's pass. On a GPU calls return before they have run, so the
    parts are not valid there.
    """

    rounds: float = 0.0
    drafting: float = 0.0
    draft_passes: float = 0.0
    verifying: float = 0.0

    @property
    def rules(self) -> float:
        """Seconds of growing and verifying drafts, without the model's passes."""
        return self.drafting - self.draft_passes + self.verifying

    def __sub__(self, earlier: RoundClock) -> RoundClock:
        return RoundClock(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to the field `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)


@contextmanager
def threads_for(elements: int, device: torch.device) -> Iterator[None]:
    """In the block, operations on this few elements run on one thread: a second one would wake too late to help.

    This affects only the calling thread; torch.set_num_threads would also affect threads that start in the block.
    """
    if device.type != "cpu" or elements > FEW_ELEMENTS:
        yield
        return
    with _pools().limit(limits=1):
        yield


@functools.cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")  # so that no other pool is reset at the end
