"""LOSSES: the training losses of the heads, by the name in `loss.name`.

Shapes: K depths, N anchors, R rows (anchors of one depth), V vocabulary. A loss is one of two things:

* a function of only the overlaps alpha [K, N] = sum_v min(p, q). The fused kernels compute alpha and its gradient, and
  autograd does the rest:

      LOSSES.register("squared_tv", HeadLoss(of_overlap=lambda alpha: (1 - alpha).square().mean(0)))

* a function of whole rows, which computes its own gradient. It runs in chunks of logits, see bebop.losses.divergences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bebop_kernels import Rows
from torch import Tensor

from bebop.errors import BadInput
from bebop.registry import Registry

if TYPE_CHECKING:
    from bebop.config.heads import Loss

# (draft rows [R, V], target rows of the chunk [M, V], target row of each draft row [R], the text's tokens [R],
#  gradient wanted) -> value [R], alpha [R], gradient of value on (draft logits / temperature) [R, V] or None
RowResult = tuple[Tensor, Tensor, Tensor | None]
RowLoss = Callable[[Rows, Rows, Tensor, Tensor, bool], RowResult]


@dataclass(frozen=True)
class HeadLoss:
    """One loss; give either `of_overlap` or `of_rows`."""

    of_overlap: Callable[[Tensor], Tensor] | None = None  # alpha [K, N] -> loss of each anchor [N], differentiable
    of_rows: RowLoss | None = None  # averaged over depths
    total_variation: bool = False  # 1 - an acceptance: in [0, 1], so tau_max applies; learns slowly from fresh heads
    reads_labels: bool = False  # of_rows reads the text's tokens, which are then checked

    def __post_init__(self) -> None:
        if (self.of_overlap is None) == (self.of_rows is None):
            given = "neither" if self.of_rows is None else "both"
            raise BadInput(f"HeadLoss: got {given} of of_overlap and of_rows, expected exactly one of them")

    def check_section(self, loss: Loss, key: str, name: str) -> None:
        """Raise BadInput if the section sets a key that this loss does not support; `key` is the loss's config key."""
        if self.of_rows is not None and loss.impl not in ("auto", "reference"):
            raise BadInput(
                f"loss.impl: got {loss.impl} with {key}={name}, expected auto or reference: only losses of the overlap "
                "have kernels"
            )


LOSSES: Registry[HeadLoss] = Registry("loss", key="loss.name")
