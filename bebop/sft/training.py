"""The training loop: steps, scores on held-out text, checkpoints, and at the end the policy directory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from bebop.acceptance import Acceptance, AnchorScores, concatenate, score_batches, summarise
from bebop.backbone import load_backbone
from bebop.config import Loss, Sft
from bebop.data.batches import TrainBatch
from bebop.errors import BadInput
from bebop.head_training.objective import REGRESSION, HeadObjective
from bebop.mtp import init_heads, load_heads, trained_depth
from bebop.mtp.content import PolicyContent
from bebop.sft.dataset import TextData
from bebop.sft.deepspeed import Trainer, deepspeed_config
from bebop.sft.export import export
from bebop.sft.job import Job
from bebop.sft.lr import loss_at, lr_at, mine, regression_at, resolve_warmup
from bebop.store.caches import name_of
from bebop.store.sinks import Sinks

log = logging.getLogger(__name__)
STATE = "sft_state"


class Training:
    """One process of a head training. Rank 0 writes the files."""

    def __init__(self, job: Job, device: str) -> None:
        config = job.config
        self.job, self.sft, self.temperature = job, config.sft, config.rollout.temperature
        backbone = load_backbone(job.policy_dir, dtype=getattr(torch, config.model.dtype), device=device)
        self.frozen = (backbone.embed_weight.float(), backbone.lm_head_weight.float())
        head = load_heads(job.policy_dir)
        # `prepare_policy` writes fresh heads into the policy, and records in bebop.json that they are not trained
        self.cold = head is None or trained_depth(job.policy_dir) == 0
        if head is None:
            head = init_heads(job.policy_dir, how=config.model.mtp_init, seed=config.seed)
        if not self.cold and self.sft.regression_steps:
            if not self.sft.steps:
                raise BadInput(
                    f"sft.steps=0 with sft.regression_steps={self.sft.regression_steps}: the policy has trained heads, "
                    "which regression is not for, so nothing would be trained; set sft.steps"
                )
            log.info("sft: no regression, the policy has trained heads")
            self.sft = self.sft.model_copy(update={"regression_steps": 0})
        self.loss = resolve_warmup(config.loss, cold=self.cold)
        whose = "fresh" if self.cold else "the policy's own"
        log.info("sft: %s heads, %sloss %s, %s", whose, _regression(self.sft), self.loss.name, _warmup(self.loss))
        self.objective = HeadObjective(
            head.float().to(device).train(),
            *self.frozen,
            self.sft.depth,
            self.loss,
            temperature=self.temperature,
            compute_dtype=getattr(torch, self.sft.compute_dtype),
            activation_checkpointing=self.sft.activation_checkpointing,
        )
        self.trainer = Trainer(self.objective, _deepspeed(job), self.sft.grad_clip)
        self.data = TextData(
            job.text_dir,
            backbone,
            depth=self.sft.depth,
            batch_tokens=self.sft.batch_tokens,
            seed=config.seed,
            cache_hidden=config.data.cache_hidden,
            policy=name_of(PolicyContent(job.policy_dir)),
        )
        self.sinks = Sinks(config.logger, job.run_dir, write=self.trainer.rank == 0)

    def run(self) -> None:
        trainer, steps = self.trainer, self.sft.regression_steps + self.sft.steps
        state = self._start()
        first, began = state["step"], time.monotonic()
        scored: Acceptance | None = None
        bar = tqdm(
            range(first, steps), desc=f"sft {self.loss.name}", initial=first, total=steps, disable=trainer.rank != 0
        )
        for step in bar:
            record, done = self._step(step), step + 1
            self.sinks.write("sft", record, step=done)
            length = f" AL {scored.acceptance_length:.2f}" if scored else ""
            bar.set_postfix_str(f"loss {record['loss']:.3f}{length}")
            if done % self.sft.eval_every == 0 and done != steps:
                scored = self._score(done)
            if done % self.sft.save_every == 0 or done == steps:
                trainer.save(self.job.run_dir / STATE, done, {**state, "step": done})
        by_task, scored = self._score_by_task()
        tensors = {name.removeprefix("head."): tensor for name, tensor in trainer.parameters().items()}
        if trainer.rank == 0:
            facts = {
                "acceptance_length_before": state["acceptance_length_before"],
                "heads_from": f"fresh, {self.job.config.model.mtp_init}" if self.cold else "the policy's own",
                "loss_warmup": self.loss.warmup,
                "regression_steps": self.sft.regression_steps,
                **self.data.entropy(self.temperature),
                "tasks": {task: each.as_dict() for task, each in by_task.items()},
                "left_out": dict(self.data.left_out),
                "num_sequences": self.data.num_sequences,
                "num_tokens": self.data.num_tokens,
                "train_loop_s": round(time.monotonic() - began, 2),
            }
            export(self.job, tensors, scored, facts)
        self.sinks.close()
        trainer.close()

    def _start(self) -> dict[str, Any]:
        """State of the last checkpoint, or of a new training."""
        identity = _identity(self.job)
        state = self.trainer.restore(self.job.run_dir / STATE)
        if state is None:
            return {
                "identity": identity,
                "step": 0,
                "acceptance_length_before": self._score(0).acceptance_length,
            }
        if state["identity"] != identity:
            raise BadInput(
                f"run_dir={self.job.run_dir}: its checkpoint was trained from another policy, text or config; "
                "choose another run_dir"
            )
        log.info("sft: resumes after step %d of %d", state["step"], self.sft.regression_steps + self.sft.steps)
        return {key: state[key] for key in ("identity", "step", "acceptance_length_before")}

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step (0-based), and its record."""
        began = time.monotonic()
        trainer, sft = self.trainer, self.sft
        part, at = regression_at(step, sft)
        regression = step < sft.regression_steps
        self.objective.loss_name = REGRESSION if regression else loss_at(at, sft.steps, self.loss)
        lr = lr_at(at, part)
        batches = self.data.stream.step(step, sft.grad_accum, trainer.world_size)
        own = mine(batches, trainer.rank, trainer.world_size)
        total = sum(batch.num_anchors for batch in batches)
        mean = trainer.step(
            [self.data.hidden.batch(batch) for batch in own], [batch.num_anchors for batch in own], total, lr
        )
        loss, *alpha = mean.tolist()
        if not math.isfinite(loss):
            raise BadInput(f"step {step + 1}: the loss is {loss}, expected a finite number; lower sft.lr")
        return {
            "loss": loss,
            "loss_name": self.objective.loss_name,
            # [K] mean overlap over the step's anchors, at the rollout's temperature
            **({} if regression else {"alpha": alpha}),
            "temperature": self.temperature,
            "lr": lr,
            "grad_norm": trainer.grad_norm(),
            "num_anchors": total,
            "num_tokens": sum(batch.packed.input_ids.numel() for batch in batches),
            "step_s": time.monotonic() - began,
        }

    def _score(self, done: int) -> Acceptance:
        """Scored acceptance on held-out text after `done` steps, on every rank."""
        with self.trainer.gathered():
            scored = summarise(self._scores(self.data.heldout()))
        self.sinks.write("sft_eval", scored.as_dict(), step=done)
        return scored

    def _score_by_task(self) -> tuple[dict[str, Acceptance], Acceptance]:
        """Scored acceptance after the last step, for each task and for all held-out text, from one pass."""
        with self.trainer.gathered():
            scores = {task: self._scores(batches) for task, batches in self.data.heldout_by_task()}
        scored = summarise(concatenate(list(scores.values())))
        self.sinks.write("sft_eval", scored.as_dict(), step=self.sft.regression_steps + self.sft.steps)
        return {task: summarise(each) for task, each in scores.items()}, scored

    def _scores(self, batches: Iterable[TrainBatch]) -> AnchorScores:
        return score_batches(self.objective.head, batches, *self.frozen, temperature=self.temperature)


