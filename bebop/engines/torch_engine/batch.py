"""The running requests of the torch engine, and one round of all of them: draft, one target pass, verify, emit.

For a request with n known tokens, both caches hold positions 0 .. n-2: the backbone's keys, and the head's keys of
depth 1, whose input at position t is the backbone's hidden state there and the embedding of token t+1. A round passes
the last known token and the draft after it through the backbone, keeps the accepted nodes, and runs the head over the
accepted positions. The next draft starts from the head's output at the last of them.

Legend: B requests, N draft nodes, A accepted positions of the longest run, V vocabulary, S width of the hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.config import RolloutSection
from bebop.engines.torch_engine.drafter import Anchors, Draft, Drafter, Settings, Verified
from bebop.engines.torch_engine.kv_cache import Cache, Window, fold
from bebop.engines.torch_engine.model import Policy
from bebop.engines.torch_engine.profiling import RoundClock, threads_for
from bebop.engines.torch_engine.random import RoundDraws
from bebop.engines.torch_engine.request import Request
from bebop.errors import EngineError
from bebop.spec import StreamId, Streams
from bebop.spec.sampling import Setting

PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
HEAD_BROKEN = "the draft head's state is not finite"


@dataclass(frozen=True)
class Finished:
    """A finished request, with its finish reason or its error."""

    request: Request
    reason: str | None
    error: EngineError | None = None


class Rounds:
    """Requests in slots 0 .. len(active) - 1 of the caches, advanced together."""

    def __init__(self, rollout: RolloutSection, policy: Policy, num_slots: int) -> None:
        self.policy, self.drafter = policy, Drafter(rollout, policy)
        self.num_slots = num_slots
        self.active: list[Request] = []
        self.cache, self.head_cache = make_caches(policy, self.drafter, rollout.max_model_len, num_slots)
        self.state = torch.zeros(num_slots, policy.config.hidden_size, dtype=policy.dtype, device=policy.device)
        self._settings: Settings | None = None

    # -- requests in and out ------------------------------------------------------------------------------------

    def admit(self, requests: list[Request], version: int) -> Iterator[list[Finished]]:
        """Read the prompts of new requests and sample their first tokens. Yields, by group, the requests that this
        finishes."""
        for group in _groups(requests):
            self.active += group
            self._settings = None
            first = len(self.active) - len(group)
            failed = self._prefill(group, first, version)
            yield self._leave({first + i: outcome for i, outcome in failed.items()})

    def refill(self) -> list[Finished]:
        """Compute all caches again after a weight update. Returns the requests that failed."""
        order = sorted(range(len(self.active)), key=lambda i: -self.active[i].length)
        self.active = [self.active[i] for i in order]
        self._settings = None
        outcomes: dict[int, Finished] = {}
        first = 0
        for group in _groups(self.active):
            outcomes |= {first + i: outcome for i, outcome in self._prefill(group, first, None).items()}
            first += len(group)
        return self._leave(outcomes)

    def drop(self, requests: list[Request]) -> None:
        """Remove running requests."""
        gone = {id(request) for request in requests}
        self._leave({i: Finished(r, None) for i, r in enumerate(self.active) if id(r) in gone})

    def _leave(self, outcomes: dict[int, Finished]) -> list[Finished]:
        """Free the slots in `outcomes`; the last running requests move into them."""
        for slot in sorted(outcomes, reverse=True):
            if outcomes[slot].error is not None:
                for cache in self._caches():
                    cache.clear(slot)
            last = len(self.active) - 1
            if slot != last:
                for cache in self._caches():
                    cache.move(last, slot, self.active[last].length)
                self.state[slot] = self.state[last]
                self.active[slot] = self.active[last]
            self.active.pop()
        if outcomes:
            self._settings = None
        return list(outcomes.values())

    # -- passes -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, version: int) -> list[Finished]:
        """Run one round; returns the requests that it finished."""
        with self.drafter.clock.part("rounds"):
            return self._round(version)

    def _round(self, version: int) -> list[Finished]:
        requests, settings = self.active, self._current()
        lengths = [request.length for request in requests]
        start = max(lengths) - 1
        even = min(lengths) - 1 == start
        length, last = self._long(lengths), self._long([(r.tokens or r.prompt)[-1] for r in requests])
        committed = None if even else torch.arange(start, device=length.device) < (length - 1).unsqueeze(1)
        anchors = Anchors(length, self.state[: len(requests)], committed, start)
        with self.drafter.clock.part("drafting"):
            draws = RoundDraws(self._streams(requests), self.drafter.sizes())
        draft = self.drafter.draft(anchors, settings, draws, self.head_cache)

        logits, hidden, broken = self._target(draft, anchors, last)
        if draft.bad is not None:
            broken |= _named(draft.bad, f"{HEAD_BROKEN} after a draft token")
        at_once = logits.shape[1] if self.drafter.spec is None else 1  # a tree is verified row by row
        few = threads_for(len(requests) * at_once * logits.shape[-1], logits.device)
        with self.drafter.clock.part("verifying"), few:
            verified = draft.verify(logits, settings, draws)
        logprobs = self._logprobs(verified, logits)
        self._keep(draft, anchors, verified)
        if self.head_cache is not None:
            broken = self._extend_head(anchors, verified, hidden) | broken
        return self._emit(draft, verified, logprobs, broken, version)

    def _target(self, draft: Draft, anchors: Anchors, last: Tensor) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Logits [B, N+1, V] and hidden states [B, N+1, S] of the pass, and errors by slot."""
        logits, hidden = target_pass(self.policy, self.cache, draft, anchors, last)
        return logits, hidden, self._broken(hidden, logits, anchors.lengths - 1)

    def _prefill(self, group: list[Request], first: int, version: int | None) -> dict[int, Finished]:
        """Fill slots first, first + 1, ... with texts of similar length.

        With a version, each text is a prompt and its first token is sampled. Without one, the last token of each text
        is already known and is read in the next round. Returns outcomes by index in the group.
        """
        texts = [(*request.prompt, *request.tokens) for request in group]
        sizes = [len(text) - (version is None) for text in texts]
        width = max(sizes)
        with torch.inference_mode():
            padded = self._long([[*text, *(0,) * (width + 1 - len(text))] for text in texts])
            tokens, following = padded[:, :width], padded[:, 1:].clone()
            positions = torch.arange(width, device=tokens.device).expand_as(tokens)
            hidden = self.policy.hidden(tokens, positions, Window(self.cache, first, 0, causal=True))
            row, end = torch.arange(len(group), device=tokens.device), self._long(sizes) - 1
            logits = None if version is None else self.policy.logits(hidden[row, end]).unsqueeze(1)
            broken = self._broken(hidden[row, end].unsqueeze(1), logits, end)
            if version is not None:
                draft, settings = self.drafter.nothing(len(group)), self._settings_of(group)
                draws = RoundDraws(self._streams(group), {StreamId.FINAL: (1, 1)})
                verified = draft.verify(logits, settings, draws)
                logprobs = self._logprobs(verified, logits, settings, group)
                following[row, end] = verified.tokens[:, 0]
            if self.head_cache is not None:
                window = Window(self.head_cache, first, 0, causal=True)
                state = self.policy.first_state(hidden)
                state = self.policy.draft_state(state, following, positions, window)[row, end]
                self.state[first : first + len(group)] = state
                broken = _named(_not_finite(state), HEAD_BROKEN) | broken
        outcomes = {place: _failed(group[place], what) for place, what in broken.items()}
        if version is None:
            return outcomes
        for place, token in enumerate(verified.tokens[:, 0].tolist()):
            request = group[place]
            if place not in broken and (reason := request.take([token], logprobs[place], version)):
                outcomes[place] = Finished(request, reason)
        return outcomes

    def _keep(self, draft: Draft, anchors: Anchors, verified: Verified) -> None:
        """Move the accepted nodes' keys and values to the end of each request's text."""
        num_nodes = draft.tokens.shape[1]
        chain = self.drafter.spec is None
        if anchors.committed is None and (chain or not num_nodes):
            return  # a chain after texts of equal length is already in place
        source = torch.where(verified.path >= 0, verified.path + (anchors.start + 1), -1)
        source = torch.nn.functional.pad(source, (1, 0), value=anchors.start)
        self.cache.keep(anchors.lengths - 1, source)

    def _extend_head(self, anchors: Anchors, verified: Verified, hidden: Tensor) -> dict[int, str]:
        """Run depth 1 of the head at the accepted positions. Returns errors by slot."""
        batch, num = verified.tokens.shape
        row = torch.arange(batch, device=hidden.device)
        place = torch.arange(num, device=hidden.device)
        taken = self.policy.first_state(hidden[row.unsqueeze(1), verified.rows])
        own = None
        if num > 1 or anchors.committed is not None:
            own = (place <= place.unsqueeze(1)).expand(batch, -1, -1)
        mask = fold(anchors.committed, own, anchors.start, self.policy.groups, self.policy.dtype)
        window = Window(self.head_cache, 0, anchors.start, mask)
        positions = (anchors.lengths - 1).unsqueeze(1) + place
        out = self.policy.draft_state(taken, verified.tokens.clamp(min=0), positions, window)
        num_accepted = (verified.path >= 0).sum(1)
        if anchors.committed is not None:
            source = torch.where(place <= num_accepted.unsqueeze(1), place + anchors.start, -1)
            self.head_cache.keep(anchors.lengths - 1, source)
        state = out[row, num_accepted]
        self.state[:batch] = state
        return _named(_not_finite(state), HEAD_BROKEN)

    # -- results ------------------------------------------------------------------------------------------------

    def _emit(
        self,
        draft: Draft,
        verified: Verified,
        logprobs: list[list[float]],
        broken: dict[int, str],
        version: int,
    ) -> list[Finished]:
        tokens = verified.tokens.tolist()
        num_accepted = (verified.path >= 0).sum(1).tolist()
        num_drafted = (draft.tokens >= 0).sum(1).tolist()
        outcomes: dict[int, Finished] = {}
        for slot, request in enumerate(self.active):
            if slot in broken:
                outcomes[slot] = _failed(request, broken[slot])
                continue
            if self.drafter.speculating:
                request.count(num_drafted[slot], num_accepted[slot], self.drafter.depth)
            run = num_accepted[slot] + 1
            if reason := request.take(tokens[slot][:run], logprobs[slot][:run], version):
                outcomes[slot] = Finished(request, reason)
        return self._leave(outcomes)

    def _logprobs(
        self,
        verified: Verified,
        logits: Tensor,
        settings: Settings | None = None,
        requests: list[Request] | None = None,
    ) -> list[list[float]]:
        """[B][D+1] log-probabilities of the emitted tokens under the sampled distribution; at temperature 0, those of
        temperature 1, as in vLLM."""
        requests, settings = requests or self.active, settings or self._current()
        found = verified.probs.log()
        greedy = [i for i, request in enumerate(requests) if request.temperature == 0 and request.want_logprobs]
        if greedy:
            at = self._long(greedy)
            rows = logits[at.unsqueeze(1), verified.rows[at]].float().log_softmax(-1)
            found[at] = rows.gather(-1, verified.tokens[at].clamp(min=0).unsqueeze(-1)).squeeze(-1).to(found.dtype)
        return found.tolist()

    def _broken(self, hidden: Tensor, logits: Tensor | None, first_position: Tensor) -> dict[int, str]:
        """Errors of slots whose target rows are not finite. Their logits are set to 0, so that the others continue."""
        bad = _not_finite(hidden)  # [B, rows]
        found = {}
        for slot, row in bad.nonzero().tolist():
            if slot not in found:
                position = int(first_position[slot])
                found[slot] = f"target row {row}, after position {position}, is NaN or infinite"
                hidden[slot] = 0
                if logits is not None:
                    logits[slot] = 0
        return found

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> RoundClock:
        return self.drafter.clock

    def _caches(self) -> list[Cache]:
        return [cache for cache in (self.cache, self.head_cache) if cache is not None]

    def _long(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.policy.device)

    def _streams(self, requests: list[Request]) -> Streams:
        return Streams(self._long([r.seed for r in requests]), self._long([len(r.tokens) for r in requests]))

    def _current(self) -> Settings:
        if self._settings is None:
            self._settings = self._settings_of(self.active)
        return self._settings

    def _settings_of(self, requests: list[Request]) -> Settings:
        filters: dict[str, Setting] = {}
        for name, off in (("top_k", 0), ("top_p", 1.0)):
            values = [getattr(request, name) for request in requests]
            if any(value != off for value in values):
                filters[name] = torch.tensor(values, device=self.policy.device)
        temperature = torch.tensor([request.temperature for request in requests], device=self.policy.device)
        return Settings(temperature, filters)


