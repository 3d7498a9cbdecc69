"""Losses of the heads, computed by bebop_kernels: the end-to-end TV loss and the baselines it is compared with.

bebop.losses.acceptance has the end-to-end TV loss (Bebop eq. 13), bebop.losses.divergences the losses of whole rows.
"""

import bebop.losses.divergences  # noqa: F401  (registers its losses)
from bebop.losses.acceptance import ExpectedAcceptance, e2e_tv, expected_acceptance, mean_with_error
from bebop.losses.head import head_loss
from bebop.losses.registry import LOSSES, HeadLoss
from bebop.losses.regression import hidden_regression

__all__ = [
    "LOSSES",
    "ExpectedAcceptance",
    "HeadLoss",
    "e2e_tv",
    "expected_acceptance",
    "head_loss",
    "hidden_regression",
    "mean_with_error",
]
