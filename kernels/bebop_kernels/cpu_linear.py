"""linear_tv_overlap on CPUs: one matrix product for all depths of a chunk, then compiled loops over its rows.

A chunk's target probabilities are made once for its K depths; the gradient of a row overwrites its logits while they
are in cache and goes into the next product from there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bebop_kernels import cpu_overlap, cpu_threads
from bebop_kernels.cpu_threads import fresh, in_blocks, rows_of
from bebop_kernels.rows import check_range, check_sums
from bebop_kernels.tensor_parallel import all_sum, gather

unavailable = cpu_threads.unavailable
# Elements of a chunk's draft logits, all depths: larger chunks read the weight less often.
CHUNK_ELEMENTS = 1 << 25
MIN_CHUNK_ROWS = 64


def forward(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: Any,
    want_row_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    alpha = torch.empty(draft_hidden.shape[:2])
    row_grad = torch.empty_like(draft_hidden) if want_row_grad else None

    def use(anchors: slice, hidden: Tensor, chunk_alpha: Tensor, grad: Tensor) -> None:
        alpha[:, anchors] = chunk_alpha
        if row_grad is not None:
            row_grad[:, anchors] = (grad @ weight).view_as(row_grad[:, anchors])

    inputs = draft_hidden, target_hidden, weight, target_index
    _sweep(*inputs, temperature, group, torch.full_like(alpha, 1 / temperature), want_row_grad, use)
    return alpha, None if row_grad is None else all_sum(row_grad, group)


def backward(
    grad_alpha: Tensor,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    temperature: float,
    group: Any,
) -> tuple[Tensor, Tensor]:
    grad_draft = torch.empty_like(draft_hidden)
    grad_weight = torch.zeros_like(weight)

    def use(anchors: slice, hidden: Tensor, chunk_alpha: Tensor, grad: Tensor) -> None:
        grad_draft[:, anchors] = (grad @ weight).view_as(grad_draft[:, anchors])
        grad_weight.addmm_(grad.T, hidden)

    inputs = draft_hidden, target_hidden, weight, target_index
    _sweep(*inputs, temperature, group, grad_alpha.float() / temperature, True, use)
    return all_sum(grad_draft, group), grad_weight


def _sweep(draft_hidden, target_hidden, weight, target_index, temperature, group, scale, want_grad, use) -> None:
    """use(anchors, hidden [K C, D], alpha [K, C], scale times the gradient of alpha on the scaled logits [K C, V])."""
    check_range("target_index", target_index, target_hidden.shape[0], "rows of target_hidden")
    depths, num_anchors, width = draft_hidden.shape
    widest = int(gather(torch.tensor([weight.shape[0]]), group).max())
    step = max(1, max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // max(widest, 1)) // max(depths, 1))
    scratch = Scratch()
    of_rows = functools.partial(_whole_rows, scratch) if group is None else functools.partial(_shards, group=group)
    for a in range(0, num_anchors, step):
        anchors = slice(a, min(a + step, num_anchors))
        needed, index = target_index[:, anchors].unique(return_inverse=True)
        target = scratch.product("target", target_hidden[needed], weight)
        hidden = draft_hidden[:, anchors].reshape(-1, width)
        draft = scratch.product("draft", hidden, weight)
        factor = scale[:, anchors].reshape(-1)
        alpha, grad = of_rows(draft, target, index.reshape(-1), factor, temperature, want_grad)
        use(anchors, hidden, alpha.view(depths, -1), None if grad is None else grad.to(weight.dtype))


class Scratch:
    """Buffers that chunks share: fresh memory costs a page fault for every 4 KiB, as much as the loops over it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns], whatever is in it; what was taken under this name before is gone."""
        held = self._held.get(name)
        if held is None or held.numel() < rows * columns:
            held = self._held[name] = fresh((rows * columns,), dtype)
        return held[: rows * columns].view(rows, columns)

    def product(self, name: str, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits hidden W^T."""
        return torch.mm(hidden, weight.T, out=self.take(name, len(hidden), len(weight), weight.dtype))


def _whole_rows(
    scratch: Scratch, draft: Tensor, target: Tensor, index: Tensor, factor: Tensor, temperature: float, want_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """alpha [R] of draft [R, V] against target[index], and its gradient times factor [R], written over the draft."""
    from bebop_kernels import cpu_loops

    parts = cpu_loops.scale_parts(temperature)
    vocab_size = draft.shape[1]
    probs, target_inverse = scratch.take("probs", *target.shape, torch.float32), torch.empty(len(target))
    alpha, draft_inverse = torch.empty(len(draft)), torch.empty(len(draft))
    draft = draft if draft.dtype in (torch.float32, torch.bfloat16) else draft.float()
    rows, target_rows, judged, scale = rows_of(draft), rows_of(target), index.numpy(), factor.numpy()

    def of_target(block: slice) -> None:
        cpu_loops.probabilities(target_rows[block], *parts, probs[block].numpy(), target_inverse[block].numpy())

    def of_draft(block: slice) -> None:
        found = alpha[block].numpy(), draft_inverse[block].numpy()
        cpu_loops.linear_overlap(rows[block], probs.numpy(), judged[block], *parts, scale[block], want_grad, *found)

    in_blocks(len(target), vocab_size, of_target)
    check_sums("target_hidden", target_inverse)
    in_blocks(len(draft), vocab_size, of_draft)
    check_sums("draft_hidden", draft_inverse)
    return alpha.clamp_(max=1), draft if want_grad else None


def _shards(draft: Tensor, target: Tensor, index: Tensor, factor: Tensor, temperature: float, want_grad: bool, group):
    """The same of one rank's columns; the ranks exchange their sums as in tv_overlap."""
    pair = draft, target[index]
    alpha, saved = cpu_overlap.forward(*pair, temperature, group, names=("draft_hidden", "target_hidden"))
    if not want_grad:
        return alpha, None
    return alpha, cpu_overlap.backward(factor * temperature, *pair, saved, temperature, group)
