"""The frozen policy: making one, loading one, and its hidden states."""

from bebop.backbone.loading import Backbone, load_backbone
from bebop.backbone.policy import prepare_policy
from bebop.backbone.random_policy import random_checkpoint

__all__ = ["Backbone", "load_backbone", "prepare_policy", "random_checkpoint"]
