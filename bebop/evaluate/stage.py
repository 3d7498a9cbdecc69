"""Samples prompts of data.tasks through the engine at the rollout's temperature, then scores the heads on that text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bebop.backbone import load_backbone, prepare_policy
from bebop.config import ConfigError, EvalConfig
from bebop.data import load_tokenizer, make_prompts, score
from bebop.data.distill import TextRow, sample_all
from bebop.data.given import load_parquet
from bebop.engines import make_engine
from bebop.evaluate.table import Row, render, rows_of, write_csv
from bebop.monitor import check_wandb, write_summary
from bebop.mtp import load_heads
from bebop.records import DraftCounts, Prompt, Rollout
from bebop.sft.batches import HiddenStates, pack_rows, trainable
from bebop.sft.launch import device_name
from bebop.sft.scoring import Acceptance
from bebop.sft.scoring import score as score_heads
from bebop.sft.sinks import Sinks
from bebop.sft.text import encode_prompts, rollout_sampling

BATCH_TOKENS = 4096
ALL = "all"


def run(config: EvalConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate the policy of `config.model`; writes eval.csv, a record in metrics.jsonl and summary.json to `run_dir`.

    Returns the summary. Raises ConfigError where the policy has no heads.
    """
    check_wandb(config.logger.wandb)
    policy_dir = prepare_policy(config.model, config.seed)
    head = load_heads(policy_dir)
    if head is None:
        raise ConfigError(f"model: {policy_dir} has no MTP heads to evaluate; train some with `sft` and set model.path")
    tokenizer = load_tokenizer(policy_dir)
    prompts = encode_prompts(_prompts(config, tokenizer), config.data, tokenizer)
    rollouts = _sample(config, policy_dir, [ids for _, ids in prompts])
    rewards = [
        score(prompt, tokenizer.decode(rollout.token_ids, skip_special_tokens=True)) if prompt.entry else None
        for (prompt, _), rollout in zip(prompts, rollouts, strict=True)
    ]
    tasks = sorted({prompt.task for prompt, _ in prompts})
    scorer = _Scorer(config, policy_dir, head)
    rows: list[Row] = []
    per_task: dict[str, Any] = {}
    for task in [*tasks, ALL] if len(tasks) > 1 else [ALL]:
        chosen = [i for i, (prompt, _) in enumerate(prompts) if task in (ALL, prompt.task)]
        counts = _pooled([rollouts[i] for i in chosen])
        scored = scorer([_row(prompts[i][0], rollouts[i]) for i in chosen])
        rows += rows_of(task, counts, scored)
        known = [reward for i in chosen if (reward := rewards[i]) is not None]
        per_task[task] = {
            "num_prompts": len(chosen),
            "reward_mean": sum(known) / len(known) if known else None,
            "response_tokens": sum(len(rollouts[i].token_ids) for i in chosen),
            "counts": asdict(counts) if counts else None,
            "acceptance_length": counts.acceptance_length if counts else None,
            "conditional_acceptance": counts.conditional_acceptance if counts else None,
            "scored": scored.as_dict(),
        }
    summary = {
        "policy": str(policy_dir),
        "temperature": config.rollout.temperature,
        "rule": config.rollout.rule if config.rollout.speculation == "mtp" else None,
        "num_speculative_tokens": config.rollout.num_speculative_tokens,
        "depth": config.depth,
        "tasks": per_task,
    }
    write_csv(run_dir / "eval.csv", rows)
    with Sinks(config.logger, run_dir) as sinks:
        sinks.write("eval", {**summary, "rows": [asdict(row) for row in rows]})
    write_summary(run_dir, summary)
    print(render(rows) + "\n" + describe(summary), flush=True)
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Acceptance lengths of all tasks together, each with its definition."""
    every = summary["tasks"][ALL]
    scored, sampled = every["scored"], every["acceptance_length"]
    reward = every["reward_mean"]
    return (
        f"acceptance length at T = {summary['temperature']:g}: "
        + (f"sampled {sampled:.3f} ({summary['rule']}, pooled), " if sampled is not None else "no drafts sampled, ")
        + f"scored {scored['acceptance_length']:.3f} +- {scored['acceptance_length_se']:.3f} (rejection), "
        + f"{scored['acceptance_length_target_only']:.3f} (target-only); entropy {scored['entropy_nats']:.3f} nats"
        + (f"; reward {reward:.3f}" if reward is not None else "")
    )


def _prompts(config: EvalConfig, tokenizer: Any) -> list[Prompt]:
    data = config.data
    if data.path is None:
        return make_prompts(data.tasks, data.num_heldout, config.seed, "eval")
    given = load_parquet(data.path, tokenizer, max_tokens=config.rollout.max_model_len)[: data.num_heldout]
    prompts = [prompt for prompt in given if isinstance(prompt, Prompt)]
    if not prompts:
        raise ConfigError(
            f"data.path={data.path}: eval samples its own text and needs a column `prompt` without `response`"
        )
    return prompts


def _sample(config: EvalConfig, policy_dir: Path, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
    rollout = config.rollout
    with make_engine(rollout, policy_dir, seed=config.seed, dtype=config.model.dtype) as engine:
        return sample_all(engine, prompts, rollout_sampling(config), title="eval")


def _row(prompt: Prompt, rollout: Rollout) -> TextRow:
    mask = (1,) * len(rollout.token_ids)
    return TextRow(prompt.prompt_id, prompt.task, rollout.prompt_ids, rollout.token_ids, mask, rollout.logprobs)


def _pooled(rollouts: Sequence[Rollout]) -> DraftCounts | None:
    counts = [rollout.counts for rollout in rollouts if rollout.counts is not None]
    return sum(counts[1:], counts[0]) if counts else None


class _Scorer:
    """Rows of sampled text -> scored acceptance at the rollout's temperature."""

    def __init__(self, config: EvalConfig, policy_dir: Path, head: torch.nn.Module) -> None:
        device = device_name()
        dtype = getattr(torch, config.model.dtype)
        self._backbone = load_backbone(policy_dir, dtype=dtype, device=device)
        self._head = head.float().to(device)
        self._depth, self._temperature = config.depth, config.rollout.temperature

    def __call__(self, rows: Sequence[TextRow]) -> Acceptance:
        rows = trainable(rows, self._depth, "sampled text")
        longest = max(len(row.input_ids) for row in rows)
        tokens = max(BATCH_TOKENS, longest)
        hidden = HiddenStates(self._backbone, rows, tokens, name="sampled text")
        return score_heads(
            self._head,
            (hidden.batch(batch) for batch in pack_rows(rows, range(len(rows)), tokens, self._depth)),
            self._backbone.embed_weight.float(),
            self._backbone.lm_head_weight.float(),
            depth=self._depth,
            temperature=self._temperature,
        )
