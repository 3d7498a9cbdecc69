"""bebop's own engine on PyTorch: the reference, and the one that verifies draft trees."""

from bebop.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
