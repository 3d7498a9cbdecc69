"""The config of MiMo as published, `model_type: mimo`: Qwen2's, beside code of the checkpoint's own that is never run.

Importing this module makes transformers read it; a class that transformers has for it is left in place. It imports
nothing of bebop: every vLLM process does so (bebop.engines.vllm_engine.plugin).
"""

from __future__ import annotations

from transformers import AutoConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE = "mimo"


class MiMoConfig(Qwen2Config):
    """Qwen2's config under MiMo's name; `num_nextn_predict_layers` and the like are kept as they come."""

    model_type = MODEL_TYPE


if MODEL_TYPE not in CONFIG_MAPPING:
    AutoConfig.register(MODEL_TYPE, MiMoConfig)
