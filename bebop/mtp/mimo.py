"""MiMo as published, `model_type: mimo`, for transformers: Qwen2's decoder, without the code in the checkpoint.

Importing this module registers the model type; a class that transformers already has for it is kept. The layout of the
heads is a row of bebop.mtp.families.
"""

from __future__ import annotations

import re

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from bebop.mtp.families import MIMO

MODEL_TYPE = "mimo"


class MiMoConfig(Qwen2Config):
    """Qwen2's config under MiMo's name; other keys, such as `num_nextn_predict_layers`, are kept unchanged."""

    model_type = MODEL_TYPE


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's decoder, which ignores the MTP layers."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (re.escape(MIMO.heads),)


if MODEL_TYPE not in CONFIG_MAPPING:
    AutoConfig.register(MODEL_TYPE, MiMoConfig)
if MiMoConfig not in MODEL_FOR_CAUSAL_LM_MAPPING:
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
