"""Every error that bebop raises on purpose: the command line shows these as one line, any other with its traceback.

A message says what it got, what it expected, and what to change.
"""

from __future__ import annotations


class BebopError(Exception):
    """The base of all errors below."""


class BadInput(BebopError, ValueError):
    """An argument, a file or a setting that cannot be used."""


class ConfigError(BadInput):
    """A config that cannot run: the key, what it got, what it expected."""


class LoggerError(BebopError, RuntimeError):
    """Weights & Biases cannot do what logger.* asks for."""


class DiskError(BebopError, OSError):
    """A path that cannot be written or read: full disk, missing rights, folder in use by another run."""


class PatchRefused(BebopError, RuntimeError):
    """A correction to vLLM or verl does not fit the installed version."""


class EngineError(BebopError, RuntimeError):
    """Anything that a rollout engine refuses or fails at; one line."""


class EngineRefused(EngineError):
    """The engine cannot do what was asked without changing the sampled distribution, or cannot do it at all."""


class EngineDied(EngineError):
    """The engine's process ended or broke; nothing more can be generated. Carries the engine's own error."""


class SftError(BebopError, RuntimeError):
    """Head training failed. The message is one line; the traceback is in the file that it names."""


class VerifierError(BebopError, RuntimeError):
    """A reward function cannot be used, or too many rewards of a run failed."""


class BenchError(BebopError, RuntimeError):
    """A measurement failed."""


class RlError(BebopError, RuntimeError):
    """A GRPO run ended early. The first line of the message is the reason, details follow."""


class RolloutFailed(RlError):
    """A sample raised: in the engine, the agent loop or the reward."""


class HeadsDiffer(RlError):
    """The engine serves other weights than the trainer holds."""


class ProbabilitiesDiffer(RlError):
    """The engine's probabilities of its own samples are not the trainer's."""


class WorkerDied(RlError):
    """An engine, a worker or a rollout process is gone, or does not answer."""


def first_line(error: Exception) -> str:
    """An error of another library in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
