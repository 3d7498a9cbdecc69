"""One step's record from verl's batch: the numbers of `bebop.rl.trainer.step_metrics` under the monitor's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from bebop.records import StepRecord
from bebop.rl.trainer import step_metrics

FIELDS = ["rm_scores", "response_mask", "extra_fields", "extra_info", "entropy"]


def record_of(
    batch: KVBatchMeta,
    step: int,
    *,
    bebop: Any,
    temperature: float,
    step_s: float | None,
    gap: float | None,
    checksums: Mapping[str, Mapping[str, Any]],
    metrics: Mapping[str, Any],
) -> tuple[StepRecord, list[str]]:
    """The record of `step`, and its prompts' ids: `extra_info.prompt_id` of the data, else `extra_info.index`.

    gap: largest probability difference on on-policy samples; checksums: of trainer ("ours") and engine ("theirs");
    metrics: verl's own, whose scalars go into `extra`.
    """
    real = [not tag.get("is_padding", False) for tag in batch.tags]
    keys = [key for key, keep in zip(batch.keys, real, strict=True) if keep]
    tags = [tag for tag, keep in zip(batch.tags, real, strict=True) if keep]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
    mask = data["response_mask"].to_padded_tensor(0)
    rewards = data["rm_scores"].to_padded_tensor(0.0).sum(dim=1).tolist()
    entropy = data["entropy"].to_padded_tensor(0.0) if "entropy" in data else None
    counts = [step_metrics.counts_of(fields) for fields in _listed(data["extra_fields"])]
    groups = [key.split("_")[0] for key in keys]
    lags = step_metrics.staleness(tags, step - 1)
    lengths = [tag["response_len"] for tag in tags]
    ours, theirs = checksums.get("ours", {}), checksums.get("theirs", {})
    pooled = step_metrics.pooled(counts)
    if pooled is not None and bebop.mixed_lengths:
        pooled = replace(pooled, mixed_lengths=True)
    record = StepRecord(
        step=step,
        entropy_nats=step_metrics.masked_mean(entropy, mask) if entropy is not None else None,
        counts=pooled,
        num_speculative_tokens=bebop.num_speculative_tokens,
        acceptance_rule=bebop.rule,
        temperature=temperature,
        reward_mean=sum(rewards) / len(rewards),
        zero_spread_groups=step_metrics.zero_spread_share(groups, rewards),
        staleness_mean=sum(lags) / len(lags),
        staleness_max=float(max(lags)),
        tokens_per_s=sum(lengths) / step_s if step_s else None,
        acceptance_length_mean_of_requests=step_metrics.mean_of_requests(counts),
        response_length_mean=sum(lengths) / len(lengths),
        probs_diff_max=gap,
        backbone_checksum=theirs.get("backbone") or None,
        heads_checksum_trainer=ours.get("heads"),
        heads_checksum_engine=theirs.get("heads"),
        step_s=step_s,
        extra=step_metrics.numbers(metrics) | step_metrics.verifier_failures(_listed(data["extra_fields"])),
    )
    prompts = dict(zip(groups, _listed(data["extra_info"]), strict=True))
    return record, [str(info.get("prompt_id", info.get("index"))) for info in prompts.values()]


def on_policy_gap(batch: KVBatchMeta, current: int) -> float | None:
    """Largest |p_trainer - p_rollout| over responses that only version `current` sampled; None without any."""
    rows = torch.tensor(
        [
            tag["min_global_steps"] == tag["max_global_steps"] == current and not tag.get("is_padding", False)
            for tag in batch.tags
        ]
    )
    if not rows.any():
        return None
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields).to_padded_tensor()
    return step_metrics.largest_probability_gap(
        data["old_log_probs"], data["rollout_log_probs"], data["response_mask"], rows
    )


def _listed(column: Any) -> list:
    """A non-tensor column as a list: TransferQueue returns tensordict's stack or its list."""
    return column.tolist() if hasattr(column, "tolist") else list(column)
