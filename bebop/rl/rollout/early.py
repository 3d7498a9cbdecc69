"""The rollout server, started ahead of its turn: most of a run's start-up is imports, done here side by side.

verl starts its actors one after the other: the trainer's worker first, then a rollout server that imports vLLM, then
the engine's process, which imports it again. The server depends on the config alone, so it is created as soon as Ray
is up, and verl's replica adopts it later. For one replica on a machine without GPUs, where no device has to be handed
over.
"""

from __future__ import annotations

from typing import Any

# A server's calls at once, all of them waiting in its event loop: with more samples in flight than verl's 1000 its
# health and an abort would wait behind them, and the watchdog take it for dead.
CALLS_AT_ONCE = 1 << 16

_server: Any = None


def start(config: Any) -> None:
    """Create the server's actor and have it launch the engine; returns at once."""
    global _server
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

    rollout = config.actor_rollout_ref.rollout
    replica = RolloutReplicaRegistry.get(rollout.name)(0, rollout, config.actor_rollout_ref.model, gpus_per_node=1)
    name = f"{replica._get_server_name_prefix()}server_0_0"
    _server = replica.server_class.options(name=name, max_concurrency=replica.max_concurrency).remote(
        config=replica.config,
        model_config=replica.model_config,
        rollout_mode=RolloutMode.HYBRID,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="0",
    )
    _server.launch_server.remote()


def server_class(otherwise: Any) -> Any:
    """What verl's replica creates its server from: the early one where there is one."""
    return otherwise if _server is None else _Adopted()


class _Adopted:
    """Stands for a Ray actor class; its "new" actor is the early one."""

    def options(self, **_: Any) -> _Adopted:
        return self

    def remote(self, **_: Any) -> Any:
        return _server
