"""Loads the heads of a checkpoint, and makes fresh heads for a policy without any, by the policy's family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from bebop.errors import BadInput
from bebop.mtp.checkpoint import Tensors, read_config, refuse_biases, refuse_not_finite, tensor_facts
from bebop.mtp.families import Family, claimed_layers, decoder_config, family_of
from bebop.mtp.head import MtpHead, head_state
from bebop.mtp.names import FLOAT32, cast, from_checkpoint, stacks_experts, to_checkpoint


def load_heads(path: Path) -> MtpHead | None:
    """The head of a policy directory in the checkpoint's dtype, or None where it has none.

    An engine that reuses one head recursively serves layer 0, so that is the one loaded. Copies of the policy's
    embeddings and lm_head in the layer (families.Family.shared) are left where they are: engines ignore them. Raises
    ValueError for a family that is not in the table, where config.json claims an MTP layer without its tensors or
    has none claimed for them, and where layer 0 has tensors missing or over (a draft vocabulary, quantised weights).
    """
    path = Path(path)
    tensors, config = Tensors(path), read_config(path)
    family, decoder = family_of(config, path), decoder_config(config)
    present, claimed = family.layers(tensors, decoder), claimed_layers(config)
    if not claimed and not present:
        return None
    if not claimed and family.count_key in decoder:
        raise BadInput(
            f"{path}: it has MTP tensors, but config.json does not claim any; set {family.count_key}=1 in config.json"
        )
    refuse_biases(tensors, config)
    check_heads(path, config, {name: shape for name, (shape, _) in tensor_facts(path).items()})
    head, prefix = _new_head(family, path, tensors), family.first(decoder)
    expected = {name.removeprefix(prefix) for name in head_state(head)}
    expected -= set(family.zero_biases(expected, decoder))
    values = {name: tensors[prefix + name] for name in expected}
    refuse_not_finite(path, ((prefix + name, tensor) for name, tensor in values.items()))
    _fill(head, from_checkpoint(family.parts, values))
    return head


def check_heads(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput unless the tensors of a policy's MTP layer 0 are those of its family's head. shapes: by name."""
    family, decoder = family_of(config, path), decoder_config(config)
    text_config, prefix = AutoConfig.from_pretrained(path).get_text_config(), family.first(decoder)
    norm = torch.ones(text_config.hidden_size)  # any: only names and shapes are asked for
    with torch.device("meta"):
        head = MtpHead(family, text_config, norm, stacked=_stacked(family, decoder, shapes))
    expected = {name: tuple(tensor.shape) for name, tensor in head_state(head).items()}
    found = {name for name in shapes if name.startswith(prefix)}
    missing = sorted(expected.keys() - found)
    unexpected = sorted(found - expected.keys() - {prefix + name for name in family.shared})
    if family.parts.get("layer") == "layers.0":  # the prefix holds further layers too
        further = prefix + "layers."
        unexpected = [name for name in unexpected if not name.startswith(further) or name.startswith(further + "0.")]
    if missing or unexpected:
        short = [[name.removeprefix(prefix) for name in names] for names in (missing, unexpected)]
        raise BadInput(
            f"{path}: {len(found)} tensors {prefix}*, expected {len(expected)}; missing {_few(short[0])}, "
            f"unexpected {_few(short[1])}{_hint(unexpected)}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise BadInput(f"{path}: {name} has shape {list(shapes[name])}, expected {list(shape)} by config.json")


def init_heads(policy_dir: Path, how: Literal["last_layer", "random"] = "last_layer", seed: int = 0) -> MtpHead:
    """A fresh head for a policy, in its family's layout and its dtype.

    last_layer: the decoder layer from the policy's last one (the last with full attention), the head's norm from the
    policy's final norm, and a projection that averages hidden state and embedding. random: normal weights of the
    config's initializer_range. Raises ValueError for a family that is not in the table, and where the last layer has
    other parts than the head's.
    """
    policy_dir = Path(policy_dir)
    tensors, config = Tensors(policy_dir), read_config(policy_dir)
    family = family_of(config, policy_dir)
    head = _new_head(family, policy_dir, tensors)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                parameter.normal_(0, head.config.initializer_range, generator=generator)
        if how == "last_layer":
            _copy_last_layer(head, tensors)
        elif how != "random":
            raise BadInput(f"how={how!r}: expected last_layer or random; set model.mtp_init")
    head.to(tensors[final_norm(tensors)].dtype)
    for name, parameter in head.named_parameters():
        if name.endswith(FLOAT32):
            parameter.data = parameter.data.float()
    return head


def head_tensors(policy_dir: Path, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Trained parameters of a policy's head, by their names in the head, as `write_checkpoint` takes them.

    dtype: of the written tensors, except those that every checkpoint of the family has in float32.
    """
    tensors, config = Tensors(policy_dir), read_config(policy_dir)
    family, decoder = family_of(config, policy_dir), decoder_config(config)
    return cast(to_checkpoint(family, decoder, state, stacked=_stacked(family, decoder, tensors)), dtype)


def final_norm(tensors: Mapping[str, Tensor]) -> str:
    """Name of the weight of the decoder's final norm."""
    return f"{_decoder_prefix(tensors)}norm.weight"


def _decoder_prefix(tensors: Mapping[str, Tensor]) -> str:
    name = "model.language_model."
    return name if f"{name}norm.weight" in tensors else "model."


def _stacked(family: Family, decoder: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Whether the head's experts are stacked; for a policy without a head, whether the policy's are."""
    return stacks_experts([name for name in tensors if family.is_head(name, decoder)] or tensors)


def _new_head(family: Family, path: Path, tensors: Tensors) -> MtpHead:
    config = AutoConfig.from_pretrained(path).get_text_config()
    stacked = _stacked(family, decoder_config(read_config(path)), tensors)
    return MtpHead(family, config, tensors[final_norm(tensors)] if family.before_norm else None, stacked=stacked)


def _copy_last_layer(head: MtpHead, tensors: Tensors) -> None:
    config = head.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if "full_attention" not in kinds:
        raise BadInput(f"{tensors.path}: no layer with full attention to copy; set model.mtp_init=random")
    last = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    prefix = f"{_decoder_prefix(tensors)}layers.{last}."
    source = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    values = from_checkpoint({"layer": ""}, source) | {"norm.weight": tensors[final_norm(tensors)]}
    parameters = dict(head.named_parameters())
    absent = [name for name in parameters if name.startswith("layer.") and name not in values]
    if absent:
        raise BadInput(
            f"{tensors.path}: layer {last} has no {absent[0].removeprefix('layer.')}, as the head's layer; "
            "set model.mtp_init=random"
        )
    for name in parameters.keys() & values.keys():
        parameters[name].copy_(values[name])
    half = torch.eye(config.hidden_size) / 2
    parameters["proj.weight"].copy_(torch.cat([half, half], 1))


def _few(names: list[str]) -> str:
    return str(names) if len(names) <= 8 else f"{names[:8]} and {len(names) - 8} more"


def _hint(unexpected: list[str]) -> str:
    quantised = any("weight_scale" in name for name in unexpected)
    return "; quantised heads cannot be trained, convert the checkpoint to bfloat16" if quantised else ""


def _fill(head: MtpHead, values: dict[str, Tensor]) -> None:
    frozen = {name for name, parameter in head.named_parameters() if not parameter.requires_grad}
    head.load_state_dict(values, assign=True)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name not in frozen)