def target_pass(policy: Policy, cache: Cache, draft: Draft, anchors: Anchors, last: Tensor) -> tuple[Tensor, Tensor]:
    """The policy over each request's last known token and its draft: logits [B, N+1, V], hidden states [B, N+1, S].

    last: long [B]. Row 0 is after the last known token, row i + 1 after node i.
    """
    tokens = torch.cat([last.unsqueeze(1), draft.tokens.clamp(min=0)], 1)
    depths = torch.nn.functional.pad(draft.depths, (1, 0))
    batch, num = tokens.shape
    own = None
    if num > 1 or anchors.committed is not None:
        own = torch.ones(batch, num, num, dtype=torch.bool, device=tokens.device).tril()
        own[:, 1:, 1:] = draft.seen()
    mask = fold(anchors.committed, own, anchors.start, policy.groups, policy.dtype)
    window = Window(cache, 0, anchors.start, mask)
    hidden = policy.hidden(tokens, (anchors.lengths - 1).unsqueeze(1) + depths, window)
    return policy.logits(hidden), hidden


def make_caches(policy: Policy, drafter: Drafter, max_model_len: int, num_slots: int) -> tuple[Cache, Cache | None]:
    """Caches of the backbone and of the head, with room for a draft after the longest text."""
    shape = policy.cache_shape() | {"num_slots": num_slots, "dtype": policy.dtype, "device": policy.device}
    columns, head_columns = _columns(drafter, max_model_len)
    cache = Cache(num_layers=policy.config.num_hidden_layers, num_columns=columns, **shape)
    return cache, Cache(num_layers=1, num_columns=head_columns, **shape) if policy.head is not None else None