def _warmup(loss: Loss) -> str:
    share = f"{loss.warmup_share:.0%} of the steps"
    return f"after {loss.warmup} for {share}" if loss.warmup and loss.warmup_share else "no warm-up"


def _regression(sft: Sft) -> str:
    return f"{sft.regression_steps} steps of hidden-state regression, then " if sft.regression_steps else ""


def _deepspeed(job: Job) -> dict[str, Any]:
    sft = job.config.sft
    return deepspeed_config(
        optimizer=sft.optimizer,
        zero_stage=sft.zero_stage,
        grad_accum=sft.grad_accum,
        grad_clip=sft.grad_clip,
        lr=sft.lr,
        weight_decay=sft.weight_decay,
    )


@dataclass(frozen=True)
class HeadInputs:
    """What the trained heads depend on."""

    policy: PolicyContent
    text: str
    seed: int
    config: Mapping[str, Any]


def _identity(job: Job) -> str:
    """Hash of everything on which the trained heads depend."""
    parts = {"model": {"dtype", "mtp_init"}, "loss": True, "sft": True, "rollout": {"temperature"}}
    config = job.config.model_dump(mode="json", include=parts)
    for key in ("eval_every", "save_every"):
        del config["sft"][key]
    return name_of(HeadInputs(PolicyContent(job.policy_dir, heads=True), job.text_dir.name, job.config.seed, config))
