"""What a Hugging Face directory without heads must be, beyond bebop.mtp.reading, before it becomes a policy.

Each refusal is one line that names its key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.mtp.families import MIMO, claimed_layers, decoder_config, known_family
from bebop.policies.layout import ARCHITECTURE

log = logging.getLogger(__name__)
WINDOW_FREE_ROPE = ("default", "linear", "llama3")  # types that do not look at max_position_embeddings


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
