"""What a GRPO run adds to vLLM's worker: verl's weight receiver and bebop's checksums in one extension."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from bebop.engines.vllm_engine.worker import WorkerExtension


class EngineWorker(vLLMColocateWorkerExtension, WorkerExtension):
    """Mixed into vLLM's worker by `worker_extension_cls`."""
