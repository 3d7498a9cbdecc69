"""verl's single-turn agent loop, whose draft counts survive a weight sync and whose errors reach the user.

verl 0.9.1's client for partial rollouts joins a response from segments and drops their spec_* counts. Its worker turns
a failed sample into a status without a reason. Subclasses correct both, through verl's own hooks (`get_llm_client`,
`rollout.agent.agent_loop_manager_class`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

log = logging.getLogger(__name__)
SUMMED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
PER_DEPTH = "spec_accepted_per_depth"
SEGMENTS = "segments"


class SegmentClient(LLMServerClient):
    """Records every segment of a request; verl's partial-rollout client calls it once for each."""

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
    """Draft counts summed over a response's segments, and [tokens, version] of each segment.

    vLLM reports no counts for a segment that a weight sync cut short; the sums cover the others. If no segment has
    counts, the sums are 0: verl drops the counts of a whole batch if one response has none.
    """
    counted = [segment.extra_fields for segment in segments if SUMMED[0] in segment.extra_fields]
    depth = max((len(fields[PER_DEPTH]) for fields in counted), default=0)
    fields: dict[str, Any] = {name: sum(int(fields[name]) for fields in counted) for name in SUMMED}
    # a segment that was cut before its first draft has no depths
    columns = [[*fields[PER_DEPTH], *[0] * (depth - len(fields[PER_DEPTH]))] for fields in counted]
    fields[PER_DEPTH] = [sum(column) for column in zip(*columns, strict=True)]
    fields[SEGMENTS] = [[len(segment.token_ids), segment.extra_fields.get("global_steps")] for segment in segments]
    return fields


class AgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which also keeps the errors of failed samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._errors: list[str] = []
        self.hf_model_type = type_of_builder(self.tokenizer, self.hf_model_type, self.processor)

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
        """Tracebacks of failed samples, of all workers."""
        answers = ray.get([worker.pop_errors.remote() for worker in self.agent_loop_workers], timeout=10)
        return [error for errors in answers for error in errors]


def type_of_builder(tokenizer: Any, model_type: str | None, processor: Any = None) -> str | None:
    """The model type with which verl builds prompts: the policy's own if its tokenizer fits, else None (generic).

    verl 0.9.1 selects a builder by model type only. Those of Qwen, GLM and others refuse a tokenizer without the
    special tokens of their own chat format, which a policy of that type need not have.
    """
    try:
        builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, processor=processor)
    except ValueError as error:
        log.warning("verl's token builder for model_type %s: %s; its generic one is used", model_type, error)
        return None
    unknown, marks = tokenizer.unk_token_id, [mark for name, mark in vars(builder).items() if name.endswith("_id")]
    return None if unknown is not None and unknown in marks else model_type
