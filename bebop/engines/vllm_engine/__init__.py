"""Rollouts by vLLM. Every vLLM process imports this package for its plug-in, so the engine is imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.engines.vllm_engine.engine import VllmEngine

__all__ = ["VllmEngine"]


def __getattr__(name: str) -> Any:
    if name == "VllmEngine":
        from bebop.engines.vllm_engine.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
