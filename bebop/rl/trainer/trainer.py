"""bebop's trainers: verl's `sync` and `colocate_async`, with the monitor's records and the run's safeguards added.

Registered as `bebop_sync` and `bebop_colocate_async`. verl keeps the loop, the replay, the advantages, the corrections
and the checkpoints; `Safeguards` adds at its hooks

- a StepRecord per step, to metrics.jsonl and Weights & Biases;
- after each weight sync, checksums of what arrived at every rank of the engine against what was sent;
- the rollout-trainer probability difference, held to its limit on the samples of the current version;
- an end with the error, where verl would retry for ever: failed samples, a dead engine, a dead worker;
- checkpoints as a policy directory with heads, complete or absent, and every prompt trained exactly once over resumes.

On GPUs the same classes run over verl's CUDA platform; that path has not been run by this project's tests.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from bebop.errors import HeadsDiffer, ProbabilitiesDiffer, RolloutFailed, VerifierError
from bebop.records import StepRecord
from bebop.rl import checkpoints
from bebop.rl.rollout.agent import PartialRolloutClient, ServerManager
from bebop.rl.trainer import advantage
from bebop.rl.trainer.step_record import on_policy_gap, record_of
from bebop.rl.trainer.watchdog import Watchdog
from bebop.rl.trainer.worker import PolicyWorker
from bebop.verifiers import FAILURES


class Safeguards:
    """Mixed in before one of verl's trainers."""

    verl_mode: str
    queue_ready: Callable[[], object]  # waits for verl's TransferQueue; set by bebop.rl.trainer.process
    phase: Callable[[str], None] = staticmethod(lambda text: None)  # tells the console; set by bebop.rl.trainer.process

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl branches on its own names
        self.bebop = config.bebop
        self.run_dir = Path(config.bebop.run_dir)
        self.submitted = 0  # prompts taken out of the data so far, over all resumes
        self.checksums: dict[str, Any] = {}
        self.gap: float | None = None
        self.saved: int | None = None
        self.failed_shares: deque[float] = deque(maxlen=10)
        self.watchdog = Watchdog(config.bebop.watchdog_s)
        super().__init__(config)
        dynamic = bool((config.algorithm.get("filter_groups") or {}).get("enable"))
        self.prompts_wanted = None if dynamic else config.trainer.total_training_steps * config.data.train_batch_size

    # -- set-up -------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = self.bebop.poll_interval_s
        stock = buffer._sync_metadata_from_transfer_queue

        def look_first() -> None:
            self.watchdog.raise_fault()
            stock()
            if buffer.failure_keys["train"]:
                self._raise_failure(len(buffer.failure_keys["train"]))

        buffer._sync_metadata_from_transfer_queue = look_first
        return buffer

    def _raise_failure(self, groups: int) -> None:
        self.watchdog.raise_fault()
        errors = self.agent_loop_manager.pop_errors()
        last = errors[-1].strip() if errors else "no error was recorded"
        raise RolloutFailed(f"{groups} group(s) of responses failed: {last.splitlines()[-1]}\n{last}")

    def _init_resource_pool_mgr(self) -> None:
        self.phase("starting the trainer's worker")
        super()._init_resource_pool_mgr()
        stock = ray.remote(ActorRolloutRefWorker).__ray_metadata__.class_name
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_metadata__.class_name == stock:
                self.role_worker_mapping[role] = ray.remote(PolicyWorker)

    def on_init_end(self) -> None:
        self.phase("first weight sync")
        self.watchdog.watch(
            replying=self.llm_server_manager.server_handles,
            living=[*self.actor_rollout_wg.workers, *self.get_reward_handles()],
        )
        super().on_init_end()
        self._compare_weights()

    def fit(self, agent_loop_manager: Any) -> None:
        from bebop.rl.trainer.sinks import Sinks

        self.sinks = Sinks(self.run_dir, self.bebop, self.config.trainer, resumed_from=self.global_steps)
        self.phase(f"training, step {self.global_steps + 1} of {self.total_training_steps}")
        self.watchdog.watch(replying=agent_loop_manager.agent_loop_workers)
        try:
            super().fit(agent_loop_manager)
        finally:
            self.watchdog.stop()
            self.sinks.close()

    # -- prompts: each once, over resumes -----------------------------------------------------------------------

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        if self.prompts_wanted is not None:
            num_prompts = min(num_prompts, self.prompts_wanted - self.submitted)
        if num_prompts <= 0:
            return 0
        self.submitted += num_prompts
        return super()._add_prompts_to_generate(num_prompts)

    def _add_batch_to_generate(self) -> None:
        self._add_prompts_to_generate(self.config.data.train_batch_size)

    def _load_checkpoint(self) -> None:
        self.queue_ready()
        super()._load_checkpoint()
        trained = self.global_steps * self.config.data.train_batch_size
        self.submitted = trained + self._restored_tq_prompt_count
        self._forget_trained_responses()

    def _forget_trained_responses(self) -> None:
        """verl saves its queue before it clears the step's responses; without their prompt nothing would clear them."""
        items = (tq.kv_list("train") or {}).get("train", {})
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = [key for key in items if key not in prompts and key.split("_")[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id="train")

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        step = self.global_steps
        super()._save_checkpoint()
        dest = checkpoints.policy_dir(self.run_dir, step)
        provenance = {"made_by": "bebop.rl", "step": step, "source": str(self.bebop.policy_dir)}
        self.actor_rollout_wg.export_policy(str(self.bebop.policy_dir), str(dest), provenance)
        self.saved = step  # complete once the step's record is on the disk too

    # -- a step -------------------------------------------------------------------------------------------------

    def on_step_end(self) -> None:
        super().on_step_end()
        self._compare_weights()

    def _compare_weights(self) -> None:
        ours = self.actor_rollout_wg.policy_checksums()[0]
        answers = ray.get([server.served_checksums.remote() for server in self.llm_server_manager.server_handles])
        for theirs in itertools.chain(*answers):
            if theirs["num_head_tensors"] != ours["num_head_tensors"] or theirs["heads"] != ours["heads"]:
                raise HeadsDiffer(
                    f"the engine drafts with other heads than the trainer's: {theirs['num_head_tensors']} of "
                    f"{ours['num_head_tensors']} tensors, checksum {theirs['heads']} against {ours['heads']}"
                )
            if theirs["backbone"] != ours["backbone"]:
                raise HeadsDiffer(
                    "the engine serves another backbone than the trainer's, checksum "
                    f"{theirs['backbone']} against {ours['backbone']}"
                )
        self.checksums = {"ours": ours, "theirs": theirs}

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        overall = metrics.get("training/rollout_probs_diff_max")
        if overall is not None and not math.isfinite(overall):
            raise ProbabilitiesDiffer(
                f"step {self.global_steps}: rollout_probs_diff_max={overall}: the engine's log-probabilities are broken"
            )
        self.gap = on_policy_gap(batch, self.global_steps - 1)
        if self.gap is not None and not self.gap <= self.bebop.probs_diff_limit:
            raise ProbabilitiesDiffer(
                f"step {self.global_steps}: rollout and trainer probabilities differ by {self.gap:.2e} on samples of"
                f" the policy, above grpo.probs_diff_limit={self.bebop.probs_diff_limit:.0e}: the engine does not "
                "sample the policy that is trained"
            )
        return batch

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        record, prompt_ids = record_of(
            batch,
            global_steps,
            bebop=self.bebop,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            step_s=timing_raw.get("step"),
            gap=self.gap,
            checksums=self.checksums,
            metrics=metrics,
        )
        self.sinks.step(record, prompt_ids, total=self.total_training_steps)
        self._check_rewards(record)
        if self.saved == global_steps:
            checkpoints.mark_complete(self.run_dir, global_steps, submitted=self.submitted)
            checkpoints.prune(self.run_dir, self.bebop.keep_checkpoints)

    def _check_rewards(self, record: StepRecord) -> None:
        """Stop a run whose rewards fail: it would train on zeros."""
        share = record.extra.get("rewards/failed_share")
        if share is None:
            return
        self.failed_shares.append(share)
        mean = sum(self.failed_shares) / len(self.failed_shares)
        if mean > self.bebop.reward_failures_limit:
            kinds = {k: n for k in FAILURES if (n := int(record.extra[f"rewards/failed_{k}"]))}
            raise VerifierError(
                f"{mean:.0%} of the rewards of the last {len(self.failed_shares)} steps failed, in this step {kinds}, "
                f"expected at most {self.bebop.reward_failures_limit:.0%} (grpo.reward_failures_limit): mend the "
                "reward function, or raise grpo.reward_timeout_s"
            )


@register_trainer("bebop_sync")
class SyncTrainer(Safeguards, PPOTrainerSync):
    verl_mode = "sync"


@register_trainer("bebop_colocate_async")
class ColocateAsyncTrainer(Safeguards, PPOTrainerColocateAsync):
    verl_mode = "colocate_async"

    def get_llm_client(self) -> PartialRolloutClient:
        return self.llm_server_manager.get_client(client_cls=PartialRolloutClient)


def _load_replica() -> type:
    from bebop.rl.rollout.vllm_server import PolicyReplica

    return PolicyReplica


def _load_torch_replica() -> type:
    from bebop.rl.rollout.torch_server import TorchReplica

    return TorchReplica


RolloutReplicaRegistry.register("vllm", _load_replica)
RolloutReplicaRegistry.register("torch", _load_torch_replica)
ADVANTAGES = advantage.NAME  # registered by its import
trainer_base.LLMServerManager = ServerManager  # verl has no hook for it; see bebop.rl.rollout.agent
