"""`eval`: samples a policy through the engine, and compares the heads' observed acceptance with their scores."""

from bebop.evaluate.stage import run

__all__ = ["run"]
