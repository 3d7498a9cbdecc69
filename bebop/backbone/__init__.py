"""The frozen policy: loading it, and its hidden states."""

from bebop.backbone.loading import Backbone, load_backbone

__all__ = ["Backbone", "load_backbone"]
