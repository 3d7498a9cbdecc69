"""How many threads an operation is worth: those of a round's rules are small, and each would wake a sleeping thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController

FEW_ELEMENTS = 1 << 18  # of an operation's operands; torch splits them among threads from 2^15 on


@contextmanager
def threads_for(elements: int, device: torch.device) -> Iterator[None]:
    """Within: operations on so many numbers run on one thread where a second would not be awake in time to help.

    For the calling thread alone: torch.set_num_threads would also bind any thread that happens to start meanwhile.
    """
    if device.type != "cpu" or elements > FEW_ELEMENTS:
        yield
        return
    with _pools().limit(limits=1):
        yield


@functools.cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")  # no other pool is set back at the end
