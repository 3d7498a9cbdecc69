"""What a rollout engine offers to the stages, whatever serves it. No engine is imported here."""

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
    """One step of an engine, as its owner saw it end."""

    ended_s: float  # time.perf_counter()
    running: int  # requests left in the batch
    prompt_tokens: int
    tokens: int  # response tokens that it emitted
    drafts: int  # requests that carried a draft
    # seconds of decoding, and of these in growing and verifying drafts, without the model's passes; None: not known
    decoding_s: float | None = None
    rules_s: float | None = None


class RolloutEngine(Protocol):
    """Samples token ids from a policy whose weights can be replaced while it runs."""

    @property
    def version(self) -> int:
        """Policy version of the weights that sample now; `update_weights` sets it, 0 at the start."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample one response per prompt and wait for all.

        prompts: token ids. seeds: one per prompt, in place of sampling.seed. Raises EngineRefused for a prompt that the
        engine has no room for, EngineDied.
        """

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Rollout:
        """Sample one response; may be awaited from any event loop, many at once."""

    def update_weights(self, tensors: Weights, version: int) -> WeightChecksums:
        """Replace the named tensors (checkpoint names; backbone, heads or both) in place and return what is held now.

        Running requests continue with the new weights. Raises EngineError for an unknown name, a wrong shape, or heads
        that the engine does not hold; then nothing was replaced.
        """

    def checksums(self) -> WeightChecksums:
        """Checksums of what the engine holds, comparable with `bebop.mtp.checksum` of the trainer's tensors."""

    def pause(self, mode: Literal["abort", "keep"] = "keep") -> None:
        """Stop sampling. abort: running requests return what they have as "abort"; keep: `resume` continues them."""

    def resume(self) -> None:
        """Go on sampling after `pause`."""

    def counts(self) -> DraftCounts:
        """Draft counters over the engine's life, all requests together."""

    def take_steps(self) -> list[Step]:
        """The steps since this was last asked, oldest first; of a long run the last 100,000."""

    def set_draft_schedule(self, schedule: Mapping[str, int]) -> None:
        """Draft by `schedule` (as rollout.draft_schedule) from the next step on.

        Raises EngineRefused where the engine was started without a schedule, or for drafts longer than its longest.
        """

    @property
    def process_ids(self) -> list[int]:
        """Processes that the engine started and still runs in; empty where it is a thread of the caller."""

    def close(self) -> None:
        """End the engine and every process it started. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
