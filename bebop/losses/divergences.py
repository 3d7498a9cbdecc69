"""Losses that need more than alpha, as functions of one draft row and one target row: value, alpha and gradient.

| loss       | value                                            | gradient on the scaled draft logits           |
|------------|--------------------------------------------------|-----------------------------------------------|
| hard_ce    | -ln q(label)                                     | q - onehot(label)                             |
| kl         | KL(p || q) = sum p ln(p / q)                     | q - p                                         |
| reverse_kl | KL(q || p) = sum q ln(q / p)                     | q (ln(q / p) - KL(q || p))                    |
| lk_hybrid  | l KL(p || q) + (1 - l) TV, l = exp(-3 sg(alpha)) | l (q - p) + (1 - l) (TV's), arXiv 2602.23881  |

p, q: target and draft at the temperature; sg: without gradient. `head_loss` runs them through
`bebop_kernels.linear_rows`, which owns the chunking and never keeps a [rows, V] tensor of all rows.
"""

from __future__ import annotations

import torch
from bebop_kernels import Rows, overlap_rows
from torch import Tensor

from bebop.losses.registry import LOSSES, HeadLoss, RowResult

# Used as ln p where p = 0 (filtered tokens): reverse KL would be infinite; with this floor it is large but finite.
MIN_LOGPROB = -70.0


def _log(rows: Rows) -> Tensor:
    logprobs: Tensor = rows.logprobs
    return logprobs.clamp_(min=MIN_LOGPROB)


def hard_ce(draft: Rows, target: Rows, index: Tensor, labels: Tensor, want_grad: bool) -> RowResult:
    label = labels[:, None]
    alpha, _ = overlap_rows(draft, target.probs[index], False)
    value = -_log(draft).gather(1, label).squeeze(1)
    if not want_grad:
        return value, alpha, None
    return value, alpha, draft.probs.scatter_add(1, label, -torch.ones_like(draft.probs[:, :1]))


def kl(draft: Rows, target: Rows, index: Tensor, labels: Tensor, want_grad: bool) -> RowResult:
    p = target.probs[index]
    alpha, _ = overlap_rows(draft, p, False)
    value = (p * (_log(target)[index] - _log(draft))).sum(-1)
    return value, alpha, draft.probs - p if want_grad else None


def reverse_kl(draft: Rows, target: Rows, index: Tensor, labels: Tensor, want_grad: bool) -> RowResult:
    q = draft.probs
    alpha, _ = overlap_rows(draft, target.probs[index], False)
    ratio = _log(draft) - _log(target)[index]
    value = (q * ratio).sum(-1)
    return value, alpha, q * (ratio - value[:, None]) if want_grad else None


def lk_hybrid(draft: Rows, target: Rows, index: Tensor, labels: Tensor, want_grad: bool) -> RowResult:
    p = target.probs[index]
    alpha, overlap_grad = overlap_rows(draft, p, want_grad)
    share = (-3 * alpha).exp()
    divergence = (p * (_log(target)[index] - _log(draft))).sum(-1)
    value = share * divergence + (1 - share) * (1 - alpha)
    if overlap_grad is None:
        return value, alpha, None
    return value, alpha, share[:, None] * (draft.probs - p) - (1 - share)[:, None] * overlap_grad


LOSSES.register("hard_ce", HeadLoss(of_rows=hard_ce, reads_labels=True))
LOSSES.register("kl", HeadLoss(of_rows=kl))
LOSSES.register("reverse_kl", HeadLoss(of_rows=reverse_kl))
LOSSES.register("lk_hybrid", HeadLoss(of_rows=lk_hybrid))
