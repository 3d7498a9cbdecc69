"""A tiny trained policy of a family whose heads both sides train: Qwen3.5, dense.

All its layers have full attention: on a CPU vLLM 0.31 serves gated delta nets only in bfloat16, and the engine must run
in float32, in which the heads are scored.

Size and training are those of bebop's own tiny policy (`model.tiny`): trained on worked solutions, then frozen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bebop.config import Model
from bebop.data.tokenizer import load_tokenizer, write_tiny_tokenizer
from bebop.errors import ConfigError
from bebop.mtp import claimed_layers, family_of, head_state, init_heads, write_checkpoint
from bebop.mtp.checkpoint import read_config
from bebop.policies import prepare_policy
from bebop.policies.pretrain import init_weights, train_tiny
from bebop.policies.random_family import family_config
from bebop.policies.tiny import TinyInputs
from bebop.store.caches import cached, versions

VERSION = 2  # raise when a change to the code makes other policies of the same config
BOTH = ("qwen3_next", "qwen3_5")  # families that speculators 0.9.0 trains native heads of, and bebop too


def shared_policy(model: Model, seed: int) -> Path:
    """Directory of a policy with untrained heads. model.name=tiny makes one, hf takes `model.path` as it is.

    Raises ConfigError where both sides do not train the family, or the policy has no MTP tensors.
    """
    if model.name == "tiny":
        made = TinyInputs(model.tiny, model.dtype, model.mtp_init, seed, versions("reasoning-gym"), VERSION)
        return cached("tiny-qwen3_5", made, _make)
    policy = prepare_policy(model, seed)
    config = read_config(policy)
    if family_of(config, policy).name not in BOTH or not claimed_layers(config):
        raise ConfigError(
            f"model.path={policy}: expected a policy of {' or '.join(BOTH)} with native MTP tensors, which is what "
            "speculators 0.9.0 trains; set model=tiny for a policy made here"
        )
    return policy


def _make(inputs: TinyInputs, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tiny, seed = inputs.tiny, inputs.seed
    vocab_size = write_tiny_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    config = family_config(
        "qwen3_5_text",
        vocab_size=vocab_size,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        intermediate_size=tiny.intermediate_size,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        linear_layers=False,
    )
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    init_weights(network, seed)
    training = train_tiny(network, tokenizer, tiny, seed)
    network.save_pretrained(directory)
    provenance = {"made_by": "recipes/against_speculators", "seed": seed, "training": training}
    heads = head_state(init_heads(directory, inputs.mtp_init, seed))
    write_checkpoint(directory, directory, heads, provenance)
