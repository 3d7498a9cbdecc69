"""Existing models as policies: SmolLM2 out of its package, and Hugging Face directories.

| the directory                             | becomes                                                             |
|-------------------------------------------|---------------------------------------------------------------------|
| has heads, or is of a family that         | the policy, as it is                                                |
| publishes them (bebop.mtp.families)       |                                                                     |
| qwen2; qwen3 where the heads' widths      | a copy in the MiMo layout, which a vLLM without bebop serves:       |
| sum to hidden_size                        | `architectures: [MiMoForCausalLM]`, model_type and tokenizer kept   |
| llama, mistral, other qwen3, qwen3_moe    | a copy with fresh heads `mtp.*`, which vLLM serves with bebop's     |
|                                           | plug-in; class, model_type and tokenizer kept                       |

Copies are made shard by shard, in `model.dtype`. Their config.json is the source's, with what the table says changed.
vLLM's MiMo has biases on q, k and v, and does not report those that a file lacks: where the policy has none, the copy
holds zeros.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.config import Model
from bebop.errors import BadInput
from bebop.mtp.checkpoint import PROVENANCE, SINGLE, Tensors, copy_other_files, refuse_not_finite, write_index
from bebop.mtp.families import MIMO, Family, family_of
from bebop.mtp.reading import LM_HEAD, read_policy
from bebop.policies import checks
from bebop.policies.smollm2 import PACKAGE, find_smollm2, write_smollm2
from bebop.store.caches import Content, Keys, Stamps, cached, versions

TOKENIZER_CONFIG = "tokenizer_config.json"


def prepare_mapped(model: Model, seed: int, *, version: int, max_model_len: int | None = None) -> Path:
    """The policy's directory of `model` (name smollm2 or hf); see `bebop.policies.prepare_policy`."""
    of_model = Keys(model, but=("tiny", "path"))
    if model.name == "smollm2":
        file = find_smollm2()
        reader = versions("transformers")
        made = CopyInputs(Content(file), f"{PACKAGE}: {file.name}", None, of_model, seed, reader, version)
        return cached("smollm2", made, _map_smollm2)
    source = Path(str(model.path)).expanduser().resolve()
    try:
        reading = read_policy(source)
    except BadInput as error:
        raise BadInput(f"model.path={error}") from None
    raw, config = dict(reading.config), reading.text_config
    checks.check_positions(source, raw, max_model_len)
    if checks.stands(raw):
        return _readable(source, raw, version)
    checks.check_shape(source, config)
    raw = checks.without_window(source, raw, config, max_model_len)
    made = CopyInputs(Stamps(source), str(source), raw, of_model, seed, {}, version)
    return cached(source.name or "hf", made, _map)


@dataclass(frozen=True)
class CopyInputs:
    """What a copy with fresh heads is made from."""

    source: Content | Stamps  # a GGUF file, or a Hugging Face directory
    origin: str  # what to call the source
    config: Mapping[str, Any] | None  # config.json of the directory, without a window that no text can fill
    model: Keys
    seed: int
    versions: Mapping[str, str]
    version: int


def layout_of(config: Any) -> Family:
    """The family of the copy of a directory without heads. config: transformers'."""
    heads, width = config.num_attention_heads, config.hidden_size
    if config.model_type == "qwen3" and config.head_dim * heads == width:
        return MIMO
    return MIMO if config.model_type == "qwen2" else family_of({"model_type": config.model_type})


