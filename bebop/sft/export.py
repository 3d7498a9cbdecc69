"""Writes the trained heads into the run's policy directory, with a record of what made them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bebop.acceptance import Acceptance, record_key
from bebop.data.self_distill import META
from bebop.mtp import checkpoint_checksums, head_tensors, write_checkpoint
from bebop.mtp.reading import read_policy
from bebop.sft.job import Job
from bebop.sft.model_card import write_card
from bebop.sft.stage import CHECKPOINT, RESULT
from bebop.store.environment import package_versions
from bebop.store.files import read_json, write_json

log = logging.getLogger(__name__)


def export(job: Job, tensors: Mapping[str, Tensor], scored: Acceptance, facts: Mapping[str, Any]) -> None:
    """Write run_dir/checkpoint (the policy with `tensors` as its heads, in its dtype), sft_result.json, the model card.

    tensors: the trained head's parameters by name. Once sft_result.json exists, the training counts as finished. If the
    card then cannot be written, that is only a warning.
    """
    config, text = job.config, read_json(job.text_dir / META)
    dtype = getattr(torch, config.model.dtype)
    heads = head_tensors(job.policy_dir, tensors, dtype)
    provenance = {
        "made_by": "bebop.sft",
        "versions": package_versions(),
        "policy": str(job.policy_dir),
        "mtp_depth": config.sft.depth,
        "loss": config.loss.name,
        "steps": config.sft.steps,
        "seed": config.seed,
        "data": {key: text[key] for key in ("fingerprint", "sampled_by_policy", "num_train", "num_heldout")},
        "temperature": scored.temperature,
        "alpha": scored.alpha,
        "conditional": scored.conditional,
        "acceptance_length_se": scored.acceptance_length_se,
        **{record_key("acceptance_length", name): rule.acceptance_length for name, rule in scored.rules.items()},
        "all_tasks": scored.as_dict(),
        **facts,
        "config": config.model_dump(mode="json"),
    }
    checkpoint = job.run_dir / CHECKPOINT
    write_checkpoint(job.policy_dir, checkpoint, heads, provenance)
    checksums = checkpoint_checksums(checkpoint)
    short = {key: value for key, value in provenance.items() if key not in ("config", "versions", "all_tasks")}
    write_json(
        job.run_dir / RESULT,
        {
            **short,
            "checkpoint": str(checkpoint),
            "heads_checksum": checksums.heads,
            "backbone_checksum": checksums.backbone,
        },
    )
    read_policy(checkpoint)  # raises where an engine would refuse what was written
    try:
        write_card(checkpoint, provenance)
    except Exception as error:
        log.warning("%s: the model card was not written (%s: %s)", checkpoint, type(error).__name__, error)
