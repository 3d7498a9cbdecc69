"""Where a round's time goes: in the model's passes, or in growing and verifying drafts around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class RoundClock:
    """Seconds since the engine began, of rounds, of drafting with random numbers and the head's passes in it, of these
    passes, and of verifying (the target's pass not in it). On a GPU calls return before they have run: there the parts
    mean nothing.
    """

    rounds: float = 0.0
    drafting: float = 0.0
    draft_passes: float = 0.0
    verifying: float = 0.0

    @property
    def rules(self) -> float:
        """Seconds of growing and verifying drafts, without the model's passes."""
        return self.drafting - self.draft_passes + self.verifying

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to the field `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)
