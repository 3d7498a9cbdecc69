"""Learning rate, loss and position in the data of a step, as pure functions of the step's index.

Nothing here has state, so a resumed run needs only the step's index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from bebop.config import Loss, Sft
from bebop.errors import BadInput
from bebop.losses import LOSSES

Batch = TypeVar("Batch")


def lr_at(step: int, sft: Sft) -> float:
    """Learning rate of optimizer step `step` (0-based): linear rise over the first lr_warmup_share, then constant or
    cosine down to 0 after the last step."""
    rising = round(sft.lr_warmup_share * sft.steps)
    if step < rising:
        return sft.lr * (step + 1) / rising
    if sft.lr_schedule == "constant":
        return sft.lr
    done = (step - rising) / max(1, sft.steps - rising)
    return sft.lr * 0.5 * (1 + math.cos(math.pi * done))


def regression_at(step: int, sft: Sft) -> tuple[Sft, int]:
    """The part of the training that contains step `step` (0-based, over both parts), as a section with that part's
    number of steps, and the step's index in it. The parts are first regression_steps, then steps; each has its own
    learning-rate schedule."""
    if step < sft.regression_steps:
        return sft.model_copy(update={"steps": sft.regression_steps}), step
    return sft, step - sft.regression_steps


def resolve_warmup(loss: Loss, *, cold: bool) -> Loss:
    """The loss with warmup=auto resolved: lk before a TV loss for fresh heads, else none.

    If every overlap is small, so is the gradient of a TV loss, and fresh heads learn slowly. The gradient of -log alpha
    is the same divided by alpha.
    """
    if loss.warmup != "auto":
        return loss
    return loss.model_copy(update={"warmup": "lk" if cold and LOSSES[loss.name].total_variation else None})


def loss_at(step: int, steps: int, loss: Loss) -> str:
    """Name of the loss of step `step`: loss.warmup for the first warmup_share of the steps, then loss.name.

    Raises ValueError if warmup is still auto, see `resolve_warmup`.
    """
    if loss.warmup == "auto":
        raise BadInput("loss.warmup: got auto, expected the result of resolve_warmup")
    return loss.warmup if loss.warmup and step < round(loss.warmup_share * steps) else loss.name


def epoch_order(num_sequences: int, seed: int, epoch: int) -> list[int]:
    """[num_sequences]: the order of the sequences in epoch `epoch`."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_sequences, generator=generator).tolist()


class BatchStream(Generic[Batch]):
    """The endless sequence of packed micro-batches. Every epoch is shuffled and packed again.

    Micro-batch m depends only on (sequences, seed, m). Optimizer step s reads micro-batches [s G, (s+1) G), with
    G = sft.grad_accum * processes; process r takes r, r + processes, ... of them. So 2 processes with grad_accum=1
    train on the same data as 1 process with grad_accum=2.
    """

    def __init__(self, num_sequences: int, seed: int, pack: Callable[[Sequence[int]], list[Batch]]) -> None:
        """pack: the indices of an epoch, in order -> its micro-batches, at least one."""
        if num_sequences < 1:
            raise BadInput("num_sequences: got 0, expected at least one sequence to train on")
        self._num_sequences, self._seed, self._pack = num_sequences, seed, pack
        self._starts = [0]  # first micro-batch of each packed epoch
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> list[Batch]:
        return self._pack(epoch_order(self._num_sequences, self._seed, epoch))

    def micro_batch(self, index: int) -> Batch:
        """Micro-batch `index` of the sequence."""
        epoch = next((e for e, start in enumerate(self._starts) if start > index), len(self._starts)) - 1
        while True:
            batches = self._epoch(epoch)
            if len(self._starts) == epoch + 1:
                self._starts.append(self._starts[epoch] + len(batches))
            if index < self._starts[epoch + 1]:
                return batches[index - self._starts[epoch]]
            epoch += 1

    def step(self, step: int, grad_accum: int, processes: int) -> list[Batch]:
        """The grad_accum * processes micro-batches of optimizer step `step`, for all processes together."""
        width = grad_accum * processes
        return [self.micro_batch(step * width + i) for i in range(width)]


def mine(batches: Sequence[Batch], rank: int, processes: int) -> list[Batch]:
    """The share of process `rank` in a step's micro-batches."""
    return list(batches[rank::processes])
