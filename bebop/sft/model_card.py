"""The model card of a policy with trained heads: README.md in Hugging Face's format.

A policy's own card is kept: its front matter gains tags, its text is unchanged, and a section on the heads is added
between two markers. A later training replaces that section.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import RepoCard

from bebop.acceptance import record_key
from bebop.mtp.checkpoint import read_config
from bebop.mtp.families import READ_AS, known_family
from bebop.spec import RULES
from bebop.store.files import write_text
from bebop.store.tables import format_table

log = logging.getLogger(__name__)
CARD = "README.md"
BEGIN, END = "<!-- bebop: heads -->", "<!-- bebop: end of heads -->"
TAGS = ("speculative-decoding", "multi-token-prediction", "bebop")
NEW = "---\nlibrary_name: transformers\n---\n# Policy with MTP heads\n"


def write_card(checkpoint: Path, made: Mapping[str, Any]) -> None:
    """Write the card of `checkpoint`, or extend an existing one. made: the provenance in its bebop.json.

    The card gives the command that serves the directory, and says whether vLLM needs bebop installed for it.

    Front matter that is not a YAML mapping stays in the text, after the new front matter. Bytes that are not UTF-8 stay
    unchanged.
    """
    path = checkpoint / CARD
    before = path.read_bytes().decode("utf-8", errors="surrogateescape") if path.exists() else None
    write_text(path, merge(before, made, read_config(checkpoint)))


def needs_bebop(config: Mapping[str, Any]) -> bool:
    """Whether vLLM needs bebop to serve a directory with this config.json: for fresh heads on policies without native
    heads, and for `model_type: mimo` without MiMo's own code."""
    return getattr(known_family(config), "served_by_bebop", False) or config.get("model_type") in READ_AS


def serve_command(num_speculative_tokens: int) -> str:
    """The shell command that serves a policy in the current directory with its heads."""
    speculation = {
        "method": "mtp",
        "num_speculative_tokens": num_speculative_tokens,
        "draft_sample_method": "probabilistic",
    }
    return f"vllm serve . --speculative-config '{json.dumps(speculation)}'"


def merge(before: str | None, made: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The card's text: `before` with the section on heads added or replaced, or a new card. config: of config.json."""
    card = _card(NEW if before is None else before)
    card.data["pipeline_tag"] = card.data.get("pipeline_tag") or "text-generation"
    tags = card.data.get("tags") or []
    card.data["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *TAGS]))
    section = f"{BEGIN}\n{_section(made, config)}{END}\n"
    if BEGIN in card.text and END in card.text:
        start, stop = card.text.index(BEGIN), card.text.index(END) + len(END)
        card.text = card.text[:start] + section + card.text[stop:].removeprefix("\n")
    else:
        card.text = card.text.rstrip("\n") + "\n\n" + section
    return str(card.content)


def _card(text: str) -> RepoCard:
    """RepoCard, not ModelCard: ModelCard rewrites the evaluation results in the front matter, or rejects them."""
    if text.lstrip().startswith("---"):
        try:
            return RepoCard(text)
        except (ValueError, yaml.YAMLError):
            log.warning("%s of the policy: its front matter is not a YAML mapping; it is kept as text", CARD)
    return RepoCard("---\n{}\n---\n" + text)


def _section(made: Mapping[str, Any], policy: Mapping[str, Any]) -> str:
    config, data = made["config"], made["data"]
    sft, text = config["sft"], config["data"]
    served = "vLLM with bebop installed serves this directory (0.31 or later; bebop's plug-in brings the heads' class)"
    if not needs_bebop(policy):
        served = "Any vLLM serves this directory (0.31 or later; bebop is not needed)"
    tasks = ", ".join(task["name"] for task in text["tasks"])
    source = f"sequences of {Path(text['path']).name}" if text["path"] else f"responses to prompts of {tasks}"
    sampler = "sampled by this policy" if data["sampled_by_policy"] else "given, not sampled by this policy"
    warmup = made["loss_warmup"]
    loss = f"`{made['loss']}`" + (
        f", after `{warmup}` for the first {config['loss']['warmup_share']:.0%} of the steps" if warmup else ""
    )
    before = made["regression_steps"]
    regression = f"{before} of hidden-state regression, then " if before else ""
    tokens = sft["batch_tokens"] * sft["grad_accum"] * sft["num_processes"]
    low, high = made["entropy_range"]
    facts = {
        "heads before": made["heads_from"],
        "depth": str(made["mtp_depth"]),
        "loss": loss,
        "steps": f"{regression}{made['steps']}, {sft['optimizer']}, learning rate {sft['lr']:g} {sft['lr_schedule']}, "
        f"{tokens} tokens a step at most",
        "text": f"{data['num_train']} {source}, {sampler}",
        "temperature": f"{made['temperature']:g}, of the text, the loss and the scores",
        "target entropy": f"{made['entropy_nats']:.3f} nats; sequences from {low:.3f} to {high:.3f}",
        "seed": str(made["seed"]),
    }
    lines = [
        "## MTP heads for speculative decoding",
        "",
        "Trained by bebop on the frozen policy; every other tensor is the policy's own, byte for byte.",
        "",
        f"{served}. From inside it:",
        "",
        "```bash",
        serve_command(made["mtp_depth"]),
        "```",
        "",
        "Without `draft_sample_method` vLLM drafts greedily, and accepts less of what these heads draft.",
        "",
        format_table(list(facts.items()), ["", ""], style="markdown"),
        "",
        f"Scored on {data['num_heldout']} held-out sequences at T = {made['temperature']:g}. α is the overlap "
        "sum min(p, q) at each depth for itself; the acceptance length is in tokens per target forward, exact for text "
        "that the policy sampled, under the rule that its column names.",
        "",
        _table(made),
        "",
    ]
    if not data["sampled_by_policy"]:
        lines += ["The held-out text was given and not sampled by the policy: acceptance lengths are biased on it.", ""]
    return "\n".join(lines)


def _table(made: Mapping[str, Any]) -> str:
    tasks, total = made["tasks"], made["all_tasks"]
    rules = [rule for rule in RULES if record_key("acceptance_length", rule) in total]
    rows = []
    for name, scored in [*sorted(tasks.items()), *([("all", total)] if len(tasks) > 1 else [])]:
        row = {"task": name} | {f"α depth {j}": f"{alpha:.3f}" for j, alpha in enumerate(scored["alpha"], 1)}
        for rule in rules:
            length, error = (record_key(key, rule) for key in ("acceptance_length", "acceptance_length_se"))
            row[RULES[rule].title] = f"{scored[length]:.3f} ± {scored[error]:.3f}"
        rows.append(row | {"positions": scored["num_anchors"]})
    return format_table(rows, style="markdown")
