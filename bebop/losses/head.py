"""One function for every training loss of the heads. Method: Bebop section 4, arXiv 2602.23881.

Shapes: K depths, N anchors, M backbone positions, D width, V vocabulary. The backbone's hidden states and the
vocabulary matrix are constants: only draft_hidden gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from bebop_kernels import Rows, linear_rows, linear_tv_overlap
from torch import Tensor

from bebop.errors import BadInput
from bebop.losses.registry import LOSSES, RowLoss, RowResult


def head_loss(
    name: str,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    tau_max: float | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Mean loss over anchors, and alpha per depth and anchor.

    name: a name in LOSSES. draft_hidden [K, N, D] with gradient; target_hidden [M, D]; weight [V, D]; target_index long
    [K, N], rows of target_hidden; labels long [K, N], the text's tokens, for losses that read them. tau_max: upper
    limit of each anchor's loss, for losses in [0, 1] (tv, e2e_tv); the gradient is 0 beyond it. Returns (scalar, alpha
    [K, N] detached float32).
    impl: as in linear_tv_overlap, for losses of the overlap. The others have only the reference, and raise ValueError
    for another impl. Without anchors the loss is 0, with a zero gradient. Raises ValueError, which names the argument;
    for an unknown name it lists the known ones.
    """
    loss = LOSSES[name]
    target_hidden, weight = target_hidden.detach(), weight.detach()
    if loss.of_overlap is not None:
        alpha = linear_tv_overlap(draft_hidden, target_hidden, weight, target_index, temperature=temperature, impl=impl)
        per_anchor = loss.of_overlap(alpha)
    elif loss.of_rows is not None:
        if impl not in ("auto", "reference"):
            raise BadInput(f"impl: got {impl!r}, expected auto or reference: the loss {name} has no kernel")
        if loss.reads_labels:
            _check_labels(labels, target_index, weight.shape[0])
        row_function = _with_labels(loss.of_rows, labels)
        per_depth, alpha = linear_rows(
            draft_hidden, target_hidden, weight, target_index, row_function, temperature=temperature
        )
        per_anchor = per_depth.mean(0)
    if tau_max is not None and loss.total_variation:
        per_anchor = per_anchor.clamp(max=tau_max)
    mean = per_anchor.mean() if per_anchor.numel() else draft_hidden.float().sum() * 0
    return mean, alpha.detach().float()


def _with_labels(of_rows: RowLoss, labels: Tensor) -> Callable[[Rows, Rows, Tensor, int, slice, bool], RowResult]:
    """The loss as a row function of bebop_kernels.linear_rows, which knows a row by its depth and anchor."""

    def rows(draft: Rows, target: Rows, index: Tensor, depth: int, anchors: slice, want_grad: bool) -> RowResult:
        return of_rows(draft, target, index, labels[depth, anchors], want_grad)

    return rows


def _check_labels(labels: Tensor, target_index: Tensor, vocab_size: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != target_index.shape:
        raise BadInput(f"labels: {labels.dtype} {list(labels.shape)}, expected torch.int64 {list(target_index.shape)}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= vocab_size):
        raise BadInput(
            f"labels: values {int(labels.min())}..{int(labels.max())}, expected token ids in [0, {vocab_size}); "
            "drop anchors of which any depth has no label (-100)"
        )
