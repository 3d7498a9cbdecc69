"""What a policy directory says, read once: its class, tensors, heads, ids, ends of text, rotary positions.

transformers, vLLM and bebop each read a directory by rules of their own. Where these would read different models out of
one directory, or one of them would read less than is there, `read_policy` refuses it in one line, before any work.
Weights themselves are looked at where they are loaded: `bebop.mtp.checkpoint.refuse_not_finite`.

| what                 | the one reading                                                                          |
|----------------------|------------------------------------------------------------------------------------------|
| weights              | `model.safetensors`, or the shards that the index names; nothing beside them             |
| tensors              | those that transformers' class of the decoder has, and the MTP layers' that are claimed  |
| types                | float32, bfloat16, float16, float64, also mixed; quantised weights are refused           |
| tied embeddings      | `tie_word_embeddings`; a copy of lm_head in the file has to be equal                     |
| ids                  | those of the tokenizer, added tokens included; the model's others are padding            |
| end of a text        | the tokenizer's eos, and those of generation_config.json, else of config.json            |
| rotary positions     | default, linear, llama3, yarn                                                            |
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.data.tokenizer import num_ids_of, read_tokenizer
from bebop.errors import BadInput, first_line
from bebop.mtp.checkpoint import INDEX, SINGLE, Tensors, refuse_biases, tensor_facts
from bebop.mtp.families import MIMO, READ_AS, Family, claimed_layers, decoder_config, families, family_of, known_family

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
LM_HEAD = "lm_head.weight"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROPES = ("default", "linear", "llama3", "yarn")  # transformers and vLLM compute others differently
QUANTISED = ("quantization_config", "compression_config")
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json")  # vLLM and others look for them


@dataclass(frozen=True)
class Reading:
    """A directory that every reader takes for the same policy.

    config: config.json; text_config: transformers' config of the decoder. shapes: of every tensor, by name. num_ids: of
    the tokenizer, at most vocab_size. end_ids: those that end a text. rope: kind of its rotary positions. mtp_layers:
    that it has tensors of.
    """

    path: Path
    config: Mapping[str, Any]
    text_config: Any
    family: Family
    shapes: Mapping[str, tuple[int, ...]]
    tied: bool
    vocab_size: int
    num_ids: int
    end_ids: frozenset[int]
    chat_template: str | None
    rope: str
    mtp_layers: int

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The part of config.json that describes the decoder."""
        return decoder_config(self.config)

    def is_head(self, name: str) -> bool:
        """Whether a tensor belongs to an MTP layer."""
        return self.family.is_head(name, self.decoder)


def read_policy(path: Path) -> Reading:
    """Read a policy directory, with heads or without. Only tied weights are loaded.

    Raises BadInput, in one line, if its readers would take it for different models, or if one of them cannot read all
    of it.
    """
    path = Path(path)
    config = _config(path)
    _refuse_quantised(path, config)
    _check_class(path, config)
    family, decoder = family_of(config, path), decoder_config(config)
    _check_files(path)
    facts = tensor_facts(path)
    for name, (_, dtype) in facts.items():
        _check_dtype(path, name, dtype)
    text_config = _text_config(path)
    rope = _rope(path, text_config)
    tied = bool(text_config.tie_word_embeddings)
    tensors = Tensors(path)
    if tied:
        _check_tied(path, tensors)
    names = _check_tensors(path, config, family, {name: shape for name, (shape, _) in facts.items()}, tied)
    refuse_biases(tensors, config)
    tokenizer = read_tokenizer(path)
    num_ids = num_ids_of(tokenizer)
    if num_ids > text_config.vocab_size:
        raise BadInput(
            f"{path}: its tokenizer has ids up to {num_ids - 1}, the model has {text_config.vocab_size} embeddings"
        )
    return Reading(
        path=path,
        config=config,
        text_config=text_config,
        family=family,
        shapes={name: shape for name, (shape, _) in facts.items()},
        tied=tied,
        vocab_size=text_config.vocab_size,
        num_ids=num_ids,
        end_ids=_end_ids(path, decoder, tokenizer),
        chat_template=tokenizer.chat_template,
        rope=rope,
        mtp_layers=len(family.layers(names, decoder)),
    )


