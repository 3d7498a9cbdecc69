"""A policy directory as an input of something that is cached: all of it that decides what the policy says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.mtp.checkpoint import WEIGHT_SUFFIXES, checkpoint_checksums, read_config
from bebop.mtp.families import COUNT_KEYS, decoder_config
from bebop.store.caches import Content

NOT_READ = (*WEIGHT_SUFFIXES, "bebop.json", ".md", ".gitattributes", "LICENSE")


@dataclass(frozen=True)
class PolicyContent:
    """Tensors, config.json, and every other file that is read: tokenizer, chat template, end-of-text ids.

    heads: whether its MTP heads count, or only what it samples without them.
    """

    path: Path
    heads: bool = False

    def made_from(self) -> dict[str, Any]:
        sums, config = checkpoint_checksums(self.path), read_config(self.path)
        files = Content(self.path, skip=NOT_READ).made_from()
        if not self.heads:
            decoder = {key: value for key, value in decoder_config(config).items() if key not in COUNT_KEYS}
            outside = {key: value for key, value in config.items() if key not in COUNT_KEYS}
            config = {**outside, "text_config": decoder} if config.get("text_config") else decoder
        return {
            "backbone": sums.backbone,
            "heads": sums.heads if self.heads else None,
            **files,
            "config.json": config,
        }
