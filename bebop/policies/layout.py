"""The MiMo layout: a Qwen2-type decoder plus one MTP layer in one Hugging Face directory.

`architectures: [MiMoForCausalLM]` with `model_type: qwen2` makes vLLM load the decoder and the MTP layer without remote
code, while transformers reads the same directory as a plain Qwen2ForCausalLM and ignores `model.mtp_layers.*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp.families import MIMO

ARCHITECTURE = MIMO.architecture
MAX_POSITIONS = 2048  # of the policies that are made here


def config_dict(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    end_id: int,
    pad_id: int,
    max_positions: int = MAX_POSITIONS,
    dtype: str = "float32",
    mtp: bool = True,
) -> dict[str, Any]:
    """config.json of a policy. Raises ValueError where the heads do not divide the width into even parts."""
    if hidden_size % (2 * num_heads):
        raise BadInput(f"hidden_size={hidden_size} with num_heads={num_heads}: each head needs an even, whole width")
    return {
        "architectures": [ARCHITECTURE if mtp else "Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": int(mtp),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "max_window_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def write_policy(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> None:
    """Write config, weights, generation config and bebop.json beside the tokenizer that is already in `directory`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, str(config["torch_dtype"]))
    whole = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id") if config.get(key) is not None}
    for name, content in (
        ("config.json", dict(config)),
        ("generation_config.json", {"do_sample": True, "temperature": 1.0, **generation}),
        ("bebop.json", dict(provenance)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def write_with_head(
    directory: Path,
    config: Mapping[str, Any],
    backbone: Mapping[str, Tensor],
    provenance: Mapping[str, Any],
    *,
    mtp_init: str,
    seed: int,
) -> None:
    """Write a policy that has no MTP layer yet, with a fresh one (bebop.mtp.init_heads, `mtp_init`)."""
    from bebop.mtp import head_state, init_heads

    plain = {**config, "architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    write_policy(directory, plain, backbone, provenance)
    heads = head_state(init_heads(directory, mtp_init, seed))
    whole = {**config, "architectures": [ARCHITECTURE], "num_nextn_predict_layers": 1}
    write_policy(directory, whole, {**backbone, **heads}, provenance)


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names of one decoder layer, without its prefix, and their shapes."""
    d, f = config["hidden_size"], config["intermediate_size"]
    width = d // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * width
    return {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (d, d),
        "self_attn.q_proj.bias": (d,),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (d, d),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }


def policy_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a policy and its shape, MTP layer included where the config has one."""
    d, v = config["hidden_size"], config["vocab_size"]
    layer = layer_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.get("num_nextn_predict_layers"):
        head = MIMO.first(config)
        shapes |= {head + name: shape for name, shape in layer.items()}
        shapes |= {f"{head}{MIMO.parts[norm]}.weight": (d,) for norm in ("token_norm", "hidden_norm", "norm")}
        shapes[MIMO.projection(config)] = (d, 2 * d)
    return shapes
