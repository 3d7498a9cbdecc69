"""MiMo as published for transformers' auto classes: Qwen2's decoder, without the checkpoint's own code."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from bebop.mtp.mimo_config import MiMoConfig


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's decoder; the MTP layers are left to bebop.mtp.heads.mimo."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\.",)


if MiMoConfig not in MODEL_FOR_CAUSAL_LM_MAPPING:
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
