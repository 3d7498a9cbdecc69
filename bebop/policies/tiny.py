"""The tiny policy: a small decoder that bebop trains on worked solutions in about a minute and a half on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.config import Model, TinyModel
from bebop.data.tokenizer import load_tokenizer, write_tiny_tokenizer
from bebop.policies.layout import config_dict, write_with_head
from bebop.policies.pretrain import init_weights, train_tiny
from bebop.store.caches import unnamed
from bebop.store.files import plain


@dataclass(frozen=True)
class TinyInputs:
    """What the tiny policy is made from."""

    tiny: TinyModel
    dtype: Literal["float32", "bfloat16"]
    mtp_init: Literal["last_layer", "random"]
    seed: int
    versions: Mapping[str, str]  # of what asks the questions
    version: int
    progress: bool = unnamed(default=True)


def make_tiny(inputs: TinyInputs, directory: Path) -> None:
    """Train the tiny policy and write it into `directory`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny, seed = inputs.tiny, inputs.seed
    vocab_size = write_tiny_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    config: dict[str, Any] = config_dict(
        vocab_size=vocab_size,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        intermediate_size=tiny.intermediate_size,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        dtype=inputs.dtype,
    )
    network = Qwen2ForCausalLM(Qwen2Config(**{**config, "torch_dtype": "float32"}))
    init_weights(network, seed)
    training = train_tiny(network, tokenizer, tiny, seed, progress=inputs.progress)
    backbone = {name: tensor.to(getattr(torch, inputs.dtype)) for name, tensor in network.state_dict().items()}
    provenance = {
        "made_by": "bebop.backbone.prepare_policy",
        "model": plain(Model(name="tiny", tiny=tiny, dtype=inputs.dtype, mtp_init=inputs.mtp_init)),
        "seed": seed,
        "training": training,
        "mtp_depth": 0,
    }
    write_with_head(directory, config, backbone, provenance, mtp_init=inputs.mtp_init, seed=seed)
