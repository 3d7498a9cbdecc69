"""Prompts, tasks with verifiable rewards, tokenization; packing and the labels of every draft depth."""

from bebop.data.labels import IGNORE, mtp_labels
from bebop.data.packing import PackedBatch, TokenSequence, anchor_labels, anchors, pack, target_index
from bebop.data.prompts import make_prompts
from bebop.data.tasks import score
from bebop.data.tokenizer import encode_prompt, load_tokenizer

__all__ = [
    "IGNORE",
    "PackedBatch",
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
