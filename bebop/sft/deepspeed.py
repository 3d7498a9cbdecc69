"""The only module that imports deepspeed: an optimizer step over the heads, with ZeRO 0 to 3, on CPU and GPU.

DeepSpeed averages gradients over micro-batches and ranks. `step` weights the micro-batches so that the gradient is that
of one mean over all anchors of the global batch, whatever the packing:

    L = sum_m n_m L_m / sum_m n_m        (micro-batches m of all ranks, n_m anchors with mean loss L_m)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bebop.errors import BadInput
from bebop.store.files import read_json, write_json

ADAMW_RMS = 0.2  # root mean square of AdamW's updates, per unit of learning rate
# Collective timeout. One rank may spend hours filling the hidden-state cache or writing the checkpoint. A rank that
# died is detected by bebop.sft.launch, not by this timeout.
PATIENCE = timedelta(hours=24)
LAST = "last.json"  # names the newest complete checkpoint; replaced atomically, after the checkpoint is whole


def deepspeed_config(
    *, optimizer: str, zero_stage: int, grad_accum: int, grad_clip: float, lr: float, weight_decay: float
) -> dict[str, Any]:
    """DeepSpeed's own config. With torch's AdamW, because DeepSpeed's CPU Adam is compiled for minutes on first use.

    DeepSpeed orthogonalises Muon's matrices before it clips, so its clip would shrink updates, not gradients. Muon gets
    ParameterClip instead. Under ZeRO-3, DeepSpeed supports Muon only without reduce-scatter.
    """
    params = {"lr": lr, "weight_decay": weight_decay, "betas": [0.9, 0.95], "torch_adam": True}
    zero = {"stage": zero_stage, "overlap_comm": False}
    if optimizer == "muon":
        params |= {"momentum": 0.95, "ns_method": "standard"}
        zero["reduce_scatter"] = False
    return {
        "train_micro_batch_size_per_gpu": 1,  # one packed batch; DeepSpeed never sees its sequences
        "gradient_accumulation_steps": grad_accum,
        "gradient_clipping": 0.0 if optimizer == "muon" else grad_clip,
        "optimizer": {"type": {"adamw": "AdamW", "muon": "Muon"}[optimizer], "params": params},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }


def init_process_group(device: str, rendezvous: Path, rank: int, world_size: int) -> None:
    """Join the other training processes through the file `rendezvous` (a new one for each start): gloo on CPU, nccl on
    GPU."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(rank))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19 compiles a shared-memory all-reduce (80 s) when its backend starts, even if it is not used. If this
    # table does not name the op, DeepSpeed treats it as unavailable, uses gloo and needs no compiler.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed takes over the group that it finds. It would open one by URL, which cuts a path at "#", "?" and ";".
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.FileStore(str(rendezvous.resolve()), world_size),
        rank=rank,
        world_size=world_size,
        timeout=PATIENCE,
        device_id=None if device == "cpu" or world_size == 1 else torch.device(device, int(os.environ["LOCAL_RANK"])),
    )
    deepspeed.init_distributed(dist_backend=backend, timeout=PATIENCE, auto_mpi_discovery=False, verbose=False)