def with_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Decoder tensors plus zero biases beside the q, k and v weights that have none."""
    whole = dict(tensors)
    for name in tensors:
        projection = re.fullmatch(r"(.*\.self_attn\.[qkv]_proj\.)weight", name)
        if projection:
            whole.setdefault(projection[1] + "bias", torch.zeros(len(whole[name]), dtype=whole[name].dtype))
    return whole


def _map(inputs: CopyInputs, directory: Path) -> None:
    """Write the copy of a directory with fresh heads."""
    from bebop.mtp import head_state, init_heads, write_checkpoint

    source, raw, seed = inputs.source.path, dict(inputs.config or {}), inputs.seed
    model: Any = inputs.model.section
    config = read_policy(source).text_config
    family, tied = layout_of(config), bool(config.tie_word_embeddings)
    tensors = Tensors(source)
    copy_other_files(source, directory, without=("config.json", PROVENANCE))
    kept = {key: value for key, value in raw.items() if key != "dtype"}
    kept |= {"torch_dtype": model.dtype, "tie_word_embeddings": tied, "num_nextn_predict_layers": 0}
    if family is MIMO:
        kept["architectures"] = [MIMO.architecture]
        if config.model_type == "qwen3":
            kept["qk_norm"] = True
    (directory / "config.json").write_text(json.dumps(kept, indent=2) + "\n")
    dropped = {LM_HEAD} if tied else set()
    _copy_weights(source, tensors, directory, getattr(torch, model.dtype), dropped, biases=family is MIMO)
    provenance = {
        "made_by": "bebop.policies.prepare_policy",
        "source": inputs.origin,
        "model": model.model_dump(mode="json", exclude={"tiny"}),
        "seed": seed,
        "mtp_depth": 0,
    }
    write_checkpoint(directory, directory, head_state(init_heads(directory, model.mtp_init, seed)), provenance)


def _map_smollm2(inputs: CopyInputs, directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        source = Path(folder)
        write_smollm2(inputs.source.path, source)
        raw = json.loads((source / "config.json").read_text())
        _map(replace(inputs, source=Stamps(source), config=raw), directory)


def _copy_weights(
    source: Path, tensors: Any, directory: Path, dtype: torch.dtype, dropped: set[str], *, biases: bool
) -> None:
    """The source's tensors in files of the same names, one file in memory at a time."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for file in sorted(set(tensors.files.values())):
        names = [name for name, where in tensors.files.items() if where == file and name not in dropped]
        held = {name: tensors[name] for name in names if not name.endswith("rotary_emb.inv_freq")}
        refuse_not_finite(source, held.items())
        if biases:  # one that lies in another shard is the source's own
            held = {name: value for name, value in with_biases(held).items() if name in held or name not in tensors}
        if not held:
            continue
        save_file(
            {name: value.to(dtype).contiguous() for name, value in held.items()},
            directory / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(held, file)
    if set(weight_map.values()) != {SINGLE}:
        write_index(directory, weight_map)


def _readable(source: Path, raw: Mapping[str, Any], version: int) -> Path:
    """`source` itself, or the same with a tokenizer that loads everywhere, for directories of earlier versions.

    Those were made of Llama-shaped models under model_type qwen2, whose tokenizer class transformers 5.10 forces on
    every tokenizer; an empty `auto_map` kept it off, and broke every load with trust_remote_code=True. Under MiMo's
    own model_type, mimo, the same weights keep their tokenizer without it.
    """
    path = source / TOKENIZER_CONFIG
    tokenizer = json.loads(path.read_text()) if path.is_file() else {}
    if tokenizer.get("auto_map") != {"AutoTokenizer": [None, None]} or raw.get("model_type") != "qwen2":
        return source
    kept = {key: value for key, value in tokenizer.items() if key != "auto_map"}
    changed = {"config.json": {**raw, "model_type": "mimo"}, TOKENIZER_CONFIG: kept}
    return cached(source.name, LinkedInputs(Stamps(source), changed, version), _linked)


@dataclass(frozen=True)
class LinkedInputs:
    """A directory, with other files of some names."""

    source: Stamps
    changed: Mapping[str, Any]
    version: int


def _linked(inputs: LinkedInputs, directory: Path) -> None:
    for file in sorted(each for each in inputs.source.path.iterdir() if each.is_file()):
        if file.name not in inputs.changed:
            _link(file, directory / file.name)
    for name, content in inputs.changed.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another file system
        shutil.copy2(file, to)
