"""Checks of a Hugging Face directory before it becomes a policy. Each error is one line that names the key.

transformers, vLLM and bebop read a directory by different rules. A directory that they would read as different models
is refused here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp.checkpoint import INDEX, SINGLE
from bebop.mtp.families import MIMO, READ_AS, claimed_layers, decoder_config, families, known_family
from bebop.policies.layout import ARCHITECTURE

log = logging.getLogger(__name__)
EMBEDDINGS, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WINDOW_FREE_ROPE = ("default", "linear", "llama3")  # types that do not look at max_position_embeddings


def checked_config(source: Path) -> dict[str, Any]:
    """config.json of a directory. Raises BadInput if the directory cannot become a policy."""
    if not source.is_dir():
        raise BadInput(f"model.path={source}: no such directory; expected a Hugging Face directory")
    path = source / "config.json"
    if not path.is_file():
        raise BadInput(f"model.path={source}: no config.json in it; expected a Hugging Face directory")
    config = json.loads(path.read_text())
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise BadInput(
            f"model.path={source}: config.json has quantization_config ({method}); bebop reads weights as they stand: "
            "write the model in bfloat16 and drop that key"
        )
    _check_class(source, config)
    _check_files(source)
    return config


def check_positions(where: Path | str, config: Mapping[str, Any], max_model_len: int | None) -> None:
    """Raise BadInput if a text can be longer than the model's number of positions."""
    part = decoder_config(config)
    positions, rope = part.get("max_position_embeddings"), part.get("rope_parameters") or part.get("rope_scaling") or {}
    if max_model_len is None or not isinstance(positions, int):
        return
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or positions
    scaled = int(factor * original) if isinstance(factor, (int, float)) else 0
    if max_model_len > max(positions, scaled):
        raise BadInput(
            f"rollout.max_model_len: got {max_model_len}, expected at most {max(positions, scaled)}, the positions "
            f"that the policy is made for (max_position_embeddings, model.path={where})"
        )


def stands(config: Mapping[str, Any]) -> bool:
    """Whether a directory with this config.json is a policy as it is, and not a source of one."""
    family = known_family(config)
    if family is not None and family.served_by_bebop:
        return claimed_layers(config) > 0
    return family is not MIMO or config["architectures"] == [ARCHITECTURE]


def _check_class(source: Path, config: Mapping[str, Any]) -> None:
    kind, architectures = config.get("model_type"), config.get("architectures") or []
    family = known_family(config)
    if family not in (MIMO, None) and not family.served_by_bebop:
        return
    own = [
        f"{each.classes[kind]}ForCausalLM"
        for each in families()
        if (each is MIMO or each.served_by_bebop) and kind in each.classes
    ]
    allowed = ([] if kind in READ_AS else own) + ([ARCHITECTURE] if kind in MIMO.classes else [])
    if len(architectures) != 1 or architectures[0] not in allowed:
        known = ", ".join(dict.fromkeys(kind for each in families() for kind in each.classes))
        raise BadInput(
            f"model.path={source}: model_type {kind} with architectures {architectures}; expected a causal language "
            f"model with its own class of one of these model types: {known}; register another "
            "one in FAMILIES, see docs/extending.md"
        )


def _check_files(source: Path) -> None:
    """Raise BadInput for weight files that some readers use and others ignore."""
    if not (source / INDEX).is_file():
        return
    named = set(json.loads((source / INDEX).read_text())["weight_map"].values())
    if (source / SINGLE).is_file() and SINGLE not in named:
        raise BadInput(
            f"model.path={source}: it has both {SINGLE} and {INDEX}, which names other files; remove the older ones"
        )


def check_tied(source: Path, tensors: Mapping[str, Tensor], *, tied: bool) -> None:
    """Raise BadInput if config.json ties the embeddings but the file has a different lm_head."""
    if tied and {EMBEDDINGS, LM_HEAD} <= set(tensors) and not torch.equal(tensors[EMBEDDINGS], tensors[LM_HEAD]):
        raise BadInput(
            f"model.path={source}: config.json sets tie_word_embeddings=true, but {LM_HEAD} differs from {EMBEDDINGS}; "
            "set it to false, or remove the one that is wrong"
        )


def check_dtype(source: Path, name: str, tensor: Tensor) -> None:
    """Raise BadInput for a tensor that is not a weight in a plain floating-point type."""
    if tensor.dtype not in READABLE:
        raise BadInput(
            f"model.path={source}: {name} is {str(tensor.dtype).removeprefix('torch.')}; expected float32, bfloat16 or "
            "float16: dequantise the model first"
        )


def check_shape(source: Path, config: Any) -> None:
    """Raise BadInput for features of transformers' class that vLLM's class lacks. config: transformers'."""
    kind = config.model_type
    if kind in ("qwen3", "qwen3_moe") and getattr(config, "attention_bias", False):
        raise BadInput(f"model.path={source}: attention_bias=true: vLLM's {kind} has no bias in o_proj; expected false")
    width = config.hidden_size // config.num_attention_heads
    if kind == "qwen2" and (getattr(config, "head_dim", None) or width) != width:
        raise BadInput(
            f"model.path={source}: head_dim={config.head_dim}: vLLM's qwen2 has hidden_size / num_attention_heads = "
            f"{width}; expected that"
        )


def without_window(source: Path, raw: dict[str, Any], config: Any, max_model_len: int | None) -> dict[str, Any]:
    """config.json without its sliding window, if no text is longer than the window.

    Heads attend to all positions, so a window that has an effect raises BadInput. The result limits the context to the
    length at which the window would have an effect. raw: config.json; config: transformers' reading of it.
    """
    window = getattr(config, "sliding_window", None)
    if window is None:
        return raw
    if max_model_len is None or window < max_model_len:
        raise BadInput(
            f"model.path={source}: sliding_window={window}: heads attend to all positions; expected null, or at least "
            f"rollout.max_model_len={max_model_len}: lower that"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in WINDOW_FREE_ROPE:
        raise BadInput(f"model.path={source}: sliding_window={window} with rope_type={rope}; expected no window")
    context = min(window, config.max_position_embeddings)
    log.warning(
        "model.path=%s: its sliding window of %d tokens does nothing within rollout.max_model_len=%d; the policy is "
        "made without it, for contexts of at most %d tokens",
        source,
        window,
        max_model_len,
        context,
    )
    full = {"sliding_window": None, "max_position_embeddings": context}
    if "use_sliding_window" in raw:
        full["use_sliding_window"] = False
    if raw.get("layer_types"):
        full["layer_types"] = ["full_attention"] * config.num_hidden_layers
    return raw | full
