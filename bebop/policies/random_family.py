"""Random policies of transformers' own model types: small, but with every part that a real one has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp import head_state, init_heads, write_checkpoint
from bebop.mtp.checkpoint import Tensors, read_config
from bebop.mtp.families import MIMO
from bebop.mtp.names import cast

# as in published configs: vLLM reads partial_rotary_factor from beside rope_parameters, where transformers leaves .25
GATED = {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"}
SOFTMAX_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SIGMOID_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def family_config(
    model_type: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    end_id: int,
    pad_id: int,
    linear_layers: bool = True,
    tied: bool = False,
    head_dim: int | None = None,
    dtype: str = "float32",
) -> Any:
    """transformers' config of a small policy.

    linear_layers: every second layer, from the first on, is a gated delta net where the family has them. tied: lm_head
    is the embeddings. head_dim: of llama, mistral, qwen3 and qwen3_moe, hidden_size / num_heads where None. Raises
    ValueError on an unknown model_type.
    """
    from transformers import AutoConfig

    width, experts = 32, intermediate_size // 2
    kinds = ["linear_attention" if linear_layers and i % 2 == 0 else "full_attention" for i in range(num_layers)]
    gated = {
        "head_dim": width,
        "num_key_value_heads": max(1, num_heads // 2),
        "layer_types": kinds,
        "linear_key_head_dim": 128,  # as published; vLLM's kernels on a CPU do not take a small one
        "linear_value_head_dim": 128,
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": 2 * num_heads,
        "rope_parameters": dict(GATED),
    }
    softmax = {**SOFTMAX_EXPERTS, "moe_intermediate_size": experts, "shared_expert_intermediate_size": experts}
    sigmoid = {**SIGMOID_EXPERTS, "moe_intermediate_size": experts}
    # vLLM's MLA on a CPU takes only DeepSeek's own cache width: 512 + 64
    latent = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    dense = {"num_key_value_heads": max(1, num_heads // 2), "head_dim": head_dim or hidden_size // num_heads}
    own: dict[str, dict[str, Any]] = {
        "llama": dense,
        "mistral": dense | {"sliding_window": None},
        "qwen3": dense,
        "qwen3_moe": dense | SOFTMAX_EXPERTS | {"moe_intermediate_size": experts},
        "qwen3_5_text": gated,
        "qwen3_5_moe_text": gated | softmax,
        "qwen3_next": gated | softmax | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "deepseek_v3": sigmoid | latent | {"num_key_value_heads": num_heads},
        "glm4_moe": sigmoid
        | {
            "head_dim": width,
            "num_key_value_heads": max(1, num_heads // 2),
            "use_qk_norm": True,
            "attention_bias": True,
        },
    }
    if model_type not in own:
        raise BadInput(f"model_type={model_type}: expected one of {', '.join(own)}")
    return AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype=dtype,
        **own[model_type],
    )


def write_random_family(dest: Path, config: Any, seed: int, *, mtp: bool, layout: str | None = None) -> None:
    """Write a random policy of `config` beside the tokenizer in `dest`, with a random MTP layer if `mtp`.

    layout: "mimo" of a Qwen3 policy, see bebop.mtp.families.
    """
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(network, generator)
    network.to(getattr(torch, str(config.dtype).removeprefix("torch."))).save_pretrained(dest)
    if layout == "mimo":
        _as_mimo(dest)
    if mtp:
        head = init_heads(dest, "random", seed).float()
        _draw(head, generator)
        dtype = next(network.parameters()).dtype
        provenance = {"made_by": "bebop.backbone.random_checkpoint", "seed": seed}
        write_checkpoint(dest, dest, cast(head_state(head), dtype), provenance)


def _as_mimo(dest: Path) -> None:
    raw = read_config(dest) | {"architectures": [MIMO.architecture], "qk_norm": True}
    tensors = dict(Tensors(dest))
    for name in MIMO.zero_biases(list(tensors), raw):
        tensors[name] = torch.zeros(len(tensors[f"{name.removesuffix('bias')}weight"]))
    (dest / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(tensors, dest / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _draw(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw weights of standard deviation 1 / sqrt(fan-in), and vectors close to their initial values."""
    tied = module.config.tie_word_embeddings
    buffers = {name: buffer for name, buffer in module.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, value in {**dict(module.named_parameters()), **buffers}.items():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(_drawn(name, value, noise, tied))


def _drawn(name: str, value: Tensor, noise: Tensor, tied: bool) -> Tensor:
    if value.dim() == 1:
        return value + 0.1 * noise
    if "embed_tokens" in name:
        return 1.2 * noise / math.sqrt(value.shape[-1]) if tied else noise
    gain = 1.2 if "lm_head" in name or "q_proj" in name or "k_proj" in name else 1.0
    return gain * noise / math.sqrt(value.shape[-1])