def decoder_class(config: Mapping[str, Any], path: Path, names: Iterable[str]) -> type:
    """transformers' class of a policy's decoder, which ignores the tensors of MTP layers. names: of all tensors."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    family, names = family_of(config, path), list(names)
    decoder = decoder_config(config)
    stock = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(path))]
    known = getattr(stock, "_keys_to_ignore_on_load_unexpected", None) or []
    ours = [*family.roots(names, decoder), *family.zero_biases(names, decoder)]
    # In the class's own module, where transformers looks up what its code supports.
    own = {"_keys_to_ignore_on_load_unexpected": [*known, *map(re.escape, ours)], "__module__": stock.__module__}
    return type(stock.__name__, (stock,), own)


def _check_tied(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput where config.json ties the embeddings and the file has another lm_head."""
    embeddings = next((name for name in EMBEDDINGS if name in tensors), None)
    if embeddings and LM_HEAD in tensors and not torch.equal(tensors[embeddings], tensors[LM_HEAD]):
        raise BadInput(
            f"{path}: config.json sets tie_word_embeddings=true, but {LM_HEAD} differs from {embeddings}; "
            "set it to false, or remove the one that is wrong"
        )


def _check_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    """Raises BadInput on a tensor that is not a weight in a plain floating-point type."""
    if dtype not in READABLE:
        raise BadInput(
            f"{path}: {name} is {str(dtype).removeprefix('torch.')}; expected float32, bfloat16 or float16: dequantise "
            "the model first"
        )


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BadInput(f"{path}: no such directory; expected a Hugging Face directory of a policy")
    if not (path / "config.json").is_file():
        raise BadInput(f"{path}: no config.json in it; expected a Hugging Face directory of a policy")
    return _json(path / "config.json")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise BadInput(f"{file}: not JSON ({first_line(error)}); copy the file again") from None
    if not isinstance(found, dict):
        raise BadInput(f"{file}: got a {type(found).__name__}, expected a mapping")
    return found


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    for part in (config, decoder_config(config)):
        for key in QUANTISED:
            if part.get(key):
                raise BadInput(
                    f"{path}: config.json has {key} ({part[key].get('quant_method', 'of an unnamed method')}); bebop "
                    "reads weights as they stand: write the model in bfloat16 and drop that key"
                )
    for name in QUANTISED_FILES:
        if (path / name).is_file():
            raise BadInput(f"{path}: {name} says that the weights are quantised; write the model in bfloat16")


def _check_class(path: Path, config: Mapping[str, Any]) -> None:
    kind, architectures = config.get("model_type"), config.get("architectures") or []
    family = known_family(config)
    if family not in (MIMO, None) and not family.served_by_bebop:
        return
    own = [
        f"{each.classes[kind]}ForCausalLM"
        for each in families()
        if (each is MIMO or each.served_by_bebop) and kind in each.classes
    ]
    allowed = ([] if kind in READ_AS else own) + ([MIMO.architecture] if kind in MIMO.classes else [])
    if len(architectures) != 1 or architectures[0] not in allowed:
        known = ", ".join(dict.fromkeys(kind for each in families() for kind in each.classes))
        raise BadInput(
            f"{path}: model_type {kind} with architectures {architectures}; expected a causal language "
            f"model with its own class of one of these model types: {known}; register another "
            "one in FAMILIES, see docs/extending.md"
        )


def _check_files(path: Path) -> None:
    """Raises BadInput on weight files that some readers take and others leave."""
    held = {file.name for file in path.glob("*.safetensors")}
    if not (path / INDEX).is_file():
        if SINGLE in held and (others := sorted(held - {SINGLE})):
            raise BadInput(f"{path}: it has {SINGLE} and {others[0]}, and no {INDEX}; remove what is not the policy's")
        return
    index = _json(path / INDEX)
    if absent := sorted({"metadata", "weight_map"} - index.keys()):
        raise BadInput(f"{path}: {INDEX} has no {absent[0]}, which transformers reads; write the index again")
    named = set(index["weight_map"].values())
    if SINGLE in held and SINGLE not in named:
        raise BadInput(f"{path}: it has both {SINGLE} and {INDEX}, which names other files; remove the older ones")


