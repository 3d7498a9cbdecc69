"""The trainer's worker: verl's, with weight syncs and checkpoints that contain the heads.

verl's FSDP actor loads a policy without its MTP tensors, so verl's own worker would neither send nor save the heads. It
would also send tied tensors twice, and experts one tensor each, even if the checkpoint stacks them. Here `Outgoing`
decides what is sent: the backbone at each sync, and the heads with the first one only, since they are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker

from bebop.backbone.loading import mask_padding
from bebop.data.tokenizer import num_token_ids
from bebop.engines.weights import Digests, Layout
from bebop.errors import BadInput
from bebop.mtp import write_checkpoint
from bebop.mtp.checkpoint import refuse_not_finite
from bebop.rl.environment import run_tag
from bebop.rl.rollout import torch_rollout  # noqa: F401 - it registers itself with verl
from bebop.rl.trainer.outgoing import Outgoing


class PolicyWorker(ActorRolloutRefWorker):
    """verl's hybrid worker with the policy's heads."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        num_ids = num_token_ids(Path(self.config.model.path))
        for part in filter(None, (self.actor, self.ref)):
            mask_padding(part.engine.module, num_ids)
            held = part.engine.module.named_parameters()
            refuse_not_finite(
                self.config.model.path,
                ((name, value.to_local() if isinstance(value, DTensor) else value) for name, value in held),
            )
        layout = Layout(Path(self.config.model.path))
        self.outgoing = Outgoing(self.actor.engine.module, layout)
        self.digests = Digests(layout)  # of the tensors sent; rank 0 only
        self.heads_due = bool(self.config.model.mtp.enable_rollout)
        if self.heads_due and not self.outgoing.heads:
            raise BadInput(f"{layout.path}: 0 tensors of MTP layers; rollout.speculation=mtp needs the policy's heads")
        self.engine_dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        job = ray.get_runtime_context().get_job_id()
        if hasattr(self.rollout, "zmq_handle"):  # the socket to vLLM, see bebop.rl.rollout.vllm_server
            self.rollout.zmq_handle = self.rollout.zmq_handle.replace(job, f"{job}-{run_tag()}")
        self.actor.engine.get_per_tensor_param = lambda *_, **__: (self._sent(), None)  # verl's, and no adapter

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors_due():
            if self.rank == 0:
                self.digests.note(name, tensor)
            yield name, tensor
        self.heads_due = False

    def _tensors_due(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.outgoing.backbone(get_device_id(), self.engine_dtype)
        if self.heads_due:
            yield from self.outgoing.heads.items()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_checksums(self) -> dict[str, Any]:
        """Checksums of what was sent last, see `bebop.engines.weights.Digests`; only rank 0 has them."""
        return asdict(self.digests.checksums())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_policy(self, source_dir: str, dest_dir: str, provenance: dict[str, Any]) -> None:
        """Write the policy with its heads as a Hugging Face directory that vLLM loads unchanged; rank 0 writes."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.outgoing.backbone(get_device_id(), self.engine_dtype):
            if self.rank == 0:  # gathered by all ranks, kept by one
                kept = tensor.to("cpu", self.outgoing.layout.dtypes[name])
                tensors |= {name: kept, **dict(self.outgoing.copies(name, kept))}
        if self.rank == 0:
            write_checkpoint(Path(source_dir), Path(dest_dir), tensors | self.outgoing.heads, provenance)
