"""Rollouts by vLLM: MTP speculation with rejection sampling, or plain decoding, over vLLM's AsyncLLM.

AsyncLLM runs on an event loop in its own thread, so callers may block (`generate`) or await (`agenerate`) anywhere.
Draft sampling is always set explicitly, because vLLM's default drafts greedily, so that acceptance is p(argmax q).

Version stamps: `update_weights` pauses the running requests, records how many tokens each has, loads the weights, and
resumes the requests. A token's version is the number of the last load before it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from bebop.config import RolloutSection
from bebop.config.draft_schedule import parse
from bebop.engines.protocol import Step, Weights
from bebop.engines.vllm_engine import draft_length, fixes
from bebop.engines.vllm_engine.arguments import engine_arguments, refuse_block, sampling_values, stamp
from bebop.engines.vllm_engine.environment import (
    GENERAL,
    LOG_ENV,
    PARENT_ENV,
    V2_RUNNER_ENV,
    applied,
    cpu_environment,
    last_error,
    missing,
)
from bebop.engines.vllm_engine.rules import verifies_blocks
from bebop.engines.weights import Digests, Layout, check_update
from bebop.errors import BadInput, EngineDied, EngineError, EngineRefused
from bebop.mtp.checkpoint import Tensors
from bebop.records import DraftCounts, Rollout, Sampling, WeightChecksums

logger = logging.getLogger("bebop.engines")

START_TIMEOUT_S = 600.0
SHUTDOWN_S = 10.0  # killed earlier, a busy machine's engine leaves semaphores behind, which Python warns of


class VllmEngine:
    """A running vLLM engine; the methods are described in `bebop.engines.protocol.RolloutEngine`."""

    def __init__(self, rollout: RolloutSection, policy_dir: Path, *, seed: int = 0, dtype: str = "float32") -> None:
        with applied(missing(GENERAL)):
            fixes.require()
        self.version = 0
        self.rollout = rollout
        self._layout = Layout(policy_dir)
        self._digests = Digests(self._layout, sampled=False)  # of the loaded tensors; the files' until an update
        self._ids = itertools.count()
        self._spans: dict[str, list[tuple[int, int]]] = {}  # request -> (tokens it had, version until then)
        self._counts = DraftCounts()
        self._steps: deque[Step] = deque(maxlen=100_000)
        self._paused = False
        self._llm: Any = None
        self._processes: list[Any] = []
        self._log = Path(tempfile.mkstemp(prefix="bebop-engine-", suffix=".log")[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bebop-vllm", daemon=True)
        self._thread.start()
        try:
            self._run(self._start(engine_arguments(rollout, policy_dir, seed=seed, dtype=dtype)), START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    async def _start(self, arguments: dict[str, Any]) -> None:
        on_cpu = fixes.on_cpu()
        # if the user has set a log level, the engine's output stays on the terminal
        log = {} if "VLLM_LOGGING_LEVEL" in os.environ else {LOG_ENV: str(self._log)}
        own = {PARENT_ENV: str(os.getpid()), **log}
        wanted = GENERAL | ({V2_RUNNER_ENV: "1"} if verifies_blocks(self.rollout) and not on_cpu else {})
        with applied(own | missing(wanted | (cpu_environment() if on_cpu else {}))):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            config = AsyncEngineArgs(**arguments).create_engine_config()
            refuse_block(self.rollout, on_cpu=on_cpu, v2_runner=config.use_v2_model_runner)
            self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger()])
        manager = getattr(getattr(self._llm.engine_core, "resources", None), "engine_manager", None)
        self._processes = list(getattr(manager, "processes", []))
        state = (await self._llm.collective_rpc("bebop_state"))[0]
        logger.info("engine state: %s", state)
        if state["weights"] != "finite":
            raise EngineRefused(state["weights"])
        if self.rollout.speculation == "mtp" and not state["expand_keeps_floats"]:
            message = "the engine cuts temperatures to integers: speculation at T != 1 is biased"
            if all(status == "off" for status in state["fixes"].values()):
                logger.warning("%s (%s=0)", message, fixes.FIXES_ENV)
            else:
                raise EngineRefused(f"{message}, and bebop's fix for it is not in place: {state['fixes']}")

    # -- sampling -----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        if seeds is not None and len(seeds) != len(prompts):
            raise EngineRefused(f"seeds: got {len(seeds)} for {len(prompts)} prompts, expected one per prompt")
        of_each = [sampling] * len(prompts) if seeds is None else [replace(sampling, seed=seed) for seed in seeds]
        return self._run(self._generate_all(prompts, of_each))

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self._run(self._score([int(token) for token in prompt])) for prompt in prompts]

    async def _score(self, prompt: list[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        request = f"bebop-{next(self._ids)}"
        results = [r async for r in self._llm.generate({"prompt_token_ids": prompt}, params, request)]
        after_first = zip(results[-1].prompt_logprobs[1:], prompt[1:], strict=True)
        return [row[token].logprob for row, token in after_first]

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Rollout:
        return await asyncio.wrap_future(self._submit(self._one(prompt_ids, sampling, request_id)))

    async def _generate_all(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Rollout]:
        pairs = zip(prompts, samplings, strict=True)
        tasks = [asyncio.ensure_future(self._one(prompt, sampling)) for prompt, sampling in pairs]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _one(self, prompt: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Rollout:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        values = sampling_values(sampling)
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, **values)
        request_id = request_id or f"bebop-{next(self._ids)}"
        if request_id in self._spans:
            raise EngineRefused(f"request_id: got {request_id!r}, which is running; use another id")
        self._spans[request_id] = []
        try:
            prompt_ids = [int(token) for token in prompt]
            results = [r async for r in self._llm.generate({"prompt_token_ids": prompt_ids}, params, request_id)]
        except Exception as error:
            raise self._translated(error) from error
        finally:
            spans = self._spans.pop(request_id)
        if not results:
            raise EngineError(f"request {request_id}: the engine returned nothing")
        return self._rollout(request_id, prompt_ids, results[-1].outputs[0], spans, sampling.logprobs)

    def _rollout(
        self, request_id: str, prompt: list[int], output: Any, spans: list[tuple[int, int]], want_logprobs: bool
    ) -> Rollout:
        tokens = tuple(output.token_ids)
        logprobs = None
        if want_logprobs:
            logprobs = tuple(row[token].logprob for row, token in zip(output.logprobs or (), tokens, strict=True))
        counted = output.spec_decode_metrics
        counts = None
        if counted is not None:
            stats = fixes.stats_of(counted)
            counts = DraftCounts(stats.num_verify_steps, stats.num_draft_tokens, stats.accepted_per_depth)
        return Rollout(
            request_id=request_id,
            prompt_ids=tuple(prompt),
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            versions=stamp(len(tokens), spans, self.version),
            counts=counts,
        )

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, tensors: Weights, version: int) -> WeightChecksums:
        from safetensors.torch import save_file

        named = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(tensors).items()}
        try:
            check_update(named, self._held_shapes(), self._layout.is_head)
        except BadInput as error:
            raise EngineRefused(str(error)) from None
        shared_memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
            path = Path(folder) / "update.safetensors"
            save_file(named, path)
            self._run(self._update(str(path), version))
        return self.checksums()

    def _held_shapes(self) -> dict[str, tuple[int, ...]]:
        without = self._layout.heads if self.rollout.speculation == "none" else ()
        return {name: shape for name, shape in self._layout.shapes.items() if name not in without}

    async def _update(self, path: str, version: int) -> None:
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            (arrived, *others) = await self._llm.collective_rpc("bebop_update", args=(path,))
            if any(other != arrived for other in others):
                raise EngineError("the engine's ranks were given different weights")
            self._digests.found |= {name: bytes.fromhex(found) for name, found in arrived.items()}
            self._note_spans()
            self.version = version
            # the old weights' keys and values must not be used for new requests; those of running requests are computed
            # again
            if not await self._llm.reset_prefix_cache():
                await self._llm.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            raise self._translated(error) from error
        finally:
            if not self._paused and not self._dead():
                await self._llm.resume_generation()

    def _note_spans(self) -> None:
        for state in self._llm.output_processor.request_states.values():
            if state.external_req_id in self._spans:
                had = state.detokenizer.num_output_tokens()
                self._spans[state.external_req_id].append((had, self.version))

    def checksums(self) -> WeightChecksums:
        self._require_life()
        if self._dead():
            raise EngineDied(self._obituary(EngineError("its process is gone")))
        files = Tensors(self._layout.path)
        for name in self._held_shapes().keys() - self._digests.found.keys():
            self._digests.note(name, files[name])
        return self._digests.checksums()

    # -- life ---------------------------------------------------------------------------------------------------

    def pause(self, mode: Literal["abort", "keep"] = "keep") -> None:
        if mode not in ("abort", "keep"):
            raise EngineRefused(f"mode: got {mode!r}, expected abort or keep")
        self._paused = True
        self._run(self._pause(mode))

    def resume(self) -> None:
        self._paused = False
        self._run(self._resume())

    async def _pause(self, mode: Literal["abort", "keep"]) -> None:
        await self._llm.pause_generation(mode=mode, clear_cache=False)

    async def _resume(self) -> None:
        await self._llm.resume_generation()

    def counts(self) -> DraftCounts:
        return self._counts

    def take_steps(self) -> list[Step]:
        steps = list(self._steps)
        self._steps.clear()
        return steps

    def set_draft_schedule(self, schedule: Mapping[str, int]) -> None:
        if self.rollout.draft_schedule is None:
            raise EngineRefused(
                "draft schedule: the engine was started without one; set rollout.draft_schedule to start it with one"
            )
        most = max(entry.k for entry in parse(schedule))
        if most > self.rollout.num_speculative_tokens:
            raise EngineRefused(
                f"draft schedule: got {most} draft tokens, expected at most rollout.num_speculative_tokens="
                f"{self.rollout.num_speculative_tokens}, with which the engine was started"
            )
        lengths = draft_length.lookup(schedule, self.rollout.max_num_seqs)
        self._run(self._llm.engine_core.call_utility_async(draft_length.METHOD, lengths))

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            if all(process.is_alive() for process in self._processes):
                self._log.unlink(missing_ok=True)  # kept only if it shows why the engine died
            self._loop.call_soon_threadsafe(llm.shutdown, SHUTDOWN_S)
            for process in self._processes:
                process.join(timeout=20)
                if process.is_alive():
                    process.kill()
                    process.join(timeout=5)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        try:
            self._require_life()
        except EngineError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        future = self._submit(coroutine)
        try:
            return future.result(timeout)
        except BaseException as error:
            future.cancel()
            if isinstance(error, Exception):
                translated = self._translated(error)
                if translated is not error:
                    raise translated from error
            raise

    def _require_life(self) -> None:
        if not self._thread.is_alive():
            raise EngineError("the engine is closed")

    def _dead(self) -> bool:
        return self._llm.errored or any(not process.is_alive() for process in self._processes)

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, EngineError):
            return error
        if self._llm is None:
            return EngineRefused(f"vLLM did not start: {last_error(self._log) or _root(error)}{self._see_log()}")
        if self._dead():
            return EngineDied(self._obituary(error))
        if isinstance(error, (ValueError, TypeError)):
            return EngineRefused(f"vLLM refused the request: {_root(error)}")
        return EngineError(_root(error))

    def _obituary(self, error: Exception) -> str:
        reason = last_error(self._log) or _root(error)
        for process in self._processes:
            process.join(timeout=2)  # it may still be ending
            if process.exitcode is not None and process.exitcode < 0:
                reason = f"process {process.pid} was killed by signal {-process.exitcode}"
        return f"vLLM's engine died: {reason}{self._see_log()}"

    def _see_log(self) -> str:
        return f"; its log is {self._log}" if self._log.is_file() and self._log.stat().st_size else ""

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class Counter(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                drafted = getattr(scheduler_stats, "spec_decoding_stats", None)
                if scheduler_stats is not None and iteration_stats is not None:
                    engine._steps.append(
                        Step(
                            ended_s=time.perf_counter(),
                            running=scheduler_stats.num_running_reqs,
                            prompt_tokens=iteration_stats.num_prompt_tokens,
                            tokens=iteration_stats.num_generation_tokens,
                            drafts=drafted.num_drafts if drafted is not None else 0,
                        )
                    )
                if drafted is not None:
                    per_depth = tuple(drafted.num_accepted_tokens_per_pos)
                    engine._counts += DraftCounts(drafted.num_drafts, drafted.num_draft_tokens, per_depth)

            def log_engine_initialized(self) -> None: ...

        return Counter


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
