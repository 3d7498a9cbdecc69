"""Packing of token sequences into batches without padding, and the anchors of a batch.

Anchor t, depth k = 1..K: the head reads the hidden state of depth k-1 and token t+k, predicts token t+k+1, and is
compared with the backbone's distribution at position t+k. Horizon rule: t is an anchor only if tokens t+1..t+K+1 are
all supervised and in its document. Token t+1 must be supervised too, because an engine drafts after a token that it
sampled, never inside a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bebop.data.labels import IGNORE, mtp_labels
from bebop.errors import BadInput


class TokenSequence(NamedTuple):
    """One document: token ids, and 1 where a token is supervised (the policy's own response)."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end. T tokens, B documents."""

    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [B+1] int64, from 0 to T
    position_ids: Tensor  # [T] int64, from 0 in each document

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def pack(sequences: Iterable[tuple[Sequence[int], Sequence[int]]], max_tokens: int) -> list[PackedBatch]:
    """Fill batches of at most `max_tokens` tokens with whole sequences, in the order given.

    sequences: (input_ids, loss_mask) pairs of equal length; empty ones are left out. Raises ValueError for a sequence
    longer than max_tokens, for a mask of another length, and if no sequence has a supervised token.
    """
    batches: list[PackedBatch] = []
    open_batch: list[tuple[Sequence[int], Sequence[int]]] = []
    used, num_sequences, num_supervised = 0, 0, 0
    for index, (ids, mask) in enumerate(sequences):
        if len(ids) != len(mask):
            raise BadInput(f"sequences: number {index} has {len(ids)} ids and a loss mask of {len(mask)}")
        if len(ids) > max_tokens:
            raise BadInput(
                f"sequences: number {index} has {len(ids)} tokens, more than max_tokens={max_tokens}; "
                "raise sft.batch_tokens, or lower data.max_response_tokens (rollout.max_model_len where text is given)"
            )
        num_sequences += 1
        num_supervised += int(sum(map(bool, mask)))
        if not len(ids):
            continue
        if used + len(ids) > max_tokens:
            batches.append(_batch(open_batch))
            open_batch, used = [], 0
        open_batch.append((ids, mask))
        used += len(ids)
    if open_batch:
        batches.append(_batch(open_batch))
    if not num_supervised:
        raise BadInput(
            f"sequences: no supervised token in {num_sequences} sequences, nothing to train on; "
            "check that the chat template marks the assistant's turn and that responses are not cut off"
        )
    return batches


def anchors(batch: PackedBatch, depth: int) -> Tensor:
    """long [N]: anchors of a batch by the horizon rule, for drafts of `depth` (at least 1) tokens."""
    _check_depth(depth)
    whole = torch.ones_like(batch.loss_mask)
    for d in range(depth + 1):
        whole &= mtp_labels(batch.input_ids, batch.loss_mask, batch.cu_seqlens, d) != IGNORE
    return whole.nonzero().squeeze(1)


def target_index(anchor_positions: Tensor, depth: int) -> Tensor:
    """long [K, N]: position t+k, whose backbone distribution is the target of depth k at anchor t."""
    _check_depth(depth)
    return anchor_positions + torch.arange(1, depth + 1, device=anchor_positions.device)[:, None]


def anchor_labels(batch: PackedBatch, anchor_positions: Tensor, depth: int) -> Tensor:
    """long [K, N]: the text's token t+k+1 that depth k predicts at anchor t."""
    return batch.input_ids[target_index(anchor_positions, depth) + 1]


def _check_depth(depth: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise BadInput(f"depth={depth!r}: expected an integer of at least 1")


def _batch(sequences: list[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    return PackedBatch(
        input_ids=torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids, _ in sequences]),
        loss_mask=torch.cat([torch.as_tensor(mask).bool() for _, mask in sequences]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        position_ids=torch.cat([torch.arange(int(length)) for length in lengths]),
    )
