"""The agent loop: verl's single turn over TransferQueue, with counts that survive a weight sync and errors that surface.

verl 0.9.1's client for partial rollouts joins a response out of segments and drops their spec_* counts; its worker turns
a failed sample into a status without a reason. Both are mended here by subclasses, through verl's own hooks
(`get_llm_client`, `rollout.agent.agent_loop_manager_class`).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

SUMMED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
PER_DEPTH = "spec_accepted_per_depth"
SEGMENTS = "segments"


class SegmentClient(LLMServerClient):
    """Notes every segment of a request; stands between verl's partial-rollout client and its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segments: dict[str, list[TokenOutput]] = {}

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        output = await super().generate(request_id=request_id, **kwargs)
        self._segments.setdefault(request_id, []).append(output)
        return output


class PartialRolloutClient(FullyAsyncLLMServerClient, SegmentClient):
    """verl's client for the asynchronous modes, with the segments' counts summed and their versions kept."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        try:
            output = await super().generate(request_id=request_id, **kwargs)
        finally:
            segments = self._segments.pop(request_id, [])
        output.extra_fields |= joined_fields(segments)
        return output


def joined_fields(segments: Sequence[TokenOutput]) -> dict[str, Any]:
    """Counts summed over a response's segments, and [tokens, version] of each.

    A segment that a weight sync cut short carries no counts at all: the sums cover the others. Without any count, the
    fields are zeros, so that verl's all-or-none reading still sees the rest of the batch.
    """
    counted = [segment.extra_fields for segment in segments if SUMMED[0] in segment.extra_fields]
    depth = max((len(fields[PER_DEPTH]) for fields in counted), default=0)
    fields: dict[str, Any] = {name: sum(int(fields[name]) for fields in counted) for name in SUMMED}
    fields[PER_DEPTH] = [sum(fields[PER_DEPTH][j] for fields in counted) for j in range(depth)]
    fields[SEGMENTS] = [[len(segment.token_ids), segment.extra_fields.get("global_steps")] for segment in segments]
    return fields


class AgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker; remembers why a sample failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._errors: list[str] = []
        if self.tokenizer.convert_tokens_to_ids("<|im_end|>") == self.tokenizer.unk_token_id:
            self.hf_model_type = None  # a qwen2 policy without Qwen's chat tokens: verl's generic token builder

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        except Exception as error:
            self._errors.append("".join(traceback.format_exception(error)))
            raise

    async def pop_errors(self) -> list[str]:
        """Tracebacks of the samples that failed since the last call."""
        errors, self._errors = self._errors, []
        return errors

    async def health(self) -> str:
        return "alive"


class AgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with our worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)

    def pop_errors(self) -> list[str]:
        return [error for errors in ray.get([w.pop_errors.remote() for w in self.agent_loop_workers], timeout=10) for error in errors]
