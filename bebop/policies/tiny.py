"""The tiny policy: a small decoder that bebop trains on worked solutions in about a minute and a half on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bebop.config import Model
from bebop.data.prompts import make_prompts
from bebop.data.tokenizer import load_tokenizer, write_tiny_tokenizer
from bebop.policies.layout import config_dict, write_with_head
from bebop.policies.measure import measure
from bebop.policies.pretrain import init_weights, train_tiny

NUM_MEASURED = 64  # prompts of split `eval` on which the finished policy is described


def make_tiny(model: Model, seed: int, directory: Path, *, progress: bool = True) -> None:
    """Train the tiny policy of `model.tiny` and write it into `directory`, its measured skill in bebop.json."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = model.tiny
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
        dtype=model.dtype,
    )
    network = Qwen2ForCausalLM(Qwen2Config(**{**config, "torch_dtype": "float32"}))
    init_weights(network, seed)
    training = train_tiny(network, tokenizer, tiny, seed, progress=progress)
    prompts = make_prompts(tiny.tasks, NUM_MEASURED, seed, "eval", solutions=False)
    skill = {
        name: measure(network, tokenizer, prompts, temperature=temperature, seed=seed)
        for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0))
    }
    backbone = {name: tensor.to(getattr(torch, model.dtype)) for name, tensor in network.state_dict().items()}
    provenance = {
        "made_by": "bebop.backbone.prepare_policy",
        "model": model.model_dump(mode="json"),
        "seed": seed,
        "training": training,
        "skill": skill,
        "mtp_depth": 0,
    }
    write_with_head(directory, config, backbone, provenance, mtp_init=model.mtp_init, seed=seed)
