"""GRPO on verl, with MTP speculation in the rollouts: the only place of bebop that imports verl and Ray."""

from bebop.errors import RlError
from bebop.rl.stage import run

__all__ = ["RlError", "run"]
