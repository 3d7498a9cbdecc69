"""The agent loop: verl's single turn, with counts that survive a weight sync and errors that surface.

verl 0.9.1's client for partial rollouts joins a response out of segments and drops their spec_* counts; its worker
turns a failed sample into a status without a reason. Both are mended here by subclasses, through verl's own hooks
(`get_llm_client`, `rollout.agent.agent_loop_manager_class`).

With `rollout.agent.num_workers=1` the one worker runs on an event loop inside the trainer's process, and with
`reward.num_workers=0` the verifier runs in it too: on a small machine each process saved is ten seconds of start-up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ray
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput

log = logging.getLogger(__name__)
SUMMED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
PER_DEPTH = "spec_accepted_per_depth"
SEGMENTS = "segments"


class DirectClient(LLMServerClient):
    """verl's client; with a single server it asks that one, without a load balancer in between."""

    only_server: tuple[str, Any] | None = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return self.only_server or await super()._acquire_server(request_id, **extra)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if self.only_server is None:
            super()._release_server(server_id, request_id)


class SegmentClient(DirectClient):
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
    # a segment that was cut before its first draft counts no depth at all
    columns = [[*fields[PER_DEPTH], *[0] * (depth - len(fields[PER_DEPTH]))] for fields in counted]
    fields[PER_DEPTH] = [sum(column) for column in zip(*columns, strict=True)]
    fields[SEGMENTS] = [[len(segment.token_ids), segment.extra_fields.get("global_steps")] for segment in segments]
    return fields


class ServerManager(LLMServerManager):
    """verl's manager, without a load-balancing actor where there is nothing to balance."""

    async def _init_global_load_balancer(self) -> None:
        if len(self.server_handles) > 1:
            await super()._init_global_load_balancer()
        else:
            self.global_load_balancer = None

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        client = super().get_client(client_cls or DirectClient, **kwargs)
        if len(self.server_handles) == 1:
            client.only_server = (self.server_addresses[0], self.server_handles[0])
        return client


class AgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker; remembers why a sample failed."""

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
    """verl's manager with our worker, here or in actors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)
        self.here: LocalWorker | None = None

    async def _init_agent_loop_workers(self) -> None:
        if self.rollout_config.agent.num_workers > 1:
            await super()._init_agent_loop_workers()
            return
        self.agent_loop_workers = []
        handles = self.reward_loop_worker_handles
        self.here = LocalWorker(
            lambda: AgentLoopWorker(
                self.config,
                self.llm_client,
                self.teacher_client,
                [LocalReward(RewardLoopWorker(self.config))] if handles == [] else handles,
            )
        )

    def generate_sequences(self, prompts: Any) -> None:
        if self.here is None:
            super().generate_sequences(prompts)
        else:
            self.here.call("generate_sequences", prompts)

    def pop_errors(self) -> list[str]:
        """Tracebacks of failed samples, of all workers."""
        if self.here is not None:
            return self.here.call("pop_errors")
        answers = ray.get([worker.pop_errors.remote() for worker in self.agent_loop_workers], timeout=10)
        return [error for errors in answers for error in errors]


def type_of_builder(tokenizer: Any, model_type: str | None, processor: Any = None) -> str | None:
    """The model type for which verl can build prompts with this tokenizer: the policy's own, or None, verl's generic.

    verl 0.9.1 takes a builder by the model type alone, and Qwen's, GLM's and others refuse a tokenizer without the
    marks of their own chats, which a policy of that type need not use.
    """
    try:
        builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, processor=processor)
    except ValueError as error:
        log.warning("verl's token builder for model_type %s: %s; its generic one is used", model_type, error)
        return None
    unknown, marks = tokenizer.unk_token_id, [mark for name, mark in vars(builder).items() if name.endswith("_id")]
    return None if unknown is not None and unknown in marks else model_type


class LocalWorker:
    """An agent loop worker on an event loop of its own, in a thread of this process."""

    def __init__(self, make: Callable[[], AgentLoopWorker]) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name="bebop-agent-loop").start()

        async def build() -> AgentLoopWorker:
            return make()

        self.worker = asyncio.run_coroutine_threadsafe(build(), self.loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, method: str, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self.worker, method)(*args), self.loop).result()


class LocalReward:
    """A reward worker as verl's agent loop calls one (`handle.compute_score.remote(data)`), without an actor."""

    def __init__(self, worker: RewardLoopWorker) -> None:
        self.compute_score = self
        self.worker = worker

    def remote(self, data: Any) -> Any:
        infos = data.non_tensor_batch.get("extra_info")
        if infos is not None:  # verl's manager writes into it; an actor would have got a copy
            for row, info in enumerate(infos):
                infos[row] = dict(info)
        return self.worker.compute_score(data)
