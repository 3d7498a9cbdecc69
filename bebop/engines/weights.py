"""Weights on their way into an engine: what may be replaced, and digests of what passed. No engine is imported here."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp.checkpoint import combined, digest, read_config, tensor_facts
from bebop.mtp.families import decoder_config, known_family
from bebop.records import WeightChecksums

WHOLE_UP_TO = 50_000_000  # parameters of a backbone that is digested whole; of a larger one a sample of every tensor
SAMPLE = 4096  # elements of a tensor of it
CHUNK = 1 << 22  # elements of a parameter that are added up at once


class Layout:
    """The tensors of a policy directory by name: shapes, dtypes, and which of them are heads.

    `copies` are the policy's own embedding and output matrix over again, which some families have among their heads:
    no engine serves them, and one that loads them after the backbone overwrites what it serves.
    """

    def __init__(self, policy_dir: Path) -> None:
        self.path = Path(policy_dir)
        facts = tensor_facts(self.path)
        self.shapes = {name: shape for name, (shape, _) in facts.items()}
        self.dtypes = {name: dtype for name, (_, dtype) in facts.items()}
        config = read_config(self.path)
        self._family, self._decoder = known_family(config), decoder_config(config)
        self.heads = {name for name in self.shapes if self.is_head(name)}
        self.copies = {name for name in self.heads if name.endswith(self._family.shared)} if self._family else set()

    def is_head(self, name: str) -> bool:
        return self._family is not None and self._family.is_head(name, self._decoder)

    @property
    def num_backbone_parameters(self) -> int:
        return sum(prod(shape) for name, shape in self.shapes.items() if name not in self.heads)


class Digests:
    """Digests of a policy's tensors as they pass: at a sender and at a receiver they must come out equal.

    Heads are digested whole, and so is a backbone of at most WHOLE_UP_TO parameters; of a larger one each tensor's
    SAMPLE elements, drawn by its name, and its checksum says so. sampled: in place of that rule.
    """

    def __init__(self, layout: Layout, *, sampled: bool | None = None) -> None:
        self.layout = layout
        self.samples = layout.num_backbone_parameters > WHOLE_UP_TO if sampled is None else sampled
        self.found: dict[str, bytes] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        if self.samples and not self.layout.is_head(name):
            tensor = sample(name, tensor)
        self.found[name] = digest(name, tensor)

    def checksums(self) -> WeightChecksums:
        """Of what was noted; comparable with `bebop.mtp.checkpoint_checksums` where nothing was sampled."""
        heads = {name: found for name, found in self.found.items() if self.layout.is_head(name)}
        backbone = combined({name: found for name, found in self.found.items() if name not in heads})
        return WeightChecksums(f"sampled-{backbone}" if self.samples else backbone, combined(heads), len(heads))


def sample(name: str, tensor: Tensor) -> Tensor:
    """SAMPLE elements of a tensor, always the same ones of a name; a small tensor as it is."""
    if tensor.numel() <= SAMPLE:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    where = torch.randint(tensor.numel(), (SAMPLE,), generator=generator)
    return tensor.detach().reshape(-1)[where.to(tensor.device)]


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number that tells whether any bit of the tensors changed; their bits added up with weights, on their device."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        for chunk in words.split(CHUNK):
            factors = torch.arange(1, 2 * len(chunk), 2, device=chunk.device)
            total = (total * 1_000_003 + int((chunk.long() * factors).sum())) % 2**63
    return total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_update(tensors: Mapping[str, Tensor], held: Mapping[str, Any], is_head: Callable[[str], bool]) -> None:
    """Raise ValueError unless the engine can take every tensor. held: name -> shape of each tensor that it holds."""
    heads = [name for name in tensors if is_head(name)]
    known = sum(name in held for name in heads)
    if known < len(heads):
        raise BadInput(
            f"{known} of {len(heads)} head tensors can be loaded: the engine holds {sum(map(is_head, held))}; "
            "heads need rollout.speculation=mtp and the checkpoint's own names"
        )
    for name, tensor in tensors.items():
        if name not in held:
            raise BadInput(f"{name}: the engine holds no tensor of this name")
        if tuple(tensor.shape) != tuple(held[name]):
            raise BadInput(f"{name} has shape {list(tensor.shape)}, the engine holds {list(held[name])}")
        check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError where a tensor holds a NaN or an infinity."""
    if not torch.isfinite(tensor).all():
        raise BadInput(f"{name} holds values that are not finite; the update was refused")


def replace_tensors(views: dict[str, Tensor], tensors: dict[str, Tensor], *, is_head: Callable[[str], bool]) -> None:
    """Copy `tensors` into the views of the same names. Raises ValueError before anything is copied."""
    check_update(tensors, {name: view.shape for name, view in views.items()}, is_head)
    with torch.no_grad():
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
