"""Heads from a checkpoint that has them, and fresh heads for a policy that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from bebop.mtp.checkpoint import Tensors, claimed_layers, read_config
from bebop.mtp.head import HEAD_PREFIX, LAYER_PREFIX, MtpHead

FINAL_NORM = "model.norm.weight"


def load_heads(path: Path) -> MtpHead | None:
    """The head of a policy directory in the checkpoint's dtype, or None where it has none.

    An engine that reuses one head recursively serves layer 0, so that is the one loaded. Raises ValueError where
    config.json claims an MTP layer without its tensors, where there are tensors that no layer is claimed for, and
    where layer 0 has tensors missing or over (a head with its own lm_head or draft vocabulary is another family).
    """
    path = Path(path)
    tensors = Tensors(path)
    found = {name.removeprefix(LAYER_PREFIX): name for name in tensors if name.startswith(LAYER_PREFIX)}
    claimed = claimed_layers(read_config(path))
    if not claimed and not any(name.startswith(HEAD_PREFIX) for name in tensors):
        return None
    if not claimed:
        raise ValueError(f"{path}: MTP tensors without a claim; set num_nextn_predict_layers=1 in config.json")
    head = MtpHead(AutoConfig.from_pretrained(path), tensors[FINAL_NORM])
    expected = head.state_dict()
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"{path}: {len(found)} tensors {LAYER_PREFIX}*, expected {len(expected)}; "
            f"missing {missing}, unexpected {unexpected}"
        )
    _fill(head, {name: tensors[full] for name, full in found.items()})
    return head


def init_heads(policy_dir: Path, how: Literal["last_layer", "random"] = "last_layer", seed: int = 0) -> MtpHead:
    """A fresh head for a policy, in its dtype.

    last_layer: attention, MLP and their norms from the last decoder layer, final_layernorm from the backbone's final
    norm, and an input_proj that averages hidden state and embedding. random: normal weights of the config's
    initializer_range.
    """
    policy_dir = Path(policy_dir)
    config = AutoConfig.from_pretrained(policy_dir)
    tensors = Tensors(policy_dir)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    head = MtpHead(config, tensors[FINAL_NORM])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                parameter.normal_(0, config.initializer_range, generator=generator)
        if how == "last_layer":
            for name, parameter in head.named_parameters():
                source = FINAL_NORM if name == "final_layernorm.weight" else last + name
                if source in tensors:
                    parameter.copy_(tensors[source])
            half = torch.eye(config.hidden_size) / 2
            head.input_proj.weight.copy_(torch.cat([half, half], 1))
        elif how != "random":
            raise ValueError(f"how={how!r}: expected last_layer or random; set model.mtp_init")
    return head.to(tensors[FINAL_NORM].dtype)


def _fill(head: MtpHead, values: dict[str, Tensor]) -> None:
    for name, parameter in head.named_parameters():
        if parameter.shape != values[name].shape:
            raise ValueError(
                f"{LAYER_PREFIX}{name}: shape {list(values[name].shape)}, expected {list(parameter.shape)} "
                "by config.json"
            )
    head.load_state_dict(values, assign=True)
    head.requires_grad_(True)
