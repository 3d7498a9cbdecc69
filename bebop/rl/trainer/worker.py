"""The trainer's worker: verl's, plus the heads that travel with every weight sync and leave with every checkpoint.

verl's FSDP actor loads a policy without its MTP tensors and would neither send nor save them. Here they are read from
the policy's directory, follow the backbone through verl's own sync, and are written beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker

from bebop.errors import BadInput
from bebop.mtp import HEAD_PREFIX, checksum, write_checkpoint
from bebop.mtp.checkpoint import Tensors
from bebop.rl.environment import run_tag
from bebop.rl.rollout import torch_rollout

ROLLOUTS = (torch_rollout.TorchRollout,)  # registered with verl by its import
CHECKSUM_LIMIT = 50_000_000  # parameters; above it the backbone's checksum costs more than it tells


class PolicyWorker(ActorRolloutRefWorker):
    """verl's hybrid worker with the policy's heads. `heads`: checkpoint name -> tensor on the CPU."""

    heads: dict[str, Tensor]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        speculates = bool(self.config.model.mtp.enable_rollout)
        self.heads = head_tensors(Path(self.config.model.path)) if speculates else {}
        job = ray.get_runtime_context().get_job_id()
        if hasattr(self.rollout, "zmq_handle"):  # vLLM's way of the weights, see bebop.rl.rollout.vllm_server
            self.rollout.zmq_handle = self.rollout.zmq_handle.replace(job, f"{job}-{run_tag()}")
        engine = self.actor.engine
        stock = engine.get_per_tensor_param

        def with_heads(*args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], Any]:
            tensors, peft = stock(*args, **kwargs)
            return itertools.chain(tensors, self.heads.items()), peft

        engine.get_per_tensor_param = with_heads

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_checksums(self) -> dict[str, Any]:
        """Checksums of what the trainer holds, in the type that the engine serves; "" for a large backbone."""
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        backbone: dict[str, Tensor] = {}
        if sum(parameter.numel() for parameter in self.actor.engine.module.parameters()) <= CHECKSUM_LIMIT:
            backbone = {name: tensor.to(dtype) for name, tensor in self._backbone()}
        heads = {name: tensor.to(dtype) for name, tensor in self.heads.items()}
        return {
            "backbone": checksum(backbone) if backbone else "",
            "heads": checksum(heads),
            "num_head_tensors": len(heads),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_policy(self, source_dir: str, dest_dir: str, provenance: dict[str, Any]) -> None:
        """Write the policy with its heads as a Hugging Face directory that vLLM loads unchanged; rank 0 writes."""
        source = Tensors(Path(source_dir))
        tied = {"lm_head.weight"} - set(source)  # the embedding, which transformers lists twice
        tensors = {}
        for name, tensor in self._backbone():  # each of them is gathered by all ranks, and kept by one
            if self.rank == 0 and name not in tied:
                tensors[name] = tensor.to("cpu", source[name].dtype if name in source else None)
        if self.rank == 0:
            tensors |= self.heads
            write_checkpoint(Path(source_dir), Path(dest_dir), tensors, provenance)

    def _backbone(self) -> Iterator[tuple[str, Tensor]]:
        tensors, _ = self.actor.engine.get_per_tensor_param(base_sync_done=True)
        return ((name, tensor) for name, tensor in tensors if not name.startswith(HEAD_PREFIX))


def head_tensors(policy_dir: Path) -> dict[str, Tensor]:
    """The tensors under HEAD_PREFIX of a policy directory. Raises ValueError where there is none."""
    tensors = Tensors(policy_dir)
    heads = {name: tensors[name] for name in tensors if name.startswith(HEAD_PREFIX)}
    if not heads:
        raise BadInput(
            f"{policy_dir}: 0 tensors named {HEAD_PREFIX}*; rollout.speculation=mtp needs the policy's heads"
        )
    return heads
