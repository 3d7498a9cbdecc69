"""The vLLM rollout server: verl's own, plus counts per draft depth, checksums of its weights, and its health."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from bebop.rl.environment import run_tag

# Calls to one server at a time, which wait in its event loop. With more samples in flight than verl's 1000, health
# checks and aborts would wait for them, and the watchdog would take the server for dead.
CALLS_AT_ONCE = 1 << 16
EXTENSION = "bebop.rl.rollout.vllm_worker.EngineWorker"


class PolicyServer(vLLMHttpServer):
    """One replica's server actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # verl names the socket for weights after Ray's job, and the first job of every Ray is called 01000000
        os.environ["VERL_RAY_JOB_ID"] += f"-{run_tag()}"
        self._per_depth: dict[str, tuple[int, ...]] = {}
        self._failure: Exception | None = None  # of a call to the workers

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        stock = self.engine.generate

        async def generate(*args: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
            async for output in stock(*args, request_id=request_id, **kwargs):
                stats = getattr(output.metrics, "request_spec_decode_stats", None)
                if stats is not None:
                    self._per_depth[request_id] = stats.accepted_per_depth
                yield output

        self.engine.generate = generate

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """verl's `generate` without text; adds `spec_accepted_per_depth` to verl's spec_* counts."""
        wanted = {**sampling_params, "detokenize": False}
        output = await super().generate(prompt_ids, wanted, request_id, **kwargs)
        per_depth = self._per_depth.pop(request_id, None)
        if per_depth is not None:
            output.extra_fields["spec_accepted_per_depth"] = list(per_depth)
        return output

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """verl's; `health` also raises its failure, since a sender that waits for the receiver reads no answer."""
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            self._failure = error
            raise

    async def served_checksums(self) -> list[dict[str, Any]]:
        """Checksums of the weights that arrived last, on each rank, see `bebop.rl.rollout.vllm_worker`."""
        return await self.engine.collective_rpc("bebop_arrived")

    async def health(self) -> str:
        """Raises with the engine's own error once it is dead, or has failed to take weights."""
        engine = getattr(self, "engine", None)
        if engine is not None and engine.errored:
            raise RuntimeError(f"vLLM's engine died: {engine.dead_error}")
        if self._failure is not None:
            raise self._failure
        return "alive"


class PolicyReplica(vLLMReplica):
    """verl's replica with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PolicyServer)

    @property
    def max_concurrency(self) -> int:
        return CALLS_AT_ONCE


RolloutReplicaRegistry.register("vllm", lambda: PolicyReplica)
