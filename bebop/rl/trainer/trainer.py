"""bebop's trainers: verl's `sync` and `colocate_async` with records and safeguards.

Registered as `bebop_sync` and `bebop_colocate_async`. The loop, the replay buffer, the advantages, the importance
correction and the checkpoints are verl's. `Safeguards` adds, at verl's hooks:

- a StepRecord for each step, in metrics.jsonl and Weights & Biases;
- after each weight sync, a comparison of checksums: what was sent against what arrived at every rank of the engine;
- a limit on the difference of rollout and trainer probabilities, for samples of the current policy version;
- an error where verl would retry forever: failed samples, a dead engine, a dead worker;
- checkpoints with the policy as a directory with its heads; each prompt is trained on once, also over resumes.

On GPUs the same classes run with verl's CUDA platform; this project's tests have not run that.
This module is imported in each of verl's processes to register the trainers. What imports verl's workers is imported
where it is used, because those modules import verl, and so this one, themselves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from bebop.engines import ENGINES
from bebop.errors import HeadsDiffer, ProbabilitiesDiffer, RolloutFailed, VerifierError
from bebop.processes import ErrorFile
from bebop.records import StepRecord
from bebop.rl import checkpoints
from bebop.rl.stage import ERROR
from bebop.rl.trainer import advantage  # noqa: F401 - its decorator registers
from bebop.rl.trainer.sinks import Console, Sinks
from bebop.rl.trainer.step_record import on_policy_gap, record_of
from bebop.rl.trainer.watchdog import Watchdog
from bebop.rl.verl.config import complete
from bebop.verifiers import FAILURES


class Safeguards:
    """A mixin that stands before one of verl's trainers in a class's bases."""

    verl_mode: str  # verl's own name of the mode

    def __init__(self, config: DictConfig) -> None:
        complete(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl branches on its own names
        self.bebop = config.bebop
        self.run_dir = Path(config.bebop.run_dir).resolve()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.error_file = ErrorFile(self.run_dir / ERROR)
        self.error_file.clear()
        self.console = Console(self.run_dir)
        self.submitted = 0  # prompts taken out of the data so far, over all resumes
        self.checksums: dict[str, Any] = {}
        self.gap: float | None = None
        self.saved: int | None = None
        self.failed_shares: deque[float] = deque(maxlen=10)
        self.watchdog = Watchdog(config.bebop.watchdog_s, self._end_now)
        super().__init__(config)

    @contextlib.contextmanager
    def _error_written(self) -> Iterator[None]:
        """Write the error of the block to the run folder, in its own words: Ray wraps it on its way to the caller."""
        try:
            yield
        except BaseException as error:
            self.error_file.write(error)
            raise

    def _end_now(self, error: Exception) -> None:
        """Write the error and end this process at once: its main thread is stuck and cannot raise it."""
        traceback.print_exception(error)
        self.error_file.write(error)
        os._exit(1)

    # -- set-up -------------------------------------------------------------------------------------------------

    def init(self) -> None:
        with self._error_written():
            super().init()

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
        from bebop.rl.trainer.worker import PolicyWorker

        self.console.say("starting the trainer's worker")
        super()._init_resource_pool_mgr()
        stock = ray.remote(ActorRolloutRefWorker).__ray_metadata__.class_name
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_metadata__.class_name == stock:
                self.role_worker_mapping[role] = ray.remote(PolicyWorker)

    def on_init_end(self) -> None:
        self.console.say("first weight sync")
        self.watchdog.watch(
            replying=self.llm_server_manager.server_handles,
            living=[*self.actor_rollout_wg.workers, *(self.get_reward_handles() or [])],
        )
        super().on_init_end()
        self._compare_weights()

    def fit(self, agent_loop_manager: Any) -> None:
        self.console.say(f"training, step {self.global_steps + 1} of {self.total_training_steps}")
        settings = self.bebop, self.config.trainer, self.console
        self.sinks = Sinks(self.run_dir, *settings, resumed_from=self.global_steps)
        self.watchdog.watch(replying=agent_loop_manager.agent_loop_workers)
        with self._error_written():
            try:
                super().fit(agent_loop_manager)
            finally:
                self.watchdog.stop()
                self.sinks.close()

    # -- prompts: each once, also over resumes ------------------------------------------------------------------

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        if not (self.config.algorithm.get("filter_groups") or {}).get("enable"):
            wanted = self.total_training_steps * self.config.data.train_batch_size
            num_prompts = min(num_prompts, wanted - self.submitted)
        if num_prompts <= 0:
            return 0
        self.submitted += num_prompts
        return super()._add_prompts_to_generate(num_prompts)

    def _add_batch_to_generate(self) -> None:
        self._add_prompts_to_generate(self.config.data.train_batch_size)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trained = self.global_steps * self.config.data.train_batch_size
        self.submitted = trained + self._restored_tq_prompt_count
        self._forget_trained_responses()

    def _forget_trained_responses(self) -> None:
        """Clear responses without a prompt: verl saves its queue before it clears the step's responses."""
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
        self.saved = step  # complete once the step's record is written too

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

    def get_llm_client(self) -> Any:
        from bebop.rl.rollout.agent import PartialRolloutClient

        return self.llm_server_manager.get_client(client_cls=PartialRolloutClient)


def _load_replica(engine: str) -> type:
    """Import the engine's server, which registers itself with verl in this function's place, and return its class."""
    importlib.import_module(ENGINES[engine].verl_server)
    return RolloutReplicaRegistry.get(engine)


for _engine in ENGINES:
    if ENGINES[_engine].verl_server is not None:
        RolloutReplicaRegistry.register(_engine, functools.partial(_load_replica, _engine))
