"""What bebop adds to vLLM's worker: weights in and checksums out, under the names of the checkpoint.

vLLM fuses q, k, v and gate, up, pads the vocabulary and renames the MTP layers. `named_views` undoes that with views
into the live parameters, so that one mapping both writes an update and reads what a checksum is made of.
Called through `collective_rpc`; tensors travel as a safetensors file.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from bebop.engines.weights import HEAD_PREFIX, replace_tensors
from bebop.errors import BadInput


class WorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`. A refused update comes back as {"error": text}."""

    def bebop_update(self, path: str) -> dict[str, Any]:
        """Copy the tensors of a safetensors file into the model and the drafter, all or none; then checksums."""
        from safetensors.torch import load_file

        try:
            replace_tensors(self._bebop_views(), load_file(path))
        except ValueError as error:
            return {"error": str(error)}
        return self.bebop_checksums()

    def bebop_checksums(self, of_backbone: bool = True) -> dict[str, Any]:
        """Checksums of backbone ("" where not asked for: a large one takes its time) and heads, and the number of head
        tensors."""
        from bebop.mtp import checksum

        views = self._bebop_views()
        heads = {name: view for name, view in views.items() if name.startswith(HEAD_PREFIX)}
        backbone = {name: view for name, view in views.items() if name not in heads}
        return {
            "backbone": checksum(backbone) if of_backbone else "",
            "heads": checksum(heads),
            "num_head_tensors": len(heads),
        }

    def bebop_state(self) -> dict[str, Any]:
        """What the engine's process really runs: status of each fix, and whether temperatures survive as floats."""
        from bebop.engines.vllm_engine import fixes

        return {"fixes": fixes.apply_all(), "expand_keeps_floats": fixes.expand_keeps_floats()}

    @torch.no_grad()
    def _bebop_views(self) -> dict[str, Tensor]:
        runner = self.model_runner
        views = named_views(runner.get_model())
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if getattr(drafter, "model", None) is not None:
            own = runner.get_draft_model() if hasattr(runner, "get_draft_model") else drafter.model
            views |= {name: view for name, view in named_views(own).items() if name.startswith(HEAD_PREFIX)}
        return views


def named_views(model: nn.Module) -> dict[str, Tensor]:
    """Views of a vLLM model's parameters under checkpoint names, e.g. `model.layers.0.self_attn.q_proj.weight`.

    Raises ValueError for a parameter that is not in its plain layout (packed, quantised or sharded).
    """
    config = model.config
    views: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            for name, view in _split(module_name, module, leaf, parameter.data, config):
                views[_checkpoint_name(name, config.num_hidden_layers)] = view
    if getattr(config, "tie_word_embeddings", False):
        views.pop("lm_head.weight", None)
    return views


def _split(module_name: str, module: nn.Module, leaf: str, data: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    parent, _, last = module_name.rpartition(".")
    if data.numel() == 0:
        raise BadInput(
            f"{module_name}.{leaf} is packed by vLLM and cannot be read or updated in place: "
            "the engine's plain_weights fix is off (BEBOP_KEEP_PLAIN_WEIGHTS=1, BEBOP_ENGINE_FIXES not 0)"
        )
    if last == "qkv_proj":
        width = module.head_size
        sizes = {"q_proj": module.num_heads * width, "k_proj": module.num_kv_heads * width}
        sizes["v_proj"] = sizes["k_proj"]
    elif last == "gate_up_proj":
        sizes = {"gate_proj": data.shape[0] // 2, "up_proj": data.shape[0] // 2}
    elif last in ("embed_tokens", "lm_head"):
        return [(f"{module_name}.{leaf}", data[: config.vocab_size])]
    else:
        return [(f"{module_name}.{leaf}", data)]
    if sum(sizes.values()) != data.shape[0]:
        raise BadInput(f"{module_name}.{leaf} has {data.shape[0]} rows, expected {sum(sizes.values())} of {sizes}")
    parts = zip(sizes, data.split(list(sizes.values())), strict=True)
    return [(f"{parent}.{part}.{leaf}", view) for part, view in parts]


def _checkpoint_name(name: str, num_layers: int) -> str:
    """vLLM numbers MTP layers after the decoder's and wraps their block; checkpoints number them from 0."""
    found = re.match(r"model\.mtp_layers\.(\d+)\.(.*)", name)
    if not found:
        return name
    return f"{HEAD_PREFIX}{int(found[1]) - num_layers}.{found[2].removeprefix('mtp_block.')}"
