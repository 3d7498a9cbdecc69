"""Regression of the heads' output on the backbone's hidden states: EAGLE's feature loss (arXiv 2401.15077, section 4.2)
without its classification part. It is a cheap start for fresh heads, before a loss over the vocabulary.

Shapes: K depths, N anchors, M backbone positions, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.errors import BadInput


def hidden_regression(draft_hidden: Tensor, target_hidden: Tensor, target_index: Tensor) -> Tensor:
    """Mean squared error of the draft rows, divided by the targets' mean square: a scalar; 1 for rows of zeros.

    draft_hidden [K, N, D] with gradient, any dtype; target_hidden [M, D], constant; target_index long [K, N], rows of
    target_hidden. Both are after the final norm, as lm_head reads them. Without anchors: 0, with a zero gradient.
    Raises ValueError if the shapes do not fit.
    """
    depths, anchors, width = draft_hidden.shape
    if target_index.shape != (depths, anchors) or target_hidden.shape[-1] != width:
        raise BadInput(
            f"target_index: got {list(target_index.shape)} into target_hidden {list(target_hidden.shape)}, expected "
            f"{[depths, anchors]} into [M, {width}], for draft_hidden {list(draft_hidden.shape)}"
        )
    if not draft_hidden.numel():
        return draft_hidden.float().sum() * 0
    target = target_hidden.detach()[target_index].float()
    return (draft_hidden.float() - target).square().mean() / target.square().mean().clamp(min=torch.finfo().tiny)
