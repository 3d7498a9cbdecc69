"""The interface of a rollout engine. No engine is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from torch import Tensor

from bebop.records import DraftCounts, Rollout, Sampling, WeightChecksums

# checkpoint name -> tensor
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """One step of an engine, timed at its end by the engine's owner."""

    ended_s: float  # time.perf_counter()
    running: int  # requests left in the batch
    prompt_tokens: int
    tokens: int  # response tokens that it emitted
    drafts: int  # requests that carried a draft
    # seconds of decoding, and the part of them for growing and verifying drafts without model passes; None: not known
    decoding_s: float | None = None
    rules_s: float | None = None


class RolloutEngine(Protocol):
    """Samples token ids from a policy whose weights can be replaced while it runs."""

    @property
    def version(self) -> int:
        """Policy version of the current weights: 0 at the start, then set by `update_weights`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample one response per prompt and wait for all.

        prompts: token ids. seeds: one per prompt, used instead of sampling.seed. Raises EngineRefused for a prompt that
        is too long, and EngineDied.
        """

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Rollout:
        """Sample one response. May be awaited from any event loop, and many times at once."""

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token of each prompt after its first, at temperature 1."""

    def update_weights(self, tensors: Weights, version: int) -> WeightChecksums:
        """Replace the named tensors (checkpoint names; backbone, heads or both) in place; return the new checksums.

        Running requests continue with the new weights. Raises EngineError for an unknown name, a wrong shape, or heads
        that the engine does not have; then nothing was replaced.
        """

    def checksums(self) -> WeightChecksums:
        """Checksums of the engine's weights, comparable with `bebop.mtp.checksum` of the trainer's tensors."""

    def pause(self, mode: Literal["abort", "keep"] = "keep") -> None:
        """Stop sampling. abort: running requests return what they have, as "abort"; keep: `resume` continues them."""

    def resume(self) -> None:
        """Continue sampling after `pause`."""

    def counts(self) -> DraftCounts:
        """Draft counters since the engine started, over all requests."""

    def take_steps(self) -> list[Step]:
        """The steps since the last call, oldest first; at most the last 100,000."""

    def set_draft_schedule(self, schedule: Mapping[str, int]) -> None:
        """Use `schedule` (as in rollout.draft_schedule) from the next step.

        Raises EngineRefused if the engine was started without a schedule, or if a draft length is above its largest.
        """

    @property
    def process_ids(self) -> list[int]:
        """Processes of the engine that are still running; empty if the engine is a thread of the caller."""

    def close(self) -> None:
        """End the engine and every process that it started. May be called more than once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
