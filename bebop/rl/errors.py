"""What ends a GRPO run; each message is the reason in one line, details below it."""

from __future__ import annotations


class RlError(RuntimeError):
    """A GRPO run that could not go on."""


class RolloutFailed(RlError):
    """A sample raised: in the engine, the agent loop or the reward."""


class HeadsDiffer(RlError):
    """The engine serves other weights than the trainer holds."""


class ProbabilitiesDiffer(RlError):
    """The engine's probabilities of its own samples are not the trainer's."""


class WorkerDied(RlError):
    """An engine, a worker or a rollout process is gone, or gives no sign of life."""
