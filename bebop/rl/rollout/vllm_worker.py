"""Receives weights in vLLM's worker: buckets of verl's stream are loaded by bebop.

verl 0.9.1's sender waits for an answer to each bucket, without a limit. So an error does not end the stream: the rest
is received and dropped, and then the call that asked for the weights raises the error.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from bebop.engines.vllm_engine.worker import WorkerExtension
from bebop.engines.weights import Digests
from bebop.errors import BebopError, EngineError


class EngineWorker(vLLMColocateWorkerExtension, WorkerExtension):
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    _bebop_arrived: Digests | None = None  # digests of all tensors as they arrived last

    def update_weights_from_ipc(self, use_shm: bool = False, **_: Any) -> None:
        """Receive the weights of one sync and load them. Raises EngineError after the stream has ended."""
        if self.device is None:
            self.device = torch.device(f"{get_device_name()}:{self.local_rank}")
        loading, failure = self.bebop_loading(), None

        def take(tensors: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            nonlocal failure
            try:
                if failure is None:
                    loading.add(tensors)
            except (
                Exception
            ) as error:  # as text: its traceback would keep the bucket alive, which the receiver must close
                traceback.print_exception(error)
                failure = str(error) if isinstance(error, BebopError) else f"{type(error).__name__}: {error}"

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=take)
        if failure is not None:
            raise EngineError(failure)
        loading.finish()
        if self._bebop_arrived is None:
            self._bebop_arrived = loading.digests
        else:
            self._bebop_arrived.found |= loading.digests.found

    def bebop_arrived(self) -> dict[str, Any]:
        """Checksums of the weights that arrived last."""
        return asdict(self._bebop_arrived.checksums())
