"""One request of the torch engine: its settings, its tokens so far, and when it is finished."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from bebop.errors import EngineRefused
from bebop.records import DraftCounts, Rollout, Sampling


@dataclass
class Request:
    """prompt: token ids; limit: largest number of tokens to emit; stops: ids that end it; seed: of its random streams.

    temperature and top_p have float32 values, as in the sampler; top_k 0: off.
    """

    request_id: str
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    top_k: int
    top_p: float
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
        """Number of tokens of prompt and response so far."""
        return len(self.prompt) + len(self.tokens)

    def count(self, num_draft_tokens: int, num_accepted: int, depth: int) -> None:
        """Count one verified draft. Accepted draft tokens after a stop token count too, as in vLLM's counters."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.accepted_per_depth += [0] * (depth - len(self.accepted_per_depth))
        for level in range(num_accepted):
            self.accepted_per_depth[level] += 1

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> str | None:
        """Append the verified tokens up to the first stop token or the limit. Returns the finish reason, or None."""
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
    vocabulary: int,
    max_model_len: int,
    end_ids: frozenset[int],
) -> Request:
    """A checked request. seed: the request's own. Raises EngineRefused for a prompt that does not fit."""
    prompt = _token_ids(prompt)
    if not prompt:
        raise EngineRefused("prompt: got 0 tokens, expected at least 1")
    if len(prompt) >= max_model_len:
        raise EngineRefused(
            f"prompt: got {len(prompt)} tokens, expected fewer than rollout.max_model_len={max_model_len}"
        )
    if strange := [token for token in prompt if not 0 <= token < vocabulary]:
        raise EngineRefused(f"prompt: got token {strange[0]}, expected ids in [0, {vocabulary})")
    return Request(
        request_id=request_id,
        prompt=prompt,
        seed=seed,
        temperature=_float32(sampling.temperature),
        top_k=sampling.top_k if sampling.top_k < vocabulary else 0,  # the whole vocabulary means off
        top_p=_float32(sampling.top_p),
        limit=min(sampling.max_tokens, max_model_len - len(prompt)),
        stops=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else end_ids),
        want_logprobs=sampling.logprobs,
    )


def _token_ids(prompt: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        shown = " ".join(repr(prompt).split())[:80]
        raise EngineRefused(f"prompt: got {shown}, expected a sequence of token ids") from None


def _float32(value: float) -> float:
    """The value in the sampler's float32: 1e-46 is 0, so greedy."""
    return torch.tensor(value, dtype=torch.float32).item()
