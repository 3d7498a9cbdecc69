"""The heads under training, as the module that DeepSpeed sees: batch in, loss out. The backbone is outside of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bebop.config import Loss
from bebop.losses import head_loss
from bebop.mtp import MtpHead, draft_hidden
from bebop.sft.batches import TrainBatch


def anchor_rows(head: MtpHead, batch: TrainBatch, embed_weight: Tensor, depth: int) -> Tensor:
    """[K,N,D] the heads' output at the anchors, depth k from the engine's own recursion."""
    packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
    return draft_hidden(head, batch.hidden, embed_weight, *packed, depth, anchors=batch.anchors)


class HeadObjective(nn.Module):
    """Mean loss over a batch's anchors. `loss_name` says which of the losses, and may change between steps."""

    def __init__(self, head: MtpHead, embed_weight: Tensor, lm_head_weight: Tensor, depth: int, loss: Loss) -> None:
        """embed_weight, lm_head_weight: float32 [V,D], frozen; not parameters of this module, so never updated."""
        super().__init__()
        self.head, self.depth, self.loss_name = head, depth, loss.name
        self._loss = loss
        self._frozen = (embed_weight, lm_head_weight)

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """-> loss (scalar, mean over the N anchors), alpha [K] float32 (mean over the anchors, detached)."""
        embed_weight, lm_head_weight = self._frozen
        rows = anchor_rows(self.head, batch, embed_weight, self.depth)
        loss, alpha = head_loss(
            self.loss_name,
            rows,
            batch.hidden,
            lm_head_weight,
            batch.target_index,
            batch.labels,
            temperature=self._loss.temperature,
            tau_max=self._loss.tau_max,
            impl=self._loss.impl,
        )
        return loss, torch.as_tensor(alpha).mean(dim=1)
