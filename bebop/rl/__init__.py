"""GRPO on verl, with MTP speculation in the rollouts. Only this package imports verl and Ray."""

from bebop.errors import RlError
from bebop.rl.stage import run

__all__ = ["RlError", "run"]
