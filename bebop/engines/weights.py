"""Weight updates of an engine: which tensors may be replaced, and digests of them. No engine is imported here."""

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

WHOLE_UP_TO = 50_000_000  # parameters; the digest of a larger backbone covers only a sample of every tensor
SAMPLE = 4096  # elements in the sample of a tensor
CHUNK = 1 << 22  # elements of a parameter that are added up at once


class Layout:
    """The tensors of a policy directory by name: shapes, dtypes, and which of them are heads.

    `copies` are copies of the policy's own embedding and output matrix, which some families have among their heads. No
    engine serves them, and an engine that loads them after the backbone overwrites the policy's own.
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
    """Digests of a policy's tensors, computed by sender and receiver, who must get equal ones.

    The digest covers whole heads, and a whole backbone of at most WHOLE_UP_TO parameters. Of each tensor of a larger
    backbone it covers SAMPLE elements, drawn by the tensor's name, and the checksum says so. sampled: overrides the
    rule.
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
        """Checksums of the added tensors; comparable with `bebop.mtp.checkpoint_checksums` if not sampled."""
        heads = {name: found for name, found in self.found.items() if self.layout.is_head(name)}
        backbone = combined({name: found for name, found in self.found.items() if name not in heads})
        return WeightChecksums(f"sampled-{backbone}" if self.samples else backbone, combined(heads), len(heads))


def sample(name: str, tensor: Tensor) -> Tensor:
    """SAMPLE elements of a tensor, always the same for a name; all elements of a small tensor."""
    if tensor.numel() <= SAMPLE:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    where = torch.randint(tensor.numel(), (SAMPLE,), generator=generator)
    return tensor.detach().reshape(-1)[where.to(tensor.device)]


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number that changes if any bit of the tensors changes: a weighted sum of their bits, on their device."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        for chunk in words.split(CHUNK):
            factors = torch.arange(1, 2 * len(chunk), 2, device=chunk.device)
            total = (total * 1_000_003 + int((chunk.long() * factors).sum())) % 2**63
    return total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_update(tensors: Mapping[str, Tensor], held: Mapping[str, Any], is_head: Callable[[str], bool]) -> None:
    """Raise ValueError unless the engine can load every tensor. held: name -> shape of each of its tensors."""
    heads = [name for name in tensors if is_head(name)]
    known = sum(name in held for name in heads)
    if known < len(heads):
        raise BadInput(
            f"heads: got {len(heads)} tensors, of which the engine has {known} (it has {sum(map(is_head, held))} in "
            "all); set rollout.speculation=mtp, and use the checkpoint's names"
        )
    for name, tensor in tensors.items():
        if name not in held:
            raise BadInput(f"{name}: the engine has no tensor of this name; use the checkpoint's names")
        if tuple(tensor.shape) != tuple(held[name]):
            raise BadInput(f"{name}: got shape {list(tensor.shape)}, expected {list(held[name])} as in the engine")
        check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a tensor has a NaN or an infinity."""
    if not torch.isfinite(tensor).all():
        raise BadInput(f"{name}: got a NaN or an infinity, expected finite weights; nothing was updated")


def replace_tensors(
    views: dict[str, Tensor],
    tensors: dict[str, Tensor],
    *,
    is_head: Callable[[str], bool],
    unread: Mapping[str, Any] | None = None,
) -> None:
    """Copy `tensors` into the views of the same names. Raises ValueError before anything is copied.

    unread: name -> shape of tensors that an update may bring and no view shows.
    """
    check_update(tensors, {name: view.shape for name, view in views.items()} | dict(unread or {}), is_head)
    with torch.no_grad():
        for name in tensors.keys() & views.keys():
            views[name].copy_(tensors[name])
