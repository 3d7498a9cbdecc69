"""Labels of next-token and draft predictions on packed text, with the loss mask shifted in the same way.

Position t at depth d predicts token t + d + 1: d = 0 is the backbone's own next token, d = 1..K are the drafts. A
label is -100 where that token is masked out or belongs to another document.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bebop.errors import BadInput

IGNORE = -100


def mtp_labels(input_ids: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, depth: int) -> Tensor:
    """Labels of one depth.

    input_ids [T] integer; loss_mask [T] bool or 0/1, which tokens are supervised; cu_seqlens [B+1] integer, document
    boundaries from 0 to T. Returns labels [T] int64, -100 without a label. Raises ValueError, which names the argument.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise BadInput(f"depth={depth!r}: expected an integer of at least 0 (0 is the next token)")
    check_packed(input_ids, cu_seqlens)
    total = input_ids.shape[0]
    if loss_mask.shape != input_ids.shape:
        raise BadInput(f"loss_mask: shape {list(loss_mask.shape)}, expected input_ids' {list(input_ids.shape)}")
    predicted = torch.arange(total, device=input_ids.device) + depth + 1
    inside = predicted < document_ends(cu_seqlens)
    predicted = predicted.clamp(max=total - 1)
    supervised = inside & loss_mask.bool()[predicted]
    return torch.where(supervised, input_ids.long()[predicted], IGNORE)


def document_ends(cu_seqlens: Tensor) -> Tensor:
    """[T]: for each position, the end (exclusive) of its document."""
    return cu_seqlens[1:].long().repeat_interleave(cu_seqlens.diff().long())


def check_packed(input_ids: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless input_ids is [T], T at least 1, and cu_seqlens rises from 0 to T."""
    if input_ids.dim() != 1 or input_ids.is_floating_point() or not input_ids.shape[0]:
        raise BadInput(f"input_ids: {input_ids.dtype} {list(input_ids.shape)}, expected integers [T] with T at least 1")
    bounds = cu_seqlens.tolist()
    rising = len(bounds) >= 2 and all(a < b for a, b in pairwise(bounds))
    if not rising or bounds[0] != 0 or bounds[-1] != input_ids.shape[0]:
        raise BadInput(f"cu_seqlens: {bounds}, expected rising from 0 to T={input_ids.shape[0]}")
