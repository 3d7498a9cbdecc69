"""Rollouts by bebop's own engine: plain decoding, draft chains by every rule, and draft trees, in plain PyTorch.

It is the reference: it samples by the rules of `bebop.spec`, which are proven exact. One thread owns the model. Between
rounds it admits new requests and runs the callers' other calls (update, pause, checksums).

Random numbers depend only on a request's seed and number of tokens. So a request gets the same tokens in any batch and
in any order, if the logits are equal. Matrix products of other shapes round differently in the last bits; in float32
this changes a token only if a random number is within about 1e-6 of an edge.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from bebop.config import RolloutSection
from bebop.engines.protocol import Step, Weights
from bebop.engines.torch_engine.batch import Finished, Rounds, slot_bytes
from bebop.engines.torch_engine.drafter import Drafter
from bebop.engines.torch_engine.model import Policy
from bebop.engines.torch_engine.profiling import RoundClock
from bebop.engines.torch_engine.request import Request, make_request
from bebop.engines.weights import Digests, Layout, replace_tensors
from bebop.errors import BadInput, EngineDied, EngineError, EngineRefused
from bebop.mtp.checkpoint import Tensors
from bebop.mtp.names import split_experts
from bebop.records import DraftCounts, Rollout, Sampling, WeightChecksums
from bebop.store.environment import device_name

logger = logging.getLogger("bebop.engines")


class TorchEngine:
    """A running engine; the methods are described in `bebop.engines.protocol.RolloutEngine`."""

    def __init__(self, rollout: RolloutSection, policy_dir: Path, *, seed: int = 0, dtype: str = "float32") -> None:
        self.rollout, self.version = rollout, 0
        device, heads = torch.device(device_name()), rollout.speculation == "mtp"
        positions = rollout.max_model_len + rollout.draft_depth + 1
        try:
            self._policy = Policy(
                Path(policy_dir), heads=heads, num_positions=positions, dtype=getattr(torch, dtype), device=device
            )
        except BadInput as error:
            raise EngineRefused(str(error)) from None
        self._layout = Layout(policy_dir)
        self._digests = Digests(self._layout, sampled=False)
        self._unread = {  # further MTP layers, copies of embeddings: the engine computes nothing with them
            name: shape
            for name, shape in self._layout.shapes.items()
            if name not in self._policy.views and (heads or name not in self._layout.heads)
        }
        self._rounds = Rounds(rollout, self._policy, self._num_slots())
        self._end_ids = self._policy.reading.end_ids
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self._counts = DraftCounts()
        self._steps: deque[Step] = deque(maxlen=100_000)
        # shared by the thread and the callers, under the condition's lock
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._unsettled: dict[str, Request] = {}  # all requests without an answer
        self._asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._paused = self._closed = False
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, name="bebop-torch", daemon=True)
        self._thread.start()

    # -- sampling -----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        if seeds is not None and len(seeds) != len(prompts):
            raise EngineRefused(f"seeds: got {len(seeds)} for {len(prompts)} prompts, expected one per prompt")
        of_each = [sampling] * len(prompts) if seeds is None else [replace(sampling, seed=seed) for seed in seeds]
        requests = [self._request(prompt, own) for prompt, own in zip(prompts, of_each, strict=True)]
        self._submit(requests)
        try:
            return [request.future.result() for request in requests]
        except BaseException:
            for request in requests:
                request.future.cancel()
            raise

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self._policy.prompt_logprobs(torch.tensor(list(prompt))).tolist() for prompt in prompts]

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Rollout:
        request = self._request(prompt_ids, sampling, request_id)
        self._submit([request])
        return await asyncio.wrap_future(request.future)

    def _request(self, prompt: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Request:
        return make_request(
            request_id or f"bebop-{next(self._ids)}",
            prompt,
            sampling,
            seed=self._random.getrandbits(63) if sampling.seed is None else int(sampling.seed),
            vocabulary=self._policy.vocabulary,
            max_model_len=self.rollout.max_model_len,
            end_ids=self._end_ids,
        )

    def _submit(self, requests: list[Request]) -> None:
        with self._changed:
            self._require_life()
            for request in requests:
                held = self._unsettled.get(request.request_id)
                if held is not None and not held.future.cancelled():
                    raise EngineRefused(f"request_id: got {request.request_id!r}, which is running; use another id")
            self._unsettled |= {request.request_id: request for request in requests}
            self._waiting += requests
            self._changed.notify()

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, tensors: Weights, version: int) -> WeightChecksums:
        named = {name: tensor.detach() for name, tensor in dict(tensors).items()}
        if not self._policy.stacked:
            named = split_experts(named)  # which transformers' modules, a trainer's among them, hold stacked

        def update() -> WeightChecksums:
            try:
                replace_tensors(self._policy.views, named, is_head=self._layout.is_head, unread=self._unread)
            except ValueError as error:
                raise EngineRefused(str(error)) from None
            for name in named.keys() & self._unread.keys():
                self._digests.note(name, named[name])
            self._policy.refresh()
            self.version = version
            # the old weights' keys and values must not be used for tokens sampled after this
            self._settle(self._rounds.refill())
            return self._held()

        return self._ask(update)

    def checksums(self) -> WeightChecksums:
        return self._ask(self._held)

    def _held(self) -> WeightChecksums:
        files = Tensors(self._layout.path)
        for name in self._unread.keys() - self._digests.found.keys():
            self._digests.note(name, files[name])
        for name, view in self._policy.views.items():
            self._digests.note(name, view)
        return self._digests.checksums()

    # -- life ---------------------------------------------------------------------------------------------------

    def pause(self, mode: Literal["abort", "keep"] = "keep") -> None:
        if mode not in ("abort", "keep"):
            raise EngineRefused(f"mode: got {mode!r}, expected abort or keep")

        def stop() -> None:
            self._paused = True
            if mode == "abort":
                running = list(self._rounds.active)
                self._rounds.drop(running)
                with self._changed:
                    waiting = list(self._waiting)
                    self._waiting.clear()
                self._settle([Finished(request, "abort") for request in (*running, *waiting)])

        self._ask(stop)

    def resume(self) -> None:
        def go_on() -> None:
            self._paused = False

        self._ask(go_on)

    def counts(self) -> DraftCounts:
        with self._changed:
            self._require_life()
            running = [request.counts() for request in self._rounds.active]
            return sum(running, self._counts)

    def take_steps(self) -> list[Step]:
        with self._changed:
            steps = list(self._steps)
            self._steps.clear()
        return steps

    def set_draft_schedule(self, schedule: Mapping[str, int]) -> None:
        raise EngineRefused("draft schedule: rollout.engine=torch has none; set rollout.engine=vllm")

    @property
    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _num_slots(self) -> int:
        """Number of requests that run at once: rollout.max_num_seqs, or fewer if the cache's memory is too small."""
        rollout, policy = self.rollout, self._policy
        if policy.device.type == "cuda":
            key = f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}"
            free, total = torch.cuda.mem_get_info(policy.device)
            room = int(total * rollout.gpu_memory_utilization) - (total - free)
        else:
            key, room = f"rollout.kv_cache_gib={rollout.kv_cache_gib}", int(rollout.kv_cache_gib * 2**30)
        each = slot_bytes(policy, Drafter(rollout, policy), rollout.max_model_len)
        fit = room // each
        if fit < 1:
            raise EngineRefused(
                f"{key} leaves {max(room, 0) / 2**30:.3f} GiB for the KV cache, but one request of "
                f"rollout.max_model_len={rollout.max_model_len} needs {each / 2**30:.3f} GiB; raise it or lower "
                "rollout.max_model_len"
            )
        if fit < rollout.max_num_seqs:
            logger.info("%s holds %d requests at once, rollout.max_num_seqs=%d", key, fit, rollout.max_num_seqs)
        return min(fit, rollout.max_num_seqs)

    def _ask(self, what: Callable[[], Any]) -> Any:
        """Run `what` on the engine's thread between two rounds; returns its result or raises its exception."""
        future: Future[Any] = Future()
        with self._changed:
            self._require_life()
            self._asked.append((what, future))
            self._changed.notify()
        return future.result()

    def _require_life(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)
        if self._closed:
            raise EngineError("the engine is closed")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._end(EngineError("the engine is closed"))
        except BaseException as error:
            logger.exception("the engine's thread ended")
            self._death = f"the torch engine died: {' '.join(str(error).split())[:500] or type(error).__name__}"
            self._end(EngineDied(self._death))

    def _turn(self) -> bool:
        """Wait for work, then do it: first the calls of callers, else one round. Returns False if closed."""
        with self._changed:
            while not (self._closed or self._asked or self._has_work()):
                self._changed.wait()
            if self._closed:
                return False
            asked = self._asked.popleft() if self._asked else None
            new = self._admitted() if asked is None else []
        if asked is not None:
            _answer(*asked)
            return True
        self._forget_cancelled()
        taking_part = [*self._rounds.active, *new]
        clock, had = replace(self._rounds.clock), sum(len(request.tokens) for request in taking_part)
        for finished in self._rounds.admit(new, self.version):
            self._settle(finished)
        drafts = len(self._rounds.active) if self._rounds.drafter.speculating else 0
        finished = self._rounds.step(self.version) if self._rounds.active else []
        tokens = sum(len(request.tokens) for request in taking_part) - had
        self._note_step(new, tokens, drafts, self._rounds.clock - clock)
        self._settle(finished)  # last, because a caller with its answer may call take_steps
        return True

    def _note_step(self, new: list[Request], tokens: int, drafts: int, clock: RoundClock) -> None:
        on_gpu = self._policy.device.type != "cpu"  # there, calls return before they have run
        step = Step(
            ended_s=time.perf_counter(),
            running=len(self._rounds.active),
            prompt_tokens=sum(len(request.prompt) for request in new),
            tokens=tokens,
            drafts=drafts,
            decoding_s=None if on_gpu else clock.rounds,
            rules_s=None if on_gpu else clock.rules,
        )
        with self._changed:
            self._steps.append(step)

    def _has_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._rounds.active)

    def _admitted(self) -> list[Request]:
        free = self._rounds.num_slots - len(self._rounds.active)
        found = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        kept = []
        for request in found:
            if request.future.cancelled():
                self._forget(request)
            else:
                kept.append(request)
        return kept

    def _forget(self, request: Request) -> None:
        """Free the request's name, unless a new request has taken the name of this cancelled one."""
        if self._unsettled.get(request.request_id) is request:
            del self._unsettled[request.request_id]

    def _forget_cancelled(self) -> None:
        cancelled = [request for request in self._rounds.active if request.future.cancelled()]
        if cancelled:
            self._rounds.drop(cancelled)
            self._settle([Finished(request, "abort") for request in cancelled])

    def _settle(self, finished: list[Finished]) -> None:
        """Answer the callers of finished requests."""
        for outcome in finished:
            request = outcome.request
            with self._changed:
                self._forget(request)
                self._counts += request.counts()
            try:
                if outcome.error is not None:
                    request.future.set_exception(outcome.error)
                else:
                    speculating = self._rounds.drafter.speculating
                    request.future.set_result(request.rollout(outcome.reason, speculating=speculating))
            except InvalidStateError:
                pass  # was cancelled

    def _end(self, error: EngineError) -> None:
        with self._changed:
            asked, unsettled = list(self._asked), list(self._unsettled.values())
            self._asked.clear()
            self._waiting.clear()
            self._closed = True
        self._settle([Finished(request, None, error) for request in unsettled])
        for _, future in asked:
            future.set_exception(error)


def _answer(what: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(what())
    except Exception as error:
        future.set_exception(error)
