"""Samples prompts through the engine at every temperature asked for, then scores the heads on that text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bebop.acceptance.per_document import Anchors, score_text
from bebop.acceptance.scores import acceptance_of
from bebop.backbone import Backbone, load_backbone
from bebop.config import EvalConfig
from bebop.data import load_tokenizer, make_prompts, score
from bebop.data.prompts import encode_prompts
from bebop.data.provided import load_parquet
from bebop.data.self_distill import TextRow, rollout_sampling, sample_all
from bebop.engines import make_engine
from bebop.errors import ConfigError
from bebop.evaluate import samples, slopes
from bebop.evaluate.agreement import Agreement, compare
from bebop.evaluate.figures import write_figures
from bebop.evaluate.table import Row, render, rows_of, write_csv
from bebop.monitor import check_wandb, write_summary
from bebop.mtp import checkpoint_checksums, load_heads
from bebop.policies import prepare_policy
from bebop.records import DraftCounts, Prompt, Rollout
from bebop.store.environment import device_name
from bebop.store.sinks import Sinks

log = logging.getLogger(__name__)
ALL = "all"


def run(config: EvalConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate the policy of `config.model`; writes the responses, eval.csv, figures, a record in metrics.jsonl and
    summary.json to `run_dir`. Responses that are there already, by the same policy to the same prompts, are taken.

    Returns the summary: its top level is of the first temperature, `by_temperature` has all. Raises ConfigError where
    the policy has no heads.
    """
    check_wandb(config.logger.wandb)
    policy_dir = prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    head = load_heads(policy_dir)
    if head is None:
        raise ConfigError(f"model: {policy_dir} has no MTP heads to evaluate; train some with `sft` and set model.path")
    tokenizer = load_tokenizer(policy_dir)
    encoded = encode_prompts(_prompts(config, tokenizer), config.data, tokenizer)
    prompts = [prompt for prompt, _ in encoded]
    sampled = _sample(config, policy_dir, [ids for _, ids in encoded], run_dir)
    device = device_name()
    backbone = load_backbone(policy_dir, dtype=getattr(torch, config.model.dtype), device=device)
    head = head.float().to(device)

    rows: list[Row] = []
    by_temperature, sweep = {}, {}
    of_task = _by_task(prompts)
    comparisons = len(of_task) * len(sampled)
    for temperature, rollouts in sampled.items():
        anchors = _scored(config, backbone, head, prompts, rollouts, temperature)
        sweep[temperature] = anchors
        rewards = [
            score(prompt, tokenizer.decode(rollout.token_ids, skip_special_tokens=True)) if prompt.entry else None
            for prompt, rollout in zip(prompts, rollouts, strict=True)
        ]
        tasks: dict[str, Any] = {}
        for task, chosen in of_task.items():
            found, task_rows = _task(config, task, chosen, rollouts, rewards, anchors, comparisons)
            tasks[task], rows = found, rows + task_rows
        by_temperature[temperature] = {"temperature": temperature, "tasks": tasks}
    token_slopes = {t: _token_slope(anchors) for t, anchors in sweep.items()}
    for temperature, slope in token_slopes.items():
        by_temperature[temperature]["slope_over_tokens"] = slope.as_dict()
    write_csv(run_dir / "eval.csv", rows)
    first = by_temperature[next(iter(sampled))]
    summary = {
        "policy": str(policy_dir),
        "temperature": first["temperature"],
        "rule": config.rollout.acceptance_rule if config.rollout.speculation == "mtp" else None,
        "num_speculative_tokens": config.rollout.draft_depth,
        "depth": config.depth,
        "tasks": first["tasks"],
        "slope_over_tokens": first["slope_over_tokens"],
        "slope_over_temperatures": _temperature_slope(sweep, len(prompts)).as_dict(),
        "by_temperature": list(by_temperature.values()),
        "alarms": [line for entry in by_temperature.values() for line in _alarms(entry)],
        "figures": write_figures(run_dir, sweep, token_slopes),
    }
    with Sinks(config.logger, run_dir) as sinks:
        sinks.write("eval", {**summary, "rows": [asdict(row) for row in rows]})
    write_summary(run_dir, summary)
    print(render(rows) + "\n" + describe(summary), flush=True)
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Acceptance lengths of all tasks together at each temperature, the slopes, and what does not agree."""
    lines = []
    for entry in summary["by_temperature"]:
        every = entry["tasks"][ALL]
        scored, sampled, reward = every["scored"], every["acceptance_length"], every["reward_mean"]
        lines.append(
            f"acceptance length at T = {entry['temperature']:g}: "
            + (f"sampled {sampled:.3f} ({summary['rule']}, pooled), " if sampled is not None else "no drafts sampled, ")
            + f"scored {scored['acceptance_length']:.3f} ± {every['acceptance_length_se']:.3f} (rejection; product of "
            f"alphas {scored['acceptance_length_product']:.3f}), {scored['acceptance_length_block']:.3f} (block), "
            f"{scored['acceptance_length_target_only']:.3f} (target-only); entropy {scored['entropy_nats']:.3f} nats"
            + (f"; reward {reward:.3f}" if reward is not None else "")
        )
        lines.append(f"  slope over tokens: {_slope_text(entry['slope_over_tokens'])}")
    if len(summary["by_temperature"]) > 1:
        lines.append(f"slope over temperatures: {_slope_text(summary['slope_over_temperatures'])}")
    return "\n".join([*lines, *(f"ALARM: {line}" for line in summary["alarms"])])


def _slope_text(slope: dict[str, Any]) -> str:
    if slope["status"] != "ok":
        return f"undetermined, {slope['reason']}"
    return (
        f"{slope['slope']:+.3f} [{slope['low']:+.3f}, {slope['high']:+.3f}] tokens per nat, relative to the length "
        f"{slope['relative']:+.4f} [{slope['relative_low']:+.4f}, {slope['relative_high']:+.4f}]"
    )


def _by_task(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    tasks = sorted({prompt.task for prompt in prompts})
    found = {task: [i for i, prompt in enumerate(prompts) if prompt.task == task] for task in tasks}
    return {**(found if len(tasks) > 1 else {}), ALL: list(range(len(prompts)))}


def _task(
    config: EvalConfig,
    task: str,
    chosen: Sequence[int],
    rollouts: Sequence[Rollout],
    rewards: Sequence[float | None],
    all_anchors: Anchors,
    comparisons: int,
) -> tuple[dict[str, Any], list[Row]]:
    """What the summary says of one task at one temperature, one of `comparisons` of the run, and its rows."""
    anchors = all_anchors.of(chosen)
    if not len(anchors.response):
        raise ConfigError(f"task {task}: no response of its {len(chosen)} prompts has 2 tokens; give more prompts")
    counts = _pooled([rollouts[i] for i in chosen])
    counted = {i: c for i in chosen if (c := rollouts[i].counts) is not None}
    agreement = _agreement(config, anchors, counted, comparisons)
    scored = acceptance_of(anchors.statistics, all_anchors.temperature)
    errors = [_clustered_error(value, anchors.response) for value in anchors.accepted["rejection"]]
    top, alpha = anchors.statistics["top_prob"], anchors.statistics["alpha"]
    ahead = (alpha > top).double().mean(1).tolist()  # d_TV < 1 - p(argmax q)
    known = [reward for i in chosen if (reward := rewards[i]) is not None]
    return {
        "num_prompts": len(chosen),
        "reward_mean": sum(known) / len(known) if known else None,
        "response_tokens": sum(len(rollouts[i].token_ids) for i in chosen),
        "counts": asdict(counts) if counts else None,
        "acceptance_length": counts.acceptance_length if counts else None,
        "conditional_acceptance": counts.conditional_acceptance if counts else None,
        "scored": scored.as_dict(),
        "acceptance_length_se": _clustered_error(anchors.length("rejection"), anchors.response),
        "rejection_ahead": ahead,
        "agreement": agreement.as_dict() if agreement else None,
    }, rows_of(task, counts, scored, agreement, errors, ahead)


def _agreement(
    config: EvalConfig, anchors: Anchors, counts: dict[int, DraftCounts], comparisons: int
) -> Agreement | None:
    rollout = config.rollout
    if rollout.speculation != "mtp" or rollout.tree != "none":  # a tree's counts are not a chain's
        return None
    depth = rollout.num_speculative_tokens
    return compare(anchors, counts, rule=rollout.rule, num_drafts=depth, comparisons=comparisons)


def _alarms(entry: dict[str, Any]) -> list[str]:
    lines = []
    for task, found in entry["tasks"].items():
        agreement = found["agreement"]
        if agreement and agreement["agrees"] is False:  # None: too few to judge
            parts = ", ".join(
                f"depth {j + 1} sampled {a:.4f} scored {b:.4f} ± {half:.4f}"
                for j, (a, b, half) in enumerate(
                    zip(agreement["sampled"], agreement["as_drafted"], agreement["half_width_99"], strict=True)
                )
            )
            lines.append(
                f"task {task}, T = {entry['temperature']:g}: sampled and scored acceptance part beyond the 99 % "
                f"interval of the whole run's comparisons ({parts}); the engine serves other heads, or samples "
                "otherwise, than the checkpoint"
            )
    return lines


def _clustered_error(values: torch.Tensor, response: torch.Tensor) -> float:
    """Standard error of the mean of values [N] whose responses are independent and whose positions are not."""
    total = torch.zeros(int(response.max()) + 1, dtype=torch.float64).index_add_(0, response, values - values.mean())
    groups = len(response.unique())
    return (total.square().sum() * groups / max(1, groups - 1)).sqrt().item() / len(values)


def _token_slope(anchors: Anchors) -> slopes.EntropySlope:
    return slopes.over_tokens(
        anchors.entropy_nats.numpy(), anchors.length("rejection").numpy(), anchors.response.numpy()
    )


def _temperature_slope(sweep: dict[float, Anchors], num_prompts: int) -> slopes.EntropySlope:
    points = {t: (a.entropy_nats.numpy(), a.length("rejection").numpy(), a.response.numpy()) for t, a in sweep.items()}
    return slopes.over_temperatures(points, range(num_prompts))


def _scored(
    config: EvalConfig,
    backbone: Backbone,
    head: torch.nn.Module,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    temperature: float,
) -> Anchors:
    rows = [_row(prompt, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    return score_text(backbone, head, rows, depth=config.depth, temperature=temperature, seed=config.seed)


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


def _sample(
    config: EvalConfig, policy_dir: Path, prompts: Sequence[Sequence[int]], run_dir: Path
) -> dict[float, list[Rollout]]:
    """Responses by temperature: those in run_dir, the others from one engine."""
    sampling, sums = rollout_sampling(config), checkpoint_checksums(policy_dir)
    policy = f"{sums.backbone} {sums.heads}"
    found = {temperature: samples.read(run_dir, temperature, policy, prompts) for temperature in config.swept}
    missing = [temperature for temperature, there in found.items() if there is None]
    if len(missing) < len(found):
        log.info("eval: %d of %d temperatures are sampled already", len(found) - len(missing), len(found))
    if missing:
        with make_engine(config.rollout, policy_dir, seed=config.seed, dtype=config.model.dtype) as engine:
            for temperature in missing:
                wanted = replace(sampling, temperature=temperature)
                found[temperature] = sample_all(engine, prompts, wanted, title=f"eval T={temperature:g}")
                samples.write(run_dir, temperature, policy, found[temperature])
    return found


def _row(prompt: Prompt, rollout: Rollout) -> TextRow:
    mask = (1,) * len(rollout.token_ids)
    return TextRow(prompt.prompt_id, prompt.task, rollout.prompt_ids, rollout.token_ids, mask, rollout.logprobs)


def _pooled(rollouts: Sequence[Rollout]) -> DraftCounts | None:
    counts = [rollout.counts for rollout in rollouts if rollout.counts is not None]
    return sum(counts[1:], counts[0]) if counts else None
