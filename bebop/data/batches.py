"""Training batches: packed sequences, their anchors, and the backbone's hidden states.

Shapes: T tokens of a packed batch, B documents, N anchors, K depths, D width.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bebop.data.packing import PackedBatch, anchor_labels, anchors, pack, target_index
from bebop.data.self_distill import TextRow
from bebop.errors import BadInput

log = logging.getLogger(__name__)
TOO_SHORT = "sequence shorter than the draft's horizon"


@dataclass(frozen=True)
class IndexedBatch:
    """A packed batch with its sequences and anchors, but without hidden states."""

    packed: PackedBatch
    sequences: tuple[int, ...]  # [B] index of each document's sequence
    anchors: Tensor  # long [N]
    target_index: Tensor  # long [K,N], the position whose next-token distribution is depth k's target

    @property
    def num_anchors(self) -> int:
        return self.anchors.numel()


@dataclass(frozen=True)
class TrainBatch:
    """What the heads' loss needs, on the training device."""

    hidden: Tensor  # float32 [T,D], after the final norm
    input_ids: Tensor  # long [T]
    cu_seqlens: Tensor  # int [B+1]
    position_ids: Tensor  # long [T]
    anchors: Tensor  # long [N]
    target_index: Tensor  # long [K,N]
    labels: Tensor  # long [K,N], the token that depth k predicts


def trainable(rows: Sequence[TextRow], depth: int, name: str, left_out: Counter[str] | None = None) -> list[TextRow]:
    """Rows with an anchor: depth + 1 consecutive supervised tokens after the first token (the horizon rule).

    Rows without one are counted in `left_out`. Raises ValueError if no row has one; `name` names the rows in messages.
    """
    kept = [row for row in rows if _longest_run(row.loss_mask[1:]) > depth]
    if not kept:
        given = any(row.logprobs is None for row in rows)
        hint = "give longer text or raise rollout.max_model_len" if given else "raise data.max_response_tokens"
        raise BadInput(
            f"{name}: 0 of {len(rows)} sequences have the {depth + 1} supervised tokens in a row that depth {depth} "
            f"needs; lower sft.depth, or {hint}"
        )
    if len(kept) < len(rows):
        short = len(rows) - len(kept)
        log.info("%s: %d of %d sequences are shorter than the draft's horizon and left out", name, short, len(rows))
        if left_out is not None:
            left_out[TOO_SHORT] += short
    return kept


def _longest_run(mask: Sequence[int]) -> int:
    longest = run = 0
    for value in mask:
        run = run + 1 if value else 0
        longest = max(longest, run)
    return longest


def pack_rows(rows: Sequence[TextRow], order: Sequence[int], max_tokens: int, depth: int) -> list[IndexedBatch]:
    """Pack the rows in the given order. If every row is `trainable` at this depth, every batch has an anchor."""
    batches, start = [], 0
    for packed in pack([(rows[i].input_ids, rows[i].loss_mask) for i in order], max_tokens):
        documents = len(packed.cu_seqlens) - 1
        where = anchors(packed, depth)
        batches.append(IndexedBatch(packed, tuple(order[start : start + documents]), where, target_index(where, depth)))
        start += documents
    return batches


def train_batch(indexed: IndexedBatch, hidden: Tensor) -> TrainBatch:
    """The batch with its hidden states [T,D], on their device."""
    packed, device = indexed.packed, hidden.device
    return TrainBatch(
        hidden=hidden,
        input_ids=packed.input_ids.to(device),
        cu_seqlens=packed.cu_seqlens.to(device),
        position_ids=packed.position_ids.to(device),
        anchors=indexed.anchors.to(device),
        target_index=indexed.target_index.to(device),
        labels=anchor_labels(packed, indexed.anchors, len(indexed.target_index)).to(device),
    )
