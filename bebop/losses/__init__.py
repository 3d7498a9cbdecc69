"""Losses of the heads over bebop_kernels: the end-to-end TV loss and the baselines it is compared with."""

import bebop.losses.divergences  # noqa: F401  (registers its losses)
from bebop.losses.acceptance import (
    ExpectedAcceptance,
    accepted_at_anchors,
    accepted_given_text,
    e2e_tv,
    expected_acceptance,
)
from bebop.losses.head import head_loss, score_drafts
from bebop.losses.registry import LOSSES, HeadLoss
from bebop.losses.regression import hidden_regression

__all__ = [
    "LOSSES",
    "ExpectedAcceptance",
    "HeadLoss",
    "accepted_at_anchors",
    "accepted_given_text",
    "e2e_tv",
    "expected_acceptance",
    "head_loss",
    "hidden_regression",
    "score_drafts",
]
