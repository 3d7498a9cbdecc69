"""Registers family `decoder` with vLLM: the classes that serve its directories, and its drafter.

| config.json of the directory          | target                             | drafter              |
|---------------------------------------|------------------------------------|----------------------|
| claims no MTP layer                   | vLLM's own class does everything   | none                 |
| `[LlamaForCausalLM]` and the like,    | vLLM's own, without the tensors    | `DecoderMTP`, around |
| `num_nextn_predict_layers: 1`         | `mtp.*` (bebop...decoder_models)   | the target's layer   |

To add a decoder, a family with `served_by_bebop` (bebop.mtp.families) is enough: vLLM's module has the name of the
model type, and its classes are `<Class>ForCausalLM` and `<Class>DecoderLayer`. Classes are given as strings, so that a
process imports vLLM's model code only for the policy that it serves.
"""

from __future__ import annotations

import logging
from typing import Any

from bebop.mtp.families import DECODER, MIMO, served_by_bebop

logger = logging.getLogger("bebop.engines")

MODELS = "bebop.engines.vllm_engine.decoder_models"
DRAFTER = "BebopDecoderMTP"  # in `architectures` of the draft's config, only in memory
STOCK = "vllm.model_executor.models"


def has_heads(config: Any) -> bool:
    """Whether a transformers config belongs to a policy with heads of family `decoder`."""
    named = getattr(config, "architectures", None) or []
    of_family = type(config).model_type in served_by_bebop() and MIMO.architecture not in named
    return of_family and bool(getattr(config, DECODER.count_key, 0))


def hf_config_override(config: Any) -> Any:
    """Replaces SpeculativeConfig's: the draft's config from the target's. At module level, because it is pickled."""
    if not has_heads(config):
        return hf_config_override.stock(config)  # type: ignore[attr-defined]
    # vLLM recognises drafters by the model type `mtp`; only layer 0 is served, K times
    config.update({"model_type": "mtp", "n_predict": 1, "architectures": [DRAFTER]})
    return config


def register() -> None:
    """Register the classes. Safe to call any number of times; does not replace another plug-in's classes."""
    from vllm import ModelRegistry
    from vllm.config.speculative import SpeculativeConfig

    for model_type, prefix in served_by_bebop().items():
        name = f"{prefix}ForCausalLM"
        module = getattr(ModelRegistry.models.get(name), "module_name", None)
        if module == f"{STOCK}.{model_type}":
            ModelRegistry.register_model(name, f"{MODELS}:{name}")
        elif module != MODELS:
            logger.warning("bebop leaves %s to %s: MTP heads of such policies are not served", name, module)
    ModelRegistry.register_model(DRAFTER, f"{MODELS}:DecoderMTP")
    if SpeculativeConfig.hf_config_override is not hf_config_override:
        hf_config_override.stock = SpeculativeConfig.hf_config_override  # type: ignore[attr-defined]
        SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)