def _text_config(path: Path) -> Any:
    from transformers import AutoConfig

    import bebop.mtp.mimo  # noqa: F401

    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # transformers' classes check their values by validators of many kinds
        raise BadInput(f"{path}: transformers refuses its config.json: {first_line(error)}") from None


def _rope(path: Path, config: Any) -> str:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROPES:
        raise BadInput(
            f"{path}: rotary positions of rope_type={kind}, which its readers compute differently; expected one of "
            f"{', '.join(ROPES)}"
        )
    return kind


def _check_tensors(
    path: Path, config: Mapping[str, Any], family: Family, shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> list[str]:
    """Raises BadInput unless the files hold the decoder's tensors, its heads' and no others. Returns their names.

    transformers is asked, without loading a weight: its classes know names, shapes and conversions of the decoder.
    """
    from transformers import AutoConfig

    from bebop.mtp.initialise import check_heads

    cls, own = decoder_class(config, path, shapes), AutoConfig.from_pretrained(path)
    if not isinstance(own, cls.config_class):  # of a model that also sees: the decoder's class takes the decoder's part
        own = own.get_text_config()
    if LM_HEAD in shapes:  # of a tied policy: transformers would compare two tensors that are not loaded
        own.tie_word_embeddings = own.get_text_config().tie_word_embeddings = False
    with quiet():
        try:
            _, told = cls.from_pretrained(
                path, config=own, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
            )
        except Exception as error:  # of any kind; the directory's fault, as its class is known
            raise BadInput(f"{path}: transformers cannot load it: {first_line(error)}") from None
    if missing := sorted(told["missing_keys"]):
        raise BadInput(f"{path}: {len(missing)} tensors of the policy are missing, such as {missing[0]}")
    if other := sorted(told["mismatched_keys"]):
        name, found, wanted = other[0]
        raise BadInput(f"{path}: {name} has shape {list(found)}, expected {list(wanted)} by config.json")
    known = {name for name in told["unexpected_keys"] if name.endswith("rotary_emb.inv_freq")}
    strange = sorted(set(told["unexpected_keys"]) - known - ({LM_HEAD} if tied else set()))
    if strange:
        raise BadInput(
            f"{path}: tensor {strange[0]} belongs to nothing in {cls.__name__} or its heads, and some readers would "
            f"drop it silently ({len(strange)} such); remove it"
        )
    decoder, names = decoder_config(config), list(shapes)
    claimed, layers = claimed_layers(config), family.layers(names, decoder)
    if absent := sorted(set(range(claimed)) - layers):
        raise BadInput(
            f"{path}: config.json claims {claimed} MTP layers ({family.count_key}), but layer {absent[0]} has no "
            f"tensor; add them, or set the key to {len(layers)}"
        )
    if layers and not claimed and family.count_key in decoder:
        raise BadInput(f"{path}: MTP tensors without a claim; set {family.count_key}={len(layers)} in config.json")
    if layers:
        check_heads(path, config, shapes)
    return names


def _end_ids(path: Path, decoder: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Where vLLM ends a text: at the tokenizer's eos and generation_config.json's, or config.json's without it."""
    file = path / "generation_config.json"
    declared = _ids(_json(file) if file.is_file() else decoder)
    of_tokenizer = _ids({"eos_token_id": tokenizer.eos_token_id})
    if declared and of_tokenizer - declared:
        print(
            f"bebop: {path}: a text ends at any of the ids {sorted(declared | of_tokenizer)}: the tokenizer says "
            f"{sorted(of_tokenizer)}, the model's config files {sorted(declared)}",
            file=sys.stderr,
        )
    return frozenset(declared | of_tokenizer)


def _ids(part: Mapping[str, Any]) -> set[int]:
    found = part.get("eos_token_id")
    return {found} if isinstance(found, int) else set(found or ())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and its report of a load."""
    from transformers.utils import logging as hf

    level, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity(hf.CRITICAL)
    hf.disable_progress_bar()
    try:
        yield
    finally:
        hf.set_verbosity(level)
        if bars:
            hf.enable_progress_bar()
