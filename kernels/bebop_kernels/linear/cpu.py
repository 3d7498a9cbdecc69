"""linear_tv_overlap on CPUs: one matrix product for all depths of a chunk, then compiled loops over its rows.

The target probabilities of a chunk are computed once for its K depths. The gradient of a row overwrites its logits
while they are in cache, and the next product reads it from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels._cpu import loops
from bebop_kernels._cpu.threads import empty, in_blocks, rows_of, unavailable
from bebop_kernels.linear.driver import Inputs, Use
from bebop_kernels.rows import check_sums

__all__ = ["sweep", "unavailable"]

# Elements of the draft logits of a chunk, all depths together. Larger chunks read the weight less often.
CHUNK_ELEMENTS = 1 << 25
MIN_CHUNK_ROWS = 64


def sweep(inputs: Inputs, scale: Tensor | None, want_grad: bool, use: Use) -> None:
    draft_hidden, weight, temperature = inputs.draft_hidden, inputs.weight, inputs.temperature
    depths, _, width = draft_hidden.shape
    rows = max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // max(len(weight), 1))
    if scale is None:
        scale = torch.ones(draft_hidden.shape[:2])
    scale = scale.float() / temperature
    buffers = Buffers()
    for anchors, target_hidden, index in inputs.chunks(max(1, rows // max(depths, 1))):
        target = buffers.product("target", target_hidden, weight)
        draft = buffers.product("draft", draft_hidden[:, anchors].reshape(-1, width), weight)
        of_rows = index.reshape(-1), scale[:, anchors].reshape(-1), temperature, want_grad
        alpha, grad = _rows(buffers, draft, target, *of_rows)
        alpha = alpha.view(depths, -1)
        use((slice(None), anchors), alpha, alpha, None if grad is None else grad.to(weight.dtype))


class Buffers:
    """Buffers shared by the chunks: new memory costs a page fault per 4 KiB, as much as the loops over it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] with arbitrary content. Overwrites what was taken under this name before."""
        held = self._held.get(name)
        if held is None or held.numel() < rows * columns:
            held = self._held[name] = empty((rows * columns,), dtype)
        return held[: rows * columns].view(rows, columns)

    def product(self, name: str, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits hidden W^T."""
        return torch.mm(hidden, weight.T, out=self.take(name, len(hidden), len(weight), weight.dtype))


def _rows(
    buffers: Buffers,
    draft: Tensor,
    target: Tensor,
    index: Tensor,
    scale: Tensor,
    temperature: float,
    want_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """alpha [R] of draft [R, V] against target[index], and its gradient times scale [R], written over the draft."""
    parts = loops.scale_parts(temperature)
    vocab_size = draft.shape[1]
    probs, target_inverse = buffers.take("probs", len(target), vocab_size, torch.float32), torch.empty(len(target))
    alpha, draft_inverse = torch.empty(len(draft)), torch.empty(len(draft))
    draft = draft if draft.dtype in (torch.float32, torch.bfloat16) else draft.float()
    rows, target_rows, targets, factor = rows_of(draft), rows_of(target), index.numpy(), scale.numpy()

    def of_target(block: slice) -> None:
        loops.probabilities(target_rows[block], *parts, probs[block].numpy(), target_inverse[block].numpy())

    def of_draft(block: slice) -> None:
        out = alpha[block].numpy(), draft_inverse[block].numpy()
        loops.linear_overlap(rows[block], probs.numpy(), targets[block], *parts, factor[block], want_grad, *out)

    in_blocks(len(target), vocab_size, of_target)
    check_sums("target_hidden", target_inverse)
    in_blocks(len(draft), vocab_size, of_draft)
    check_sums("draft_hidden", draft_inverse)
    return alpha.clamp_(max=1), draft if want_grad else None
