"""One entry for every training loss of the heads, and the scoring of drafts on text. Method: Bebop section 4, arXiv
2602.23881.

Shapes: K depths, N anchors, M backbone positions, D width, V vocabulary. The backbone's hidden states and the
vocabulary matrix are constants here: gradient reaches draft_hidden and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bebop_kernels import TvStatistics, linear_rows, linear_tv_overlap, tv_statistics
from torch import Tensor

from bebop.errors import BadInput
from bebop.losses import divergences
from bebop.losses.acceptance import e2e_tv

LOSSES = ("hard_ce", "kl", "reverse_kl", "tv", "e2e_tv", "lk", "lk_hybrid")
# -ln alpha where p and q share no token; the gradient of alpha is 0 there anyway.
MIN_ALPHA = 1e-20


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

    name: hard_ce, kl, reverse_kl, tv, lk, lk_hybrid (each the mean over depths) or e2e_tv (over the whole draft).
    draft_hidden [K, N, D] with gradient; target_hidden [M, D]; weight [V, D]; target_index long [K, N], rows of
    target_hidden; labels long [K, N], the text's tokens (used by hard_ce alone). tau_max clamps each anchor's
    loss of tv and e2e_tv alone, which lie in [0, 1], by autograd: its gradient is 0 where it clamps. Returns (scalar,
    alpha [K, N] detached float32).
    impl: as in linear_tv_overlap for tv, e2e_tv and lk; the others have the reference alone and refuse another.
    Without anchors the loss is 0, with a zero gradient. Raises ValueError naming the argument; an unknown name lists
    the known ones.
    """
    target_hidden, weight = target_hidden.detach(), weight.detach()
    if name in ("tv", "e2e_tv", "lk"):
        alpha = linear_tv_overlap(draft_hidden, target_hidden, weight, target_index, temperature=temperature, impl=impl)
        if name == "e2e_tv":
            per_anchor = e2e_tv(alpha)
        elif name == "tv":
            per_anchor = (1 - alpha).mean(0)
        else:
            per_anchor = -alpha.clamp(min=MIN_ALPHA).log().mean(0)
    elif name in LOSSES:
        if impl not in ("auto", "reference"):
            raise BadInput(f"impl={impl!r}: the loss {name} has no such kernel; set loss.impl to auto or reference")
        row_function = getattr(divergences, name)
        if name == "hard_ce":
            _check_labels(labels, target_index, weight.shape[0])
            row_function = row_function(labels)
        per_depth, alpha = linear_rows(
            draft_hidden, target_hidden, weight, target_index, row_function, temperature=temperature
        )
        per_anchor = per_depth.mean(0)
    else:
        raise BadInput(f"name={name!r}: expected one of {', '.join(LOSSES)}; set loss.name")
    if tau_max is not None and name in ("tv", "e2e_tv"):
        per_anchor = per_anchor.clamp(max=tau_max)
    loss = per_anchor.mean() if per_anchor.numel() else draft_hidden.float().sum() * 0
    return loss, alpha.detach().float()


@torch.no_grad()
def score_drafts(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    target_index: Tensor,
    tokens: Tensor | None = None,
    *,
    temperature: float = 1.0,
    impl: str = "auto",
    chunk_anchors: int = 512,
) -> TvStatistics:
    """tv_statistics per depth and anchor, each field [K, N]: what `expected_acceptance` and the slope are made of.

    Arguments as in head_loss; tokens long [K, N] are the text's tokens, whose log-probabilities are then given too. The
    [rows, V] logits live for `chunk_anchors` rows at a time.
    """
    depths, anchors = target_index.shape
    rows = []
    for k in range(depths):
        for a in range(0, anchors, chunk_anchors):
            part = slice(a, a + chunk_anchors)
            rows.append(
                tv_statistics(
                    F.linear(draft_hidden[k, part], weight),
                    F.linear(target_hidden[target_index[k, part]], weight),
                    tokens=None if tokens is None else tokens[k, part],
                    temperature=temperature,
                    impl=impl,
                )
            )
    if not rows:
        empty = draft_hidden.new_empty((depths, 0), dtype=torch.float32)
        return TvStatistics(*[empty] * (5 if tokens is None else 7))
    return TvStatistics(
        *(None if field[0] is None else torch.cat(field).view(depths, anchors) for field in zip(*rows, strict=True))
    )


def _check_labels(labels: Tensor, target_index: Tensor, vocab_size: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != target_index.shape:
        raise BadInput(f"labels: {labels.dtype} {list(labels.shape)}, expected torch.int64 {list(target_index.shape)}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= vocab_size):
        raise BadInput(
            f"labels: values {int(labels.min())}..{int(labels.max())}, expected token ids in [0, {vocab_size}); "
            "anchors whose horizon is not supervised must be dropped before"
        )
