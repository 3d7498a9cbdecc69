"""The module that is trained: heads and their loss, from a batch to a loss. The backbone is not part of it."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bebop.config.heads import Loss
from bebop.data.batches import TrainBatch
from bebop.errors import BadInput
from bebop.losses import head_loss, hidden_regression
from bebop.mtp import MtpHead, draft_hidden

REGRESSION = "hidden_regression"


def anchor_rows(head: MtpHead, batch: TrainBatch, embed_weight: Tensor, depth: int) -> Tensor:
    """[K,N,D] the head's output at the anchors, run depth by depth as an engine drafts."""
    packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
    return draft_hidden(head, batch.hidden, embed_weight, *packed, depth, anchors=batch.anchors)


class HeadObjective(nn.Module):
    """Mean loss over a batch's anchors. loss_name, a name in LOSSES or REGRESSION, may change between steps."""

    def __init__(
        self,
        head: MtpHead,
        embed_weight: Tensor,
        lm_head_weight: Tensor,
        depth: int,
        loss: Loss,
        *,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        activation_checkpointing: bool = False,
    ) -> None:
        """embed_weight, lm_head_weight: float32 [V,D], frozen; not parameters of this module, so never updated.

        temperature: of the training sequences; the loss compares draft and target at it.
        compute_dtype: of matrix products (autocast for the heads, cast operands for the loss); parameters, gradients
        and softmax statistics stay float32.
        activation_checkpointing: MLPs keep only their input, and are recomputed in the backward pass.
        """
        super().__init__()
        self.head, self.depth, self.loss_name = head, depth, loss.name
        self._loss, self._temperature = loss, temperature
        self._frozen = (embed_weight, lm_head_weight.to(compute_dtype))
        self._compute_dtype = compute_dtype
        if activation_checkpointing:
            _checkpoint_mlps(head)

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """-> loss (scalar, mean over the N anchors), alpha [K] float32 (mean over the anchors, detached; NaN for
        REGRESSION, which computes no logits)."""
        embed_weight, lm_head_weight = self._frozen
        low = self._compute_dtype != torch.float32
        with torch.autocast(batch.hidden.device.type, self._compute_dtype, enabled=low):
            rows = anchor_rows(self.head, batch, embed_weight, self.depth)
        if self.loss_name == REGRESSION:
            return hidden_regression(rows, batch.hidden, batch.target_index), rows.new_full((self.depth,), torch.nan)
        loss, alpha = head_loss(
            self.loss_name,
            rows.to(self._compute_dtype),
            batch.hidden.to(self._compute_dtype),
            lm_head_weight,
            batch.target_index,
            batch.labels,
            temperature=self._temperature,
            tau_max=self._loss.tau_max,
            impl=self._loss.impl,
        )
        return loss, torch.as_tensor(alpha).mean(dim=1)


def _checkpoint_mlps(head: nn.Module) -> None:
    """Run each outermost module named `mlp` under activation checkpointing. Its inner activations are several times the
    width per token and depth, the largest that a head keeps. Parameters keep their names."""
    mlps = [module for name, module in head.named_modules() if re.fullmatch(r"(?:(?!mlp\.)\w+\.)*mlp", name)]
    if not mlps:
        raise BadInput("sft.activation_checkpointing: got true, but the head has no module `mlp`; set it to false")
    for module in mlps:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
