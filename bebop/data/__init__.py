"""Prompts, tasks with verifiable rewards, tokenization; packing and the labels of every draft depth.

Names are imported on demand, because a verifier's process needs the tasks but not torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.data.labels import IGNORE, mtp_labels
    from bebop.data.packing import PackedBatch, TokenSequence, anchor_labels, anchors, pack, target_index
    from bebop.data.prompts import make_prompts
    from bebop.data.tasks import TASKS, TaskSource, score
    from bebop.data.tokenizer import encode_prompt, load_tokenizer

_MODULES = {
    "labels": ("IGNORE", "mtp_labels"),
    "packing": ("PackedBatch", "TokenSequence", "anchor_labels", "anchors", "pack", "target_index"),
    "prompts": ("make_prompts",),
    "tasks": ("TASKS", "TaskSource", "score"),
    "tokenizer": ("encode_prompt", "load_tokenizer"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "IGNORE",
    "TASKS",
    "PackedBatch",
    "TaskSource",
    "TokenSequence",
    "anchor_labels",
    "anchors",
    "encode_prompt",
    "load_tokenizer",
    "make_prompts",
    "mtp_labels",
    "pack",
    "score",
    "target_index",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"bebop.data.{_HOME[name]}"), name)
