"""Limits of the libraries that a config's values go to: found with the config, not after hours of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from bebop.config.data import Data
from bebop.config.rollout import RolloutSection
from bebop.errors import ConfigError

LARGEST_INT = 2**31 - 1  # engines, kernels and generators of random numbers count in 32 bits
LARGEST_FLOAT = 3.4e38  # torch's float32
VLLM_TEMPERATURE = 0.01  # vLLM 0.31 samples at it where a smaller one above 0 is asked for


def check_numbers(config: BaseModel) -> None:
    """Raise ConfigError on a number that no library can hold."""
    for key, value in _numbers(config, ""):
        if isinstance(value, float) and not abs(value) < LARGEST_FLOAT:
            raise ConfigError(f"{key}: got {value}, expected a number below {LARGEST_FLOAT:g}")
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            shown = value if value.bit_length() < 100 else f"one of {value.bit_length()} bits"
            raise ConfigError(f"{key}: got {shown}, expected an integer of at most {LARGEST_INT}")


def check_lengths(rollout: RolloutSection, data: Data) -> None:
    """Raise where the longest prompt and response do not fit together: an engine would cut the response."""
    longest = data.max_prompt_tokens + data.max_response_tokens
    if longest > rollout.max_model_len:
        raise ConfigError(
            f"data.max_prompt_tokens + data.max_response_tokens = {data.max_prompt_tokens} + "
            f"{data.max_response_tokens}: got {longest} tokens, expected at most rollout.max_model_len="
            f"{rollout.max_model_len}; set rollout.max_model_len={longest}, or lower one of them"
        )


def check_temperatures(engine: str, temperatures: Iterable[float], key: str) -> None:
    """Raise on a temperature at which vLLM would sample otherwise than is scored and trained."""
    for temperature in temperatures:
        if engine == "vllm" and 0 < temperature < VLLM_TEMPERATURE:
            raise ConfigError(
                f"{key}: got {temperature} with vLLM, which samples at {VLLM_TEMPERATURE} instead; expected at least "
                f"{VLLM_TEMPERATURE}"
            )


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _numbers(getattr(value, name), f"{key}.{name}" if key else name)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{key}.{i}")
    elif isinstance(value, Mapping):  # integers of a task's parameters are the task's own
        for name, item in value.items():
            if not isinstance(item, int):
                yield from _numbers(item, f"{key}.{name}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value
