"""Losses of the heads over bebop_kernels: the end-to-end TV loss and the baselines it is compared with."""

from bebop.losses.acceptance import (
    ExpectedAcceptance,
    accepted_at_anchors,
    accepted_given_text,
    e2e_tv,
    expected_acceptance,
)
from bebop.losses.head import LOSSES, head_loss, score_drafts
from bebop.losses.regression import hidden_regression

__all__ = [
    "LOSSES",
    "ExpectedAcceptance",
    "accepted_at_anchors",
    "accepted_given_text",
    "e2e_tv",
    "expected_acceptance",
    "head_loss",
    "hidden_regression",
    "score_drafts",
]
