"""One request of the torch engine: what was asked, what it has so far, and when it is finished."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from bebop.errors import EngineRefused
from bebop.records import DraftCounts, Rollout, Sampling

# vLLM's names for what this engine does not do, at the values that ask for nothing
NEUTRAL = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "detokenize": False,
}


@dataclass
class Request:
    """prompt: token ids; limit: tokens it may emit; stops: ids that end it; seed: of its random streams, int64.

    temperature, top_p and min_p are values of float32, as the sampler has them; top_k 0: off.
    """

    request_id: str
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    limit: int
    stops: frozenset[int]
    want_logprobs: bool
    future: Future[Rollout] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt and response so far, tokens."""
        return len(self.prompt) + len(self.tokens)

    def count(self, num_draft_tokens: int, num_accepted: int, depth: int) -> None:
        """Note one verified draft; drafts behind a stop token count as accepted too, as vLLM's counters have it."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.accepted_per_depth += [0] * (depth - len(self.accepted_per_depth))
        for level in range(num_accepted):
            self.accepted_per_depth[level] += 1

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> str | None:
        """Append a verified run up to the first stop token or the limit; the finish reason where that ends it."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.versions.append(version)
            if self.want_logprobs:
                self.logprobs.append(logprob)
            if token in self.stops:
                return "stop"
            if len(self.tokens) == self.limit:
                return "length"
        return None

    def counts(self) -> DraftCounts:
        return DraftCounts(self.num_drafts, self.num_draft_tokens, tuple(self.accepted_per_depth))

    def rollout(self, finish_reason: str, *, speculating: bool) -> Rollout:
        return Rollout(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs) if self.want_logprobs else None,
            finish_reason=finish_reason,
            versions=tuple(self.versions),
            counts=self.counts() if speculating else None,
        )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    extra: Mapping[str, Any],
    vocabulary: int,
    max_model_len: int,
    end_ids: frozenset[int],
) -> Request:
    """A checked request. seed: used where sampling.seed is None. extra: min_p, and vLLM's names of Sampling's fields.

    Raises EngineRefused naming the parameter, what came and what was expected.
    """
    values = asdict(sampling) | {"min_p": 0.0}
    for name, value in extra.items():
        if name in values:
            values[name] = value
        elif value is not None and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise EngineRefused(
                f"sampling parameter {name}={value!r} is not supported by rollout.engine=torch; drop it"
            )
    try:
        prompt = _token_ids(prompt)
    except TypeError:
        raise EngineRefused(f"prompt: {_shown(prompt)} came, expected a sequence of token ids") from None
    _check_prompt(prompt, vocabulary, max_model_len)
    values |= _checked(values)
    stops = values["stop_token_ids"] if values["ignore_eos"] else values["stop_token_ids"] | end_ids
    return Request(
        request_id=request_id,
        prompt=prompt,
        seed=seed if values["seed"] is None else values["seed"],
        temperature=values["temperature"],
        # -1 is vLLM's other word for off; the whole vocabulary is off too
        top_k=values["top_k"] if 0 < values["top_k"] < vocabulary else 0,
        top_p=values["top_p"],
        min_p=values["min_p"],
        limit=min(values["max_tokens"], max_model_len - len(prompt)),
        stops=stops,
        want_logprobs=values["logprobs"],
    )


def end_of_text(policy_dir: Path) -> frozenset[int]:
    """Ids that end a response, out of config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (policy_dir / name).is_file():
            ids = json.loads((policy_dir / name).read_text()).get("eos_token_id")
            found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def _check_prompt(prompt: tuple[int, ...], vocabulary: int, max_model_len: int) -> None:
    if not prompt:
        raise EngineRefused("prompt: no token came, expected at least one")
    if len(prompt) >= max_model_len:
        raise EngineRefused(
            f"prompt: {len(prompt)} tokens came, expected fewer than rollout.max_model_len={max_model_len}"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        strange = next(token for token in prompt if not 0 <= token < vocabulary)
        raise EngineRefused(f"prompt: token {strange} came, expected ids in [0, {vocabulary})")


def _whole(value: Any) -> int:
    """Of any integer type. Raises TypeError for all else, True and False among it."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _single(value: Any) -> float:
    """As the sampler has it: in float32 1e-46 is 0 and 1e39 infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return torch.tensor(float(value), dtype=torch.float32).item()


def _token_ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_whole(value) for value in values)


def _wanted(value: Any) -> bool:
    """Whether log-probabilities are; a count of 0 is vLLM's word for the sampled token's own."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if _whole(value) < 0:
        raise TypeError
    return True


# how a parameter is read, what fits, and that in words
PARAMETERS = {
    "temperature": (_single, lambda v: 0.0 <= v < math.inf, "a number at least 0, finite in float32"),
    "top_p": (_single, lambda v: 0.0 < v <= 1.0, "a number in (0, 1], above 0 in float32"),
    "min_p": (_single, lambda v: 0.0 <= v <= 1.0, "a number in [0, 1]"),
    "top_k": (_whole, lambda v: v >= -1, "an integer, at least 1, or 0 for off"),
    "max_tokens": (_whole, lambda v: v >= 1, "an integer, at least 1"),
    "seed": (_whole, lambda v: -(2**63) <= v < 2**63, "a signed 64-bit integer"),
    "stop_token_ids": (lambda v: frozenset(_token_ids(v)), lambda _: True, "a sequence of token ids"),
    "logprobs": (_wanted, lambda _: True, "True, False, or a count, at least 0"),
}


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as read. Raises EngineRefused naming the one that does not fit."""
    found: dict[str, Any] = {}
    for name, (read, fits, expected) in PARAMETERS.items():
        value = values[name]
        if name == "seed" and value is None:
            continue
        try:
            found[name] = read(value)
            fit = fits(found[name])
        except (TypeError, OverflowError):
            fit = False
        if not fit:
            raise EngineRefused(f"sampling parameter {name}={_shown(value)}: expected {expected}")
    return found


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:80]
