"""The frozen policy: making one, loading one, and its hidden states."""

from bebop.backbone.random_policy import random_checkpoint

__all__ = ["random_checkpoint"]
