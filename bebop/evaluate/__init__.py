"""`eval`: a policy with heads, sampled through the engine and scored on what it sampled, side by side."""

from bebop.evaluate.stage import run

__all__ = ["run"]
