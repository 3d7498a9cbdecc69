"""Converts a head's tensors between parameter names and checkpoint names.

A checkpoint has experts one by one (`experts.3.up_proj.weight`) or stacked (`experts.gate_up_proj`); transformers'
modules have them stacked. Each checkpoint is written in the form in which it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp.families import Family

EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
LEAVES = ("gate_proj", "up_proj", "down_proj")
FLOAT32 = ("e_score_correction_bias",)  # float32 whatever the checkpoint's dtype


def to_checkpoint(family: Family, config: Any, state: Mapping[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """A head's tensors under their checkpoint names. stacked: whether experts stay stacked. Shares memory."""
    table = list(family.parts.items())
    named = {family.first(config) + _renamed(name, table): tensor for name, tensor in state.items()}
    for bias in family.zero_biases(named, config):
        weight = named[f"{bias.removesuffix('bias')}weight"]
        named[bias] = weight.new_zeros(len(weight))
    return named if stacked else split_experts(named)


def split_experts(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with stacked experts as one tensor for each expert and matrix. Shares memory."""
    split: dict[str, Tensor] = {}
    for path, tensor in named.items():
        parent, _, leaf = path.rpartition(".")
        if not parent.endswith("experts"):
            split[path] = tensor
            continue
        for i, expert in enumerate(tensor):
            pieces = zip(LEAVES, expert.chunk(2), strict=False) if leaf == "gate_up_proj" else [(leaf, expert)]
            split |= {f"{parent}.{i}.{piece}.weight": value for piece, value in pieces}
    return split


def from_checkpoint(parts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_checkpoint`. tensors: by their names after the prefix, experts in either form.

    Raises ValueError if an expert has missing tensors.
    """
    back = sorted(((theirs, ours) for ours, theirs in parts.items()), reverse=True)  # "" last
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        path = _renamed(name, back)
        found = EXPERT.fullmatch(path)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            state[path] = tensor
    for path, ones in experts.items():
        count = 1 + max(number for number, _ in ones)
        absent = [f"{i}.{leaf}" for i in range(count) for leaf in LEAVES if (i, leaf) not in ones]
        if absent:
            raise BadInput(
                f"{path}: {count} experts lack {', '.join(absent[:4])}, expected every tensor of each expert"
            )
        pairs = [torch.cat([ones[i, "gate_proj"], ones[i, "up_proj"]]) for i in range(count)]
        state[f"{path}.gate_up_proj"] = torch.stack(pairs)
        state[f"{path}.down_proj"] = torch.stack([ones[i, "down_proj"] for i in range(count)])
    return state


def stacks_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors stacks its experts."""
    return any(name.endswith("experts.gate_up_proj") for name in names)


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in `dtype`, except those that every checkpoint has in float32."""
    return {name: tensor.to(torch.float32 if name.endswith(FLOAT32) else dtype) for name, tensor in tensors.items()}


def _renamed(name: str, table: Iterable[tuple[str, str]]) -> str:
    """`name` with its leading part replaced by the first row that matches. "" matches every name."""
    for old, new in table:
        if not old or name.startswith(old + "."):
            rest = name.removeprefix(old + ".") if old else name
            return f"{new}.{rest}" if new else rest
    return name
