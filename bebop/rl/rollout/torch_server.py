"""The rollout server of bebop's own engine, for draft trees in GRPO. It has the methods that verl 0.9.1 calls:

| who calls                      | what                                                                    |
|--------------------------------|-------------------------------------------------------------------------|
| the agent loop                 | generate                                                                |
| the trainer, around a step     | abort_all_requests, sleep, resume_generation                            |
| the trainer's worker           | update_weights, see `bebop.rl.rollout.torch_rollout`                            |
| bebop's trainer and watchdog   | served_checksums, health                                                |

The engine runs in this actor's process. Requests that arrive between an abort and `resume_generation` wait, so that
none of them is sampled with the old weights. vLLM is not imported.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from bebop.config import RolloutSection
from bebop.engines import RolloutEngine, make_engine
from bebop.engines.weights import Digests, Layout
from bebop.errors import HeadsDiffer, RolloutFailed
from bebop.records import Rollout, Sampling

CALLS_AT_ONCE = 1 << 16  # more than samples in flight, so that health checks and aborts need not wait for them
NAME = "torch"  # verl's rollout.name, and the prefix of its actors' names
DRAINED_S = 0.01  # how often `sleep` looks whether the last request has left


class TorchServer:
    """One replica's server actor."""

    def __init__(self, *, config: Any, model_config: Any, replica_rank: int, cuda_visible_devices: str) -> None:
        os.environ[get_visible_devices_keyword()] = cuda_visible_devices
        self.config, self.policy_dir, self.replica_rank = config, model_config.path, replica_rank
        self.engine: RolloutEngine | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._running = 0
        self._arrived: Digests | None = None
        self._held_heads: str | None = None

    async def launch_server(self) -> None:
        """Start the engine."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        section = RolloutSection.model_validate(self.config.custom["bebop"])
        seed = replica_seed(self.config.seed, self.replica_rank)
        self.engine = make_engine(section, self.policy_dir, seed=seed, dtype=self.config.dtype)

    async def generate(
        self, prompt_ids: Any, sampling_params: Mapping[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """Sample one response. If an abort ends it early, it returns as "aborted", with its counts."""
        given = [name for name, value in media.items() if value is not None]
        if given:
            raise RolloutFailed(f"generate: got {', '.join(given)}; rollout.engine=torch samples text only")
        prompt = normalize_token_ids(prompt_ids)
        sampling = sampling_of(sampling_params, room=room(self.config, len(prompt)))
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        try:
            rollout = await self.engine.agenerate(prompt, sampling, request_id)
        finally:
            self._running -= 1
        return token_output(rollout, self.engine.version)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort running requests and hold new ones until `resume_generation`."""
        if reject_request:  # for replicas that are added and removed, which bebop does not support
            raise RolloutFailed("reject_request=True: rollout.engine=torch holds requests and rejects none")
        self._open.clear()
        await asyncio.to_thread(self.engine.pause, "abort")

    async def sleep(self) -> None:
        """Wait until the last request has ended; the engine keeps its memory."""
        while self._running:
            await asyncio.sleep(DRAINED_S)

    async def resume_generation(self) -> None:
        await asyncio.to_thread(self.engine.resume)
        self._open.set()

    async def update_weights(self, path: str, version: int) -> None:
        """Load the tensors of a safetensors file into the engine, in place."""
        await asyncio.to_thread(self._update, path, version)

    def _update(self, path: str, version: int) -> None:
        from safetensors.torch import load_file

        named = load_file(path)
        held = self.engine.update_weights(named, version)
        if self._arrived is None:
            self._arrived = Digests(Layout(Path(self.policy_dir)))
        for name, tensor in named.items():
            self._arrived.note(name, tensor)
        if not any(map(self._arrived.layout.is_head, named)) and held.heads != self._held_heads:
            raise HeadsDiffer("the engine's heads changed in an update that brought no head tensor")
        self._held_heads = held.heads

    async def served_checksums(self) -> list[dict[str, Any]]:
        """Checksums of the weights that arrived last, as a list of one rank."""
        return [asdict(self._arrived.checksums())]

    async def health(self) -> str:
        """Raises with the engine's own error once it is dead."""
        if self.engine is not None:
            self.engine.counts()
        return "alive"


class TorchReplica(RolloutReplica):
    """verl's replica with our server: one process, one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TorchServer)

    @property
    def max_concurrency(self) -> int:
        return CALLS_AT_ONCE

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        node, device = await worker.__ray_call__.remote(_place)
        platform = get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        server = self.server_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": variables},
            name=f"{self._get_server_name_prefix()}server_{self.replica_rank}_0",
            max_concurrency=self.max_concurrency,
        ).remote(
            config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            cuda_visible_devices=device,
        )
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"{NAME}:{self.replica_rank}"

    def _get_server_name_prefix(self) -> str:
        return f"{NAME}_"


def _place(worker: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


def replica_seed(seed: int, rank: int) -> int:
    """Seed of one replica. Run seed and rank are hashed together, since seed + rank would equal another run's seed."""
    return random.Random(f"{seed}/{rank}").getrandbits(63)


def room(config: Any, num_prompt_tokens: int) -> int:
    """Largest number of tokens of a response: the configured length, if the engine has room for it."""
    left = config.max_model_len - num_prompt_tokens
    if left < 1:
        raise RolloutFailed(
            f"a prompt of {num_prompt_tokens} tokens leaves no room in rollout.max_model_len={config.max_model_len}"
        )
    return min(left, config.response_length, max(1, config.prompt_length + config.response_length - num_prompt_tokens))


def sampling_of(params: Mapping[str, Any], *, room: int) -> Sampling:
    """verl's sampling parameters as bebop's. Raises RolloutFailed for a parameter that would be ignored."""
    params = dict(params)
    asked = params.pop("max_new_tokens", None)
    if params.pop("repetition_penalty", 1.0) != 1.0:
        raise RolloutFailed("repetition_penalty: rollout.engine=torch samples the policy itself; leave it at 1.0")
    known = [field.name for field in fields(Sampling)]
    if unknown := [name for name in params if name not in known]:
        raise RolloutFailed(f"sampling parameter {unknown[0]}: rollout.engine=torch knows {', '.join(known)}")
    wanted = params.pop("max_tokens", asked)
    params["top_k"] = max(0, params.get("top_k") or 0)  # verl writes "off" as -1
    params["stop_token_ids"] = tuple(params.get("stop_token_ids") or ())
    if "logprobs" in params:
        params["logprobs"] = bool(params["logprobs"])  # verl's flag, which may be a number
    return Sampling(max_tokens=room if wanted is None else max(1, min(wanted, room)), **params)


def token_output(rollout: Rollout, version: int) -> TokenOutput:
    """A rollout in verl's terms. version: the engine's current one, used for a response without tokens."""
    fields: dict[str, Any] = {"global_steps": rollout.versions[-1] if rollout.versions else version}
    if rollout.counts is not None:
        fields |= {
            "spec_num_draft_tokens": rollout.counts.num_draft_tokens,
            "spec_num_accepted_tokens": sum(rollout.counts.accepted_per_depth),
            "spec_num_verify_steps": rollout.counts.num_drafts,
            "spec_accepted_per_depth": list(rollout.counts.accepted_per_depth),
        }
    return TokenOutput(
        token_ids=list(rollout.token_ids),
        log_probs=None if rollout.logprobs is None else list(rollout.logprobs),
        stop_reason="aborted" if rollout.finish_reason == "abort" else "completed",
        extra_fields=fields,
    )


RolloutReplicaRegistry.register(NAME, lambda: TorchReplica)
