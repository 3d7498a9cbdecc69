"""Which policies the torch engine runs: those whose layers all attend to the whole text over plain keys and values.

Decided from config.json, so that a command refuses before anything starts.
"""

from __future__ import annotations

from bebop.config import RolloutSection
from bebop.errors import EngineRefused
from bebop.mtp.reading import Reading

MODEL_TYPES = ("qwen2", "mimo", "qwen3", "llama", "mistral", "qwen3_moe", "glm4_moe")


def check_supported(rollout: RolloutSection, reading: Reading) -> None:
    """Raise EngineRefused, naming what stands in the way, for a policy that the engine does not run."""
    if found := _obstacle(reading, rollout.max_model_len):
        raise EngineRefused(
            f"{reading.path}: {found}; rollout.engine=torch runs full attention with plain keys and values "
            f"(model_type {', '.join(MODEL_TYPES)}); set rollout.engine=vllm"
        )


def _obstacle(reading: Reading, max_model_len: int) -> str | None:
    config = reading.text_config
    if hasattr(config, "kv_lora_rank"):
        return f"low-rank keys and values (model_type={config.model_type}, MLA)"
    if hasattr(config, "linear_num_value_heads"):
        return f"linear attention or gated attention (model_type={config.model_type})"
    if config.model_type not in MODEL_TYPES:
        return f"model_type={config.model_type}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"layers of {others[0]}"
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if window and slides and window < max_model_len:
        return f"sliding_window={window} below rollout.max_model_len={max_model_len}"
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act}"
    return None
