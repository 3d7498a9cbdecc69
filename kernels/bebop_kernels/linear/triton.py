"""linear_tv_overlap: torch's matrix products into a buffer that holds one chunk's logits, and row kernels in Triton.

The target logits of a chunk are computed and normalised once, for all depths. The draft logits of one depth at a time
are in a buffer, where their gradient replaces them, ready for the product with the weight. Buffers have the type of the
inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_kernels._triton import launch
from bebop_kernels._triton.launch import unavailable
from bebop_kernels.linear.driver import Inputs, Use
from bebop_kernels.rows import check_sums
from bebop_kernels.tensor_parallel import widest

__all__ = ["sweep", "unavailable"]

# Bytes of one [rows, V] buffer; two live at once. With thousands of rows, arithmetic bounds the products, not reading
# the weight.
CHUNK_BYTES = 512 << 20
MIN_CHUNK_ROWS = 128


def sweep(inputs: Inputs, scale: Tensor | None, want_grad: bool, use: Use) -> None:
    draft_hidden, weight, temperature, group = inputs.draft_hidden, inputs.weight, inputs.temperature, inputs.group
    depths, num_anchors, _ = draft_hidden.shape
    row_bytes = widest(len(weight), group, weight.device) * weight.element_size()
    step = max(MIN_CHUNK_ROWS, CHUNK_BYTES // max(row_bytes, 1))
    buffer = weight.new_empty(min(step, num_anchors), len(weight))
    totals: dict[str, list[Tensor]] = {"target_hidden": [], "draft_hidden": []}
    for anchors, target_hidden, index in inputs.chunks(step):
        target = F.linear(target_hidden, weight)
        target_sums = launch.sums(target, None, temperature, group)
        totals["target_hidden"].append(target_sums[:, 1])
        for k in range(depths):
            draft = torch.mm(draft_hidden[k, anchors], weight.T, out=buffer[: anchors.stop - anchors.start])
            sums = launch.sums(draft, None, temperature, group)
            totals["draft_hidden"].append(sums[:, 1])
            rows = draft, target, index[k], sums, target_sums
            alpha, over_mass = launch.overlap(*rows, temperature, group).unbind(1)
            alpha, grad = alpha.clamp(max=1), None
            if want_grad:
                row_scale = None if scale is None else scale[k, anchors].contiguous()
                grad = launch.gradient(*rows, over_mass, row_scale, temperature, out=draft)
            use((k, anchors), alpha, alpha, grad)
    for argument, parts in totals.items():  # at the end, since each check waits for the device
        if parts:
            check_sums(argument, torch.cat(parts))
