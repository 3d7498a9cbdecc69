"""The receiver of a GRPO run's weights, in vLLM's worker: verl's stream of buckets into bebop's loading.

verl 0.9.1's sender waits for an answer to each bucket, for ever where none comes. So an error does not break the
stream off: the rest of it is received and dropped, and the error then leaves by the call that asked for the weights.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from bebop.engines.vllm_engine.worker import WorkerExtension
from bebop.engines.weights import Digests


class EngineWorker(vLLMColocateWorkerExtension, WorkerExtension):
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    _bebop_arrived: Digests | None = None  # of every tensor, as it arrived last

    def update_weights_from_ipc(self, use_shm: bool = False, **_: Any) -> None:
        """Receive a sync and load it. Raises whatever loading raises, once the sender has been heard out."""
        if self.device is None:
            self.device = torch.device(f"{get_device_name()}:{self.local_rank}")
        failure: Exception | None = None
        try:
            loading = self.bebop_loading()
        except Exception as error:
            failure = error

        def take(tensors: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            nonlocal failure
            if failure is None:
                try:
                    loading.add(tensors)
                except Exception as error:
                    failure = error

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=take)
        if failure is not None:
            raise failure
        loading.finish()
        if self._bebop_arrived is None:
            self._bebop_arrived = loading.digests
        else:
            self._bebop_arrived.found |= loading.digests.found

    def bebop_arrived(self) -> dict[str, Any]:
        """Checksums of the weights as they arrived last."""
        return asdict(self._bebop_arrived.checksums())
