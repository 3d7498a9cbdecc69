"""A random policy in any known layout, for tests and losslessness checks, which need only some small model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bebop.data.tokenizer import token_ids, write_integer_tokenizer, write_tiny_tokenizer
from bebop.policies.layout import ARCHITECTURE, config_dict, policy_shapes, write_policy

# What a published MiMo's config.json says otherwise than the MiMo layout, or beside it; its code is not there.
PUBLISHED = {
    "architectures": [ARCHITECTURE],
    "model_type": "mimo",
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "attention_bias": True,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "use_mrope": False,
}


def random_checkpoint(
    dest: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    intermediate_size: int = 128,
    vocab: Literal["tiny"] | int = "tiny",
    seed: int = 0,
    mtp: bool = True,
    dtype: str = "float32",
    model_type: str = "qwen2",
    linear_layers: bool = True,
    tied: bool = False,
    head_dim: int | None = None,
    layout: Literal["mimo"] | None = None,
    padding: int = 0,
) -> Path:
    """Write a random checkpoint into `dest` and return it.

    model_type: qwen2 is the MiMo layout, mimo the same as MiMo is published; or another of bebop.mtp.families,
    linear_layers: with its linear attention. tied: lm_head is the embeddings, for other than MiMo's two. head_dim: of
    llama, mistral, qwen3 and qwen3_moe; hidden_size / num_heads where None.
    layout: qwen3 in MiMo's, which a vLLM without bebop serves.
    vocab: "tiny" takes the tiny policy's tokenizer; an integer n a trivial one with the ids 0..n-1. padding: embeddings
    that the model has beyond those ids.
    Logits have standard deviation 1.2 or so and depend on the whole prefix, so that distributions are neither flat nor
    certain and the MTP layer agrees with the decoder in part.
    """
    dest = Path(dest)
    if vocab == "tiny":
        size = write_tiny_tokenizer(dest)
    else:
        size = vocab
        write_integer_tokenizer(dest, size)
    end_id, pad_id = token_ids(dest)
    sizes: dict[str, Any] = {
        "vocab_size": size + padding,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "intermediate_size": intermediate_size,
        "end_id": end_id,
        "pad_id": pad_id,
        "dtype": dtype,
    }
    if model_type not in ("qwen2", "mimo"):
        from bebop.policies.random_family import family_config, write_random_family

        other = family_config(model_type, **sizes, linear_layers=linear_layers, tied=tied, head_dim=head_dim)
        write_random_family(dest, other, seed, mtp=mtp, layout=layout)
        return dest
    config = config_dict(**sizes, mtp=mtp)
    if model_type == "mimo":
        config |= PUBLISHED | {"head_dim": hidden_size // num_heads}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _draw(name, shape, generator) for name, shape in policy_shapes(config).items()}
    write_policy(dest, config, tensors, {"made_by": "bebop.backbone.random_checkpoint", "seed": seed, "config": config})
    return dest


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return noise
    gain = 1.2 if "lm_head" in name or "q_proj" in name or "k_proj" in name else 1.0
    return gain * noise / math.sqrt(shape[-1])
