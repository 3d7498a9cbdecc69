"""Rollouts: the section `rollout`, for the engine, speculation and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bebop.config import draft_schedule as schedules
from bebop.config.members import Member
from bebop.config.section import Section
from bebop.errors import BadInput, ConfigError

Rule = Annotated[str, Member("RULES")]
Engine = Annotated[str, Member("ENGINES")]
TreeName = Literal["none", "topk", "rheo", "rrsw"]


class RolloutSection(Section):
    # vllm: the production engine, chains only; torch: the reference engine, chains and trees
    engine: Engine = "vllm"
    # mtp: draft with the policy's MTP head; none: plain decoding
    speculation: Literal["mtp", "none"] = "mtp"
    # acceptance rule of a chain. rejection and block sample the draft tokens; target_only takes the most likely ones
    rule: Rule = "rejection"
    # draft length of a chain; at most the depth that the head was trained for
    num_speculative_tokens: int = Field(3, ge=1)
    # draft length by the number of requests in the batch, for engine=vllm: ranges such as
    # {"1-16": 3, "64-128": 2, "256+": 0}, or the path of a schedule.json from `bench`. A gap keeps the length of the
    # range below it; 0 is plain decoding. null: always num_speculative_tokens, which is also the largest length allowed
    draft_schedule: dict[str, int] | None = None
    # draft tree that one target forward verifies, for engine=torch. none: a chain; topk: as in EAGLE-2; rheo:
    # RheoSampling; rrsw: recursive rejection sampling without replacement
    tree: TreeName = "none"
    # largest number of children of a node
    tree_width: int = Field(4, ge=1)
    # levels of the tree; more than the head was trained for is allowed, at a lower acceptance
    tree_depth: int = Field(3, ge=1)
    # number of draft tokens that one target forward verifies
    tree_budget: int = Field(16, ge=1)
    # RheoSampling's m, for tree=rheo and rrsw: number of deterministic children of a node before the sampled one, from
    # 0 to tree_width - 1. auto: 1 for requests above temperature 0.5, otherwise 0
    tree_leads: int | Literal["auto"] = "auto"
    # number of most likely tokens that the draft distribution keeps; it is renormalised over them
    tree_support: int = Field(128, ge=2)
    # sampling temperature. Heads are also trained and scored at this temperature
    temperature: float = Field(1.0, ge=0)
    # nucleus truncation; 1.0: off, which training needs, since truncation changes the log-probabilities
    top_p: float = Field(1.0, gt=0, le=1)
    # top-k truncation; 0: off, which training needs
    top_k: int = Field(0, ge=0)
    # largest number of requests decoded at once
    max_num_seqs: int = Field(64, ge=1)
    # longest prompt plus response, in tokens
    max_model_len: int = Field(512, ge=16)
    # memory for the KV cache on a CPU, in GiB
    kv_cache_gib: float = Field(1.0, gt=0, le=1e6)
    # fraction of the memory of a GPU
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _schedule_was_measured_for_this(cls, given: Any) -> Any:
        path = given.get("draft_schedule") if isinstance(given, Mapping) else None
        if isinstance(path, (str, Path)):
            schedules.read(Path(path))
            keys = ("rule", "temperature")
            schedules.check_measured(Path(path), {key: given.get(key, cls.model_fields[key].default) for key in keys})
        return given

    @field_validator("draft_schedule", mode="before")
    @classmethod
    def _schedule_is_read(cls, given: Any) -> Any:
        if given is None:
            return None
        if isinstance(given, (str, Path)):
            return schedules.read(Path(given))
        schedules.parse(given)
        return {str(key): k for key, k in given.items()}

    @model_validator(mode="after")
    def _schedule_can_be_served(self) -> RolloutSection:
        if self.draft_schedule is None:
            return self
        shown = schedules.text(self.draft_schedule)
        for key, value, wanted in (
            ("speculation", self.speculation, "mtp"),
            ("tree", self.tree, "none"),
        ):
            if value != wanted:
                raise BadInput(
                    f"rollout.draft_schedule: got {shown} with rollout.{key}={value}; set rollout.{key}={wanted}, or "
                    "rollout.draft_schedule=null"
                )
        most = max(self.draft_schedule.values())
        if most > self.num_speculative_tokens:
            raise BadInput(
                f"rollout.draft_schedule: got {shown}, expected at most rollout.num_speculative_tokens="
                f"{self.num_speculative_tokens} draft tokens; raise that or lower the schedule"
            )
        return self

    @model_validator(mode="after")
    def _tree_can_be_served(self) -> RolloutSection:
        if self.tree == "none":
            return self
        for key, value, wanted in (
            ("speculation", self.speculation, "mtp"),
            ("rule", self.rule, "rejection"),  # a tree has its own rule
        ):
            if value != wanted:
                raise BadInput(
                    f"rollout.tree: got {self.tree} with rollout.{key}={value}; set rollout.{key}={wanted}, or "
                    "rollout.tree=none"
                )
        if self.tree_leads != "auto" and not 0 <= self.tree_leads < self.tree_width:
            raise BadInput(
                f"rollout.tree_leads: got {self.tree_leads}, expected auto or 0 to rollout.tree_width - 1 = "
                f"{self.tree_width - 1}"
            )
        return self

    @property
    def draft_depth(self) -> int:
        """Draft tokens on the longest path that a target forward verifies; 0 without speculation."""
        if self.speculation == "none":
            return 0
        return self.num_speculative_tokens if self.tree == "none" else self.tree_depth

    @property
    def acceptance_rule(self) -> str:
        """Label under which acceptance may be pooled: rule and draft schedule of a chain, method and shape (without
        depth) of a tree."""
        if self.tree == "none":
            return (
                f"{self.rule}, k by batch {schedules.text(self.draft_schedule)}" if self.draft_schedule else self.rule
            )
        leads = "" if self.tree == "topk" else f", {self.tree_leads} leads"
        return f"{self.tree} tree of {self.tree_budget} nodes, {self.tree_width} wide{leads}"


def check_depth(rollout: RolloutSection, depth: int, key: str) -> None:
    """Raise ConfigError if a chain is longer than the head was trained for. `key` is the config key of `depth`.

    A tree may be deeper (`rollout.tree_depth`): it only goes deep where the draft is likely to be accepted.
    """
    if rollout.tree == "none" and rollout.speculation == "mtp" and rollout.num_speculative_tokens > depth:
        raise ConfigError(
            f"rollout.num_speculative_tokens: got {rollout.num_speculative_tokens}, expected at most {key}={depth}, "
            f"the depth that the head is trained for; lower it or train with a larger {key}"
        )


def check_sampled(rollout: RolloutSection, command: str) -> None:
    """Raise ConfigError on greedy rollouts: `command` compares distributions at the rollout's temperature."""
    if rollout.temperature == 0:
        raise ConfigError(
            f"rollout.temperature: got 0.0 in {command}, expected a number above 0, because {command} compares "
            "distributions; use 0.01 for nearly greedy sampling"
        )


def check_untruncated(rollout: RolloutSection, command: str) -> None:
    """Raise ConfigError on truncated sampling: the engine renormalises over the tokens kept, but losses, scores and
    importance ratios compare whole distributions."""
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != off:
            raise ConfigError(
                f"rollout.{key}: got {value} in {command}, expected {off}, because {command} compares whole "
                f"distributions; set rollout.{key}={off}"
            )
