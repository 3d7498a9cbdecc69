"""Reads heads from Hugging Face directories and writes them, with a record of every tensor.

Each source tensor is kept, replaced by a new value, or dropped; new head tensors are added. bebop.json lists which is
which. If tensors do not match config or index, that is an error and nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bebop.errors import BadInput, first_line
from bebop.mtp.families import MIMO, claimed_layers, decoder_config, family_of, is_head_name, known_family
from bebop.records import WeightChecksums
from bebop.store.files import read_json, remove_leftovers, replacing, write_json

SINGLE, INDEX, HEADS_SHARD = "model.safetensors", "model.safetensors.index.json", "model-mtp-heads.safetensors"
PROVENANCE = "bebop.json"
_DTYPES = {  # by their names in a safetensors header
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
}
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


class Tensors(Mapping[str, Tensor]):
    """The tensors of a policy directory by name, read when asked for. files: name -> file.

    Raises ValueError where index and shards disagree, or nothing is there to read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        index = self.path / INDEX
        if index.exists():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._check_shards()
        elif (self.path / SINGLE).exists():
            self.files = dict.fromkeys(self._names(SINGLE), SINGLE)
        else:
            raise BadInput(f"{self.path}: expected {SINGLE} or {INDEX} in it")

    def _names(self, file: str) -> list[str]:
        try:
            with safe_open(self.path / file, "pt") as shard:
                return list(shard.keys())
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{self.path}: {file} cannot be read ({first_line(error)}); copy the file again") from None

    def _check_shards(self) -> None:
        for file in sorted(set(self.files.values())):
            if not (self.path / file).exists():
                raise BadInput(f"{self.path}: {INDEX} names {file}, which is not there")
            indexed = {name for name, where in self.files.items() if where == file}
            held = set(self._names(file))
            if indexed != held:
                raise BadInput(
                    f"{self.path}: {file} and {INDEX} disagree; only in the index {sorted(indexed - held)}, "
                    f"only in the shard {sorted(held - indexed)}"
                )

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.path / self.files[name], "pt") as shard:
            return shard.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a policy directory."""
    return json.loads((Path(path) / "config.json").read_text())


def trained_depth(path: Path) -> int | None:
    """Depth that a policy directory's heads were trained for: `mtp_depth` in its bebop.json, which is sft.depth; 0
    where bebop made them and nothing has trained them; None where nothing is recorded."""
    depth = read_json(path / PROVENANCE).get("mtp_depth")
    return None if depth is None else int(depth)


def refuse_biases(tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Raise ValueError where a bias that has to be zero (families.Family.zero_biases) is not."""
    family = known_family(config)
    names = family.zero_biases(tensors, decoder_config(config)) if family else []
    wrong = [name for name in names if name in tensors and bool(tensors[name].any())]
    if wrong:
        raise BadInput(f"{tensors.path}: {wrong[0]} is not zero; transformers' decoder has no bias there")