class ParameterClip:
    """Clips the gradient of every parameter for a micro-batch (the mean over its anchors), in an autograd hook.

    Muon's momentum weights steps by the size of their gradients. The first gradients of fresh heads are ten times the
    later ones, so without a clip they dominate the momentum for dozens of steps. Muon's update has a fixed size, so
    clipping each parameter separately, to grad_clip / sqrt(number of parameters), is enough. Then all together have a
    norm of at most grad_clip.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], grad_clip: float) -> None:
        self._limit = grad_clip / len(parameters) ** 0.5
        self.weight = 1.0  # factor on the micro-batch's mean gradient
        for parameter in parameters:
            parameter.register_hook(self._clip)

    def _clip(self, gradient: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return gradient * (self.weight * self._limit / norm.clamp(min=self.weight * self._limit)).to(gradient.dtype)


class Trainer:
    """DeepSpeed's engine around `module`, whose forward(batch) returns (mean loss, detached per-depth values)."""

    def __init__(self, module: torch.nn.Module, config: Mapping[str, Any], grad_clip: float = 1.0) -> None:
        """grad_clip: Muon's, see ParameterClip; AdamW's is in the config."""
        import deepspeed

        parameters = [p for p in module.parameters() if p.requires_grad]
        self._muon = config["optimizer"]["type"] == "Muon"
        self._clip = ParameterClip(parameters, grad_clip) if self._muon else None
        self._lr_scale: dict[str, float] = {}  # by name of the optimizer's group; 1 for groups that are not in it
        groups = self._by_columns(parameters) if self._muon else parameters
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=dict(config))
        for group in self.engine.optimizer.param_groups:  # the decay stays lr times weight_decay
            group["weight_decay"] /= self._scale_of(group)
        self.zero_stage: int = config["zero_optimization"]["stage"]
        if self.zero_stage == 3:
            _gather_frozen_with_parent(module)
        self.grad_accum: int = config["gradient_accumulation_steps"]
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def _by_columns(self, parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups for Muon. A matrix of C columns gets ADAMW_RMS sqrt(C) times the learning rate (Moonshot AI,
        arXiv 2502.16982), so that one learning rate suits matrices of any shape and AdamW's parameters.

        DeepSpeed's update of a matrix [R, C] is an orthogonal matrix times sqrt(max(1, R / C)), so its root mean square
        is 1 / sqrt(C). DeepSpeed decides which parameters get AdamW; the names of their groups have no scale.
        """
        groups: dict[str, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(f"columns_{parameter.shape[-1] if parameter.ndim > 1 else 0}", []).append(parameter)
        found = []
        for name, members in groups.items():
            scale = ADAMW_RMS * members[0].shape[-1] ** 0.5 if members[0].ndim > 1 else 1.0
            self._lr_scale[f"{name}-muon-params"] = scale
            found.append({"params": members, "name": name})
        return found

    def _scale_of(self, group: Mapping[str, Any]) -> float:
        return self._lr_scale.get(group.get("name", ""), 1.0)

    def step(self, batches: Sequence[Any], counts: Sequence[int], total: int, lr: float) -> torch.Tensor:
        """One optimizer step over this rank's micro-batches.

        batches: `grad_accum` inputs of the module. counts: anchors in each. total: anchors of all ranks' micro-batches.
        Returns [1+W] float32: loss and the module's W values, means over all `total` anchors, the same on every rank.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * self._scale_of(group)
        mean: torch.Tensor | None = None
        for batch, count in zip(batches, counts, strict=True):
            if self._clip:
                self._clip.weight = max(count, 1) * self.world_size / total
            loss, values = self.engine(batch)
            self.engine.backward(loss * (count * self.grad_accum * self.world_size / total))
            self.engine.step()  # updates on the last micro-batch only
            part = torch.cat([loss.detach().float().reshape(1), values.float()]) * (count / total)
            mean = part if mean is None else mean + part
        if mean is None:
            raise BadInput(f"batches: got 0, expected grad_accum={self.grad_accum}")
        if self.world_size > 1:
            torch.distributed.all_reduce(mean)
        return mean

    def grad_norm(self) -> float | None:
        """Gradient norm of the last step, before the clip. None under ZeRO-0, for which DeepSpeed does not keep it, and
        with Muon, for which DeepSpeed keeps the norm of the orthogonalised updates."""
        norm = None if self._muon else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by name, on the CPU, on every rank (a collective under ZeRO-3)."""
        import deepspeed

        named = dict(self.engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.zero_stage == 3):
            return {name: p.detach().cpu().clone() for name, p in named.items()}

    def gathered(self) -> Any:
        """Context in which the module's parameters are whole, for scoring outside DeepSpeed's forward."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.engine.module.parameters()), enabled=self.zero_stage == 3)

    def save(self, folder: Path, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, mark it as the last one, then delete older ones. Collective."""
        self.engine.save_checkpoint(str(folder), tag=f"step_{step}", client_state=dict(state), save_latest=False)
        self.barrier()
        if self.rank == 0:
            for script in folder.glob("zero_to_*.py"):  # converters for DeepSpeed's own layout; bebop writes the heads
                script.unlink()
            write_json(folder / LAST, {"step": step, "world_size": self.world_size, "zero_stage": self.zero_stage})
            for old in folder.glob("step_*"):
                if old.name != f"step_{step}":
                    shutil.rmtree(old, ignore_errors=True)
        self.barrier()

    def restore(self, folder: Path) -> dict[str, Any] | None:
        """Load the last complete checkpoint and return its state, or None if there is none. Collective.

        Raises ValueError if it was written with another number of processes or another ZeRO stage.
        """
        last = folder / LAST
        if not last.exists():
            return None
        saved = read_json(last)
        for key, mine in (("num_processes", self.world_size), ("zero_stage", self.zero_stage)):
            theirs = saved["world_size" if key == "num_processes" else key]
            if theirs != mine:
                raise BadInput(
                    f"sft.{key}={mine}: the checkpoint in {folder} was written with {theirs}; "
                    f"set sft.{key}={theirs} or another run_dir"
                )
        with contextlib.chdir(folder):  # DeepSpeed takes a folder for a pattern, and "[" in its name for a set
            path, state = self.engine.load_checkpoint(".", tag=f"step_{saved['step']}")
        if path is None:
            raise BadInput(f"{folder}/step_{saved['step']}: DeepSpeed found no checkpoint there; use another run_dir")
        return state

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """Wait until every rank has finished. The process group ends with the process, because destroying it while
        gloo's threads run sometimes aborts the process (torch 2.13)."""
        self.barrier()


def _gather_frozen_with_parent(module: torch.nn.Module) -> None:
    """Make ZeRO-3 gather frozen parameters also for the parent of their module. ZeRO-3 gathers a module's own
    parameters before that module's forward, but a router's frozen correction belongs to the gate and is read by the
    block around the gate."""
    import deepspeed

    modules = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            parent = modules[".".join(name.split(".")[:-2])]
            deepspeed.zero.register_external_parameter(parent, parameter)
