"""bebop's own engine on PyTorch: the reference, and the engine for draft trees."""

from bebop.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
