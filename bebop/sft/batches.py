"""Training batches: packed sequences with the backbone's hidden states beside them.

The backbone is frozen, so the hidden states of small data are computed once and kept in memory; of large data, with
each batch. Which of the two depends on the data's size alone, and a sequence's states on nothing but the data and the
policy: a resumed run sees the same bits.

Shapes: T tokens of a packed batch, B documents, N anchors, K depths, D width.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.backbone import Backbone
from bebop.data.distill import TextRow
from bebop.data.packing import PackedBatch, anchor_labels, anchors, pack, target_index

log = logging.getLogger(__name__)
CACHE_LIMIT_BYTES = 2 << 30  # hidden states kept in memory, per process


@dataclass(frozen=True)
class IndexedBatch:
    """A packed batch, the sequences it is made of and its anchors; no hidden states yet."""

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


def trainable(rows: Sequence[TextRow], depth: int, name: str) -> list[TextRow]:
    """Rows that have an anchor: depth + 1 supervised tokens in a row after the first token (the horizon rule).

    Raises ValueError where none has. `name` says which rows they are.
    """
    kept = [row for row in rows if _longest_run(row.loss_mask[1:]) > depth]
    if not kept:
        raise ValueError(
            f"{name}: 0 of {len(rows)} sequences have the {depth + 1} supervised tokens in a row that depth {depth} "
            "needs; lower sft.depth or raise data.max_response_tokens"
        )
    if len(kept) < len(rows):
        short = len(rows) - len(kept)
        log.info("%s: %d of %d sequences are shorter than the draft's horizon and left out", name, short, len(rows))
    return kept


def _longest_run(mask: Sequence[int]) -> int:
    longest = run = 0
    for value in mask:
        run = run + 1 if value else 0
        longest = max(longest, run)
    return longest


def pack_rows(rows: Sequence[TextRow], order: Sequence[int], max_tokens: int, depth: int) -> list[IndexedBatch]:
    """Pack the rows in the given order. Every batch has an anchor where every row is `trainable` at this depth."""
    batches, start = [], 0
    for packed in pack([(rows[i].input_ids, rows[i].loss_mask) for i in order], max_tokens):
        documents = len(packed.cu_seqlens) - 1
        where = anchors(packed, depth)
        batches.append(IndexedBatch(packed, tuple(order[start : start + documents]), where, target_index(where, depth)))
        start += documents
    return batches


class HiddenStates:
    """The backbone's hidden states of a set of rows, kept in memory where they fit."""

    def __init__(self, backbone: Backbone, rows: Sequence[TextRow], max_tokens: int, *, name: str) -> None:
        self._backbone, self._device = backbone, backbone.embed_weight.device
        self._cache: list[Tensor] | None = None
        num_tokens = sum(len(row.input_ids) for row in rows)
        size = num_tokens * backbone.embed_weight.shape[1] * 4
        if size > CACHE_LIMIT_BYTES:
            log.info("%s: hidden states would take %.1f GiB; the backbone runs with every batch", name, size / 2**30)
            return
        log.info("%s: hidden states of %d tokens are kept in memory, %.1f MiB", name, num_tokens, size / 2**20)
        self._cache = []
        for batch in pack_rows(rows, range(len(rows)), max_tokens, depth=1):
            hidden = self._compute(batch).cpu()
            bounds = batch.packed.cu_seqlens.tolist()
            self._cache += [hidden[a:b].clone() for a, b in itertools.pairwise(bounds)]

    def batch(self, indexed: IndexedBatch) -> TrainBatch:
        """The batch with its hidden states, on the backbone's device."""
        packed = indexed.packed
        if self._cache is None:
            hidden = self._compute(indexed)
        else:
            hidden = torch.cat([self._cache[i] for i in indexed.sequences]).to(self._device)
        return TrainBatch(
            hidden=hidden,
            input_ids=packed.input_ids.to(self._device),
            cu_seqlens=packed.cu_seqlens.to(self._device),
            position_ids=packed.position_ids.to(self._device),
            anchors=indexed.anchors.to(self._device),
            target_index=indexed.target_index.to(self._device),
            labels=anchor_labels(packed, indexed.anchors, len(indexed.target_index)).to(self._device),
        )

    @torch.no_grad()
    def _compute(self, indexed: IndexedBatch) -> Tensor:
        packed, device = indexed.packed, self._device
        hidden = self._backbone.hidden(
            packed.input_ids.to(device), packed.position_ids.to(device), packed.cu_seqlens.to(device)
        )
        return hidden.float()
