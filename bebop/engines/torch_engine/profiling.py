"""How the engine spends its time and its threads.

The time of a round goes into the model's passes, or into growing and verifying drafts around them. The operations of
the latter are small, and each would wake a sleeping thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from threadpoolctl import ThreadpoolController

FEW_ELEMENTS = 1 << 18  # of an operation's operands; torch splits them among threads from 2^15 on


@dataclass
class RoundClock:
    """Seconds since the engine began, in: whole rounds; drafting, with its random numbers and the head's passes; these
    passes; verifying, without the target's pass. On a GPU calls return before they have run: there the parts mean
    nothing.
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
    """Inside, operations on so few numbers run on one thread: a second one would not be awake in time to help.

    Only for the calling thread: torch.set_num_threads would also bind any thread that happens to start meanwhile.
    """
    if device.type != "cpu" or elements > FEW_ELEMENTS:
        yield
        return
    with _pools().limit(limits=1):
        yield


@functools.cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")  # no other pool is set back at the end
