"""What a step trains with, as pure functions of its index: learning rate, loss, and its place in the data.

Nothing here has state, so a resumed run needs the step's number alone.
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
    """The part of the training that step `step` (0-based, over both parts) is in, as a section with that many steps,
    and its step there: first regression_steps, then steps. Each part has a learning-rate schedule of its own."""
    if step < sft.regression_steps:
        return sft.model_copy(update={"steps": sft.regression_steps}), step
    return sft, step - sft.regression_steps


def resolve_warmup(loss: Loss, *, cold: bool) -> Loss:
    """The loss with warmup=auto resolved: lk before a TV loss for cold heads (made for this run), else none.

    The gradient of a TV loss is small where every overlap is small, so cold heads learn slowly from it; the gradient of
    -log alpha is the same divided by alpha.
    """
    if loss.warmup != "auto":
        return loss
    return loss.model_copy(update={"warmup": "lk" if cold and LOSSES[loss.name].total_variation else None})


def loss_at(step: int, steps: int, loss: Loss) -> str:
    """Name of the loss of step `step`: loss.warmup for the first warmup_share of the steps, then loss.name.

    Raises ValueError where warmup is still auto, see `resolve_warmup`.
    """
    if loss.warmup == "auto":
        raise BadInput("loss.warmup=auto: expected it resolved by whether the heads are cold")
    return loss.warmup if loss.warmup and step < round(loss.warmup_share * steps) else loss.name


def epoch_order(num_sequences: int, seed: int, epoch: int) -> list[int]:
    """[num_sequences] the order in which epoch `epoch` reads the sequences."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_sequences, generator=generator).tolist()


class BatchStream(Generic[Batch]):
    """The endless row of packed micro-batches: every epoch shuffles, packs, and follows on the one before.

    Micro-batch m of the row depends on (sequences, seed, m) alone. Optimizer step s reads micro-batches
    [s G, (s+1) G), G = sft.grad_accum * processes; process r takes every processes-th of them from r on. So 2 processes
    with grad_accum=1 train on what 1 process with grad_accum=2 does.
    """

    def __init__(self, num_sequences: int, seed: int, pack: Callable[[Sequence[int]], list[Batch]]) -> None:
        """pack: the indices of an epoch, in order -> its micro-batches, at least one."""
        if num_sequences < 1:
            raise BadInput("num_sequences=0: expected at least one sequence to train on")
        self._num_sequences, self._seed, self._pack = num_sequences, seed, pack
        self._starts = [0]  # first micro-batch of each epoch that has been packed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> list[Batch]:
        return self._pack(epoch_order(self._num_sequences, self._seed, epoch))

    def micro_batch(self, index: int) -> Batch:
        """Micro-batch `index` of the row."""
        epoch = next((e for e, start in enumerate(self._starts) if start > index), len(self._starts)) - 1
        while True:
            batches = self._epoch(epoch)
            if len(self._starts) == epoch + 1:
                self._starts.append(self._starts[epoch] + len(batches))
            if index < self._starts[epoch + 1]:
                return batches[index - self._starts[epoch]]
            epoch += 1

    def step(self, step: int, grad_accum: int, processes: int) -> list[Batch]:
        """The grad_accum * processes micro-batches of optimizer step `step`, all processes' together."""
        width = grad_accum * processes
        return [self.micro_batch(step * width + i) for i in range(width)]


def mine(batches: Sequence[Batch], rank: int, processes: int) -> list[Batch]:
    """The share of process `rank` in a step's micro-batches."""
    return list(batches[rank::processes])
