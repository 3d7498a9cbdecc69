"""Which policies the torch engine runs: those whose layers all attend to the whole text over plain keys and values.

Decided from config.json, so that a command refuses before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bebop.config import RolloutSection
from bebop.errors import EngineRefused
from bebop.mtp.checkpoint import read_config
from bebop.mtp.families import decoder_config

MODEL_TYPES = ("qwen2", "mimo", "qwen3", "llama", "mistral", "qwen3_moe", "glm4_moe")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # others' frequencies change with the length of the text


def check_supported(rollout: RolloutSection, policy_dir: Path) -> None:
    """Raise EngineRefused, naming what stands in the way, for a policy that the engine does not run."""
    raw = read_config(policy_dir)
    if found := _obstacle(raw, policy_dir, rollout.max_model_len):
        raise EngineRefused(
            f"{policy_dir}: {found}; rollout.engine=torch runs full attention with plain keys and values "
            f"(model_type {', '.join(MODEL_TYPES)}); set rollout.engine=vllm"
        )


def _obstacle(raw: dict[str, Any], policy_dir: Path, max_model_len: int) -> str | None:
    decoder = decoder_config(raw)
    model_type = decoder.get("model_type")
    if quantised := raw.get("quantization_config") or decoder.get("quantization_config"):
        return f"quantised weights ({quantised.get('quant_method', 'of an unnamed method')})"
    if "kv_lora_rank" in decoder:
        return f"low-rank keys and values (model_type={model_type}, MLA)"
    if "linear_num_value_heads" in decoder:
        return f"linear attention or gated attention (model_type={model_type})"
    if model_type not in MODEL_TYPES:
        return f"model_type={model_type}"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(policy_dir)  # with the defaults of its class
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"layers of {others[0]}"
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if window and slides and window < max_model_len:
        return f"sliding_window={window} below rollout.max_model_len={max_model_len}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPE:
        return f"rope_type={rope}"
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act}"
    return None
