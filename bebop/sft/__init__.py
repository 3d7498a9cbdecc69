"""The stage before RL: trains MTP heads on a frozen policy's own text, with the end-to-end TV loss or a baseline."""

from bebop.errors import SftError
from bebop.sft.stage import SftResult, run

__all__ = ["SftError", "SftResult", "run"]