def slot_bytes(policy: Policy, drafter: Drafter, max_model_len: int) -> int:
    """Memory of one slot of both caches."""
    columns, head_columns = _columns(drafter, max_model_len)
    total = policy.config.num_hidden_layers * columns + (head_columns if policy.head is not None else 0)
    width = policy.cache_shape()["num_kv_heads"] * policy.cache_shape()["head_dim"]
    return 2 * total * width * policy.dtype.itemsize


def _columns(drafter: Drafter, max_model_len: int) -> tuple[int, int]:
    own = max(drafter.max_own_columns, drafter.depth + 1)
    return max_model_len + drafter.max_nodes + 1, max_model_len + own


def _groups(requests: list[Request]) -> list[list[Request]]:
    """Groups by decreasing length, each with a padded size of at most PREFILL_TOKENS and twice its tokens."""
    groups: list[list[Request]] = []
    width = 0
    for request in sorted(requests, key=lambda r: -r.length):
        last = groups[-1] if groups else []
        if last and 2 * request.length > width and (len(last) + 1) * width <= PREFILL_TOKENS:
            last.append(request)
        else:
            groups.append([request])
            width = request.length
    return groups


def _not_finite(states: Tensor) -> Tensor:
    """[..., S] -> bool [...]."""
    return ~torch.isfinite(states.sum(-1))


def _named(bad: Tensor, what: str) -> dict[int, str]:
    """Errors by slot. bad: bool [B]."""
    return dict.fromkeys(bad.nonzero().flatten().tolist(), what)


def _failed(request: Request, what: str) -> Finished:
    return Finished(request, None, EngineError(f"request {request.request_id}: {what}"))