def refuse_not_finite(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise BadInput where a weight of the policy in `path` holds a NaN or an infinity."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadInput(f"{path}: {name} has a NaN or an infinity, expected finite weights")


def write_checkpoint(
    source_dir: Path,
    dest_dir: Path,
    head_tensors: Mapping[str, Tensor],
    provenance: Mapping[str, Any],
    *,
    drop: Iterable[str] = (),
) -> Path:
    """Write `source_dir` with new values for the tensors in `head_tensors` to `dest_dir`, a directory that vLLM loads
    as it is.

    head_tensors: checkpoint name -> tensor, written in its own dtype. Tensors of the source with these names are
    replaced (also in the backbone); other names must be those of MTP tensors of the policy's family. drop: source
    tensors to leave out, listed in bebop.json. provenance: what made it, added to the source's bebop.json. The division
    into shards is kept, and unchanged shards are copied; new tensors of a sharded source get their own shard. Config
    and tokenizer files are copied. `dest_dir` is written under another name and then renamed, so it is complete or does
    not exist. Returns dest_dir. Raises ValueError for unknown names, wrong shapes, an MTP claim without tensors, or a
    missing lm_head.
    """
    source_dir, dest_dir = Path(source_dir), Path(dest_dir)
    source, config, drop = Tensors(source_dir), read_config(source_dir), set(drop)
    added = [name for name in head_tensors if name not in source]
    _check_names(source, config, head_tensors, added, drop)
    names = (set(source) | set(added)) - drop
    config = _check_claims(source_dir, config, names)

    remove_leftovers(dest_dir)
    with replacing(dest_dir) as part:
        part.mkdir()
        left_out = _write_parts(source, part, head_tensors, added, names, drop)
        (part / "config.json").write_text(json.dumps(config, indent=2))
        checksums = checkpoint_checksums(part)
        record = {
            **read_json(source_dir / PROVENANCE),
            **provenance,
            "checksum": {"backbone": checksums.backbone, "heads": checksums.heads},
            "tensors": {
                "kept": len(names) - len(head_tensors),
                "replaced": len(head_tensors) - len(added),
                "added": len(added),
                "dropped": sorted(drop),
                "files_left_out": left_out,
            },
        }
        write_json(part / PROVENANCE, record)
    return dest_dir


def _write_parts(
    source: Tensors, part: Path, head_tensors: Mapping[str, Tensor], added: list[str], names: set[str], drop: set[str]
) -> list[str]:
    """Weights and the files beside them; the names of those that were left out."""
    weight_map = dict(source.files)
    sharded = (source.path / INDEX).exists()
    weight_map |= dict.fromkeys(added, HEADS_SHARD if sharded else SINGLE)
    weight_map = {name: file for name, file in weight_map.items() if name in names}
    touched = {{**source.files, **weight_map}[name] for name in {*head_tensors, *drop}}
    for file in sorted(set(weight_map.values())):
        if file not in touched:
            shutil.copyfile(source.path / file, part / file)  # without its rights: it may be read-only
            continue
        tensors = {
            name: (head_tensors[name] if name in head_tensors else source[name]).detach().cpu().contiguous().clone()
            for name, where in weight_map.items()
            if where == file
        }
        save_file(tensors, part / file, metadata={"format": "pt"})
    if sharded:
        write_index(part, weight_map)
    return copy_other_files(source.path, part)


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index of a sharded directory, whose files are there. weight_map: name -> file."""
    total_size = sum(sum(_sizes(_facts(folder / file)).values()) for file in set(weight_map.values()))
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def tensor_facts(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a policy directory; reads only the headers. Raises ValueError as `Tensors`."""
    files = sorted(set(Tensors(path).files.values()))
    return {name: facts for file in files for name, facts in _facts(Path(path) / file).items()}


def tensor_bytes(path: Path) -> dict[str, int]:
    """Size in bytes of every tensor of a policy directory, as `tensor_facts`."""
    return _sizes(tensor_facts(path))


def _facts(file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with file.open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: (tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()}


def _sizes(facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, int]:
    return {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in facts.items()}


def _check_names(
    source: Tensors, config: Mapping[str, Any], new: Mapping[str, Tensor], added: list[str], drop: set[str]
) -> None:
    unknown = sorted(drop - set(source))
    if unknown:
        raise BadInput(f"drop: {unknown} not in {source.path}, expected names of its tensors")
    both = sorted(drop & set(new))
    if both:
        raise BadInput(f"drop: {both} also in head_tensors, expected one or the other")
    strange = sorted(name for name in added if not is_head_name(name, config))
    if strange:
        prefix = family_of(config, source.path).first(decoder_config(config))
        raise BadInput(f"head_tensors: {strange} not in {source.path}, expected its names or {prefix}*")
    for name in new.keys() - set(added):
        shape = source[name].shape
        if new[name].shape != shape:
            raise BadInput(
                f"head_tensors: {name} is {list(new[name].shape)}, expected {list(shape)} as in {source.path}"
            )


def _check_claims(source_dir: Path, config: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Config and tensors must tell of the same MTP layers and the same lm_head. Returns the config to write."""
    decoder = decoder_config(config)
    if not (decoder.get("tie_word_embeddings") or config.get("tie_word_embeddings")) and "lm_head.weight" not in names:
        raise BadInput(
            f"{source_dir}: no lm_head.weight, expected one unless config.json sets tie_word_embeddings=true"
        )
    family = known_family(config)
    if family is None:
        if claimed_layers(config):
            family_of(config, source_dir)
        return config
    layers, claimed = family.layers(names, decoder), claimed_layers(config)
    if layers and not claimed:
        claimed = len(layers)
        config = _with_decoder(config, {family.count_key: claimed})
    if layers and family is MIMO:
        # By this name the engine finds the MTP layer; under Qwen2ForCausalLM it would not look for one.
        config = {**config, "architectures": [MIMO.architecture]}
    absent = sorted(set(range(claimed)) - layers)
    if absent:
        raise BadInput(
            f"{source_dir}: config.json claims {claimed} MTP layers ({family.count_key}), but layer {absent[0]} has "
            f"no tensor; give them in head_tensors or set the key to {len(layers)}"
        )
    if layers and family.projection(decoder) not in names:
        raise BadInput(f"{source_dir}: MTP layer 0 lacks {family.projection(decoder)}, expected a whole one")
    biases = family.zero_biases(names, decoder)
    if layers and biases:
        _check_biased(source_dir, decoder, [name for name in biases if name not in names])
    return config


def _check_biased(source_dir: Path, decoder: Mapping[str, Any], missing: list[str]) -> None:
    """What vLLM's MiMo class takes for granted of a decoder with q/k norms and without biases (Qwen3)."""
    width = decoder["num_attention_heads"] * (decoder.get("head_dim") or 0)
    if missing or not decoder.get("qk_norm") or width != decoder["hidden_size"]:
        raise BadInput(
            f"{source_dir}: {decoder['model_type']} in MiMo's layout with {len(missing)} biases missing {missing[:1]}, "
            f"qk_norm={decoder.get('qk_norm')}, num_attention_heads * head_dim = {width}; expected zero biases of q, k "
            f"and v, qk_norm=true and hidden_size={decoder['hidden_size']}"
        )


def _with_decoder(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with values in the part that describes the decoder."""
    if config.get("text_config"):
        return {**config, "text_config": {**config["text_config"], **values}}
    return {**config, **values}


def copy_other_files(source_dir: Path, part: Path, without: Iterable[str] = ()) -> list[str]:
    """Copy what is not weights (top level), tokenizer and card among them; weight files of other formats stay behind
    and are returned."""
    left_out = []
    for file in sorted(path for path in source_dir.iterdir() if path.is_file() and path.name not in without):
        if not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, part / file.name)  # without its rights: it may be read-only
        elif ".safetensors" not in file.name:
            left_out.append(file.name)
    return left_out


def digest(name: str, tensor: Tensor) -> bytes:
    """sha256 of a tensor's name, shape and values.

    Values enter as float32, so that a tensor and its exact float32 copy agree; a float32 tensor and its bfloat16
    rounding do not. Integer tensors enter as int64.
    """
    value = tensor.detach().cpu()
    value = value.to(torch.float32 if value.is_floating_point() else torch.int64).contiguous()
    found = hashlib.sha256(f"{name}{tuple(value.shape)}".encode())
    found.update(value.view(-1).view(torch.uint8).numpy() if value.numel() else b"")
    return found.digest()


def combined(digests: Mapping[str, bytes]) -> str:
    """16 hex digits of the digests of tensors, in name order: their checksum, in whatever order they were read."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()[:16]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits over names, shapes and values, see `digest`."""
    return combined({name: digest(name, tensors[name]) for name in tensors})


def checkpoint_checksums(path: Path) -> WeightChecksums:
    """Checksums of the backbone (every tensor outside the MTP layers) and of the heads of a policy directory."""
    tensors, config = Tensors(path), read_config(path)
    parts: tuple[dict[str, bytes], dict[str, bytes]] = {}, {}
    for name in tensors:
        parts[is_head_name(name, config)][name] = digest(name, tensors[name])
    return WeightChecksums(*map(combined, parts), len(parts[1]))
