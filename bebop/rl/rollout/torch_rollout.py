"""The trainer worker's side of `rollout.engine=torch`: its tensors go to the server as a file in shared memory.

verl's worker calls `update_weights` with (name, tensor) pairs after each step; the engine is in `torch_server`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from bebop.errors import HeadsDiffer

_SHARED_MEMORY = Path("/dev/shm")


class TorchRollout(BaseRollout):
    """verl's rollout with our server behind it; one replica per worker."""

    def __init__(self, *args: Any, replica_rank: int = -1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The engine keeps its memory."""

    @torch.no_grad()
    async def update_weights(self, weights: Any, *, global_steps: int | None = None, **kwargs: Any) -> None:
        """Send every tensor and wait until the engine holds them."""
        from safetensors.torch import save_file

        if kwargs.get("peft_config") is not None or kwargs.get("wire_format", "named_tensors") != "named_tensors":
            raise HeadsDiffer("rollout.engine=torch takes whole tensors, no adapters or deltas")
        named = {name: tensor.detach().cpu().contiguous() async for name, tensor in ensure_async_iterator(weights)}
        if self._server is None:  # it starts after this worker
            self._server = ray.get_actor(f"torch_server_{self.replica_rank}_0")
        with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(named, path)
            await self._server.update_weights.remote(str(path), global_steps or 0)


# verl 0.9.1 has a registry of rollouts, but no function to register one
_ROLLOUT_REGISTRY["torch", "async"] = f"{__name__}.{TorchRollout.__name__}"
