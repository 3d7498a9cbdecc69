"""The schema that every composed config is checked against.

hydra composes configs/, then `check` turns the result into one of the frozen models below. Unknown keys, wrong types
and contradictions between keys are errors that name the key, what came and what was expected, before any model loads.
A field's meaning stands above it here and above it in configs/.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from bebop import registry
from bebop.config.bench import Bench, KernelBench, SpeculatorsBench, TreeBench
from bebop.config.members import check_members
from bebop.config.messages import field_names, one_line
from bebop.config.sections import (
    Data,
    Doctor,
    FilePath,
    Grpo,
    Impl,
    Logger,
    Loss,
    LossName,
    Model,
    Monitor,
    RolloutSection,
    Rule,
    Section,
    Sft,
    Task,
    TinyModel,
    Trainer,
    TreeName,
)
from bebop.errors import ConfigError

__all__ = [
    "COMMANDS",
    "Bench",
    "BenchConfig",
    "ConfigError",
    "Data",
    "DemoConfig",
    "Doctor",
    "DoctorConfig",
    "EvalConfig",
    "FilePath",
    "Grpo",
    "GrpoConfig",
    "Impl",
    "KernelBench",
    "Logger",
    "Loss",
    "LossName",
    "Model",
    "Monitor",
    "ReportConfig",
    "RolloutSection",
    "Rule",
    "Run",
    "Section",
    "Sft",
    "SftConfig",
    "SpeculatorsBench",
    "Task",
    "TinyModel",
    "Trainer",
    "TreeBench",
    "TreeName",
    "check",
    "check_depth",
    "check_tasks",
    "check_untruncated",
]


class Run(Section):
    # folder of the run; null: runs/<command>/<time>. A folder that holds an unfinished run is resumed
    run_dir: FilePath | None = None
    # seed of everything random
    seed: int = Field(0, ge=0)
    # modules or Python files to import in every process of the run: they register your own losses, rules, engines or
    # tasks
    plugins: list[str] = Field(default_factory=list)


class SftConfig(Run):
    model: Model
    data: Data
    loss: Loss
    sft: Sft
    rollout: RolloutSection
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _draft_fits_head(self) -> SftConfig:
        check_depth(self.rollout, self.sft.depth, "sft.depth")
        check_untruncated(self.rollout)
        return self


class GrpoConfig(Run):
    model: Model
    data: Data
    rollout: RolloutSection
    trainer: Trainer
    grpo: Grpo
    monitor: Monitor = Monitor()
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _rollouts_are_trainable(self) -> GrpoConfig:
        check_untruncated(self.rollout)
        check_tasks(self.data, "grpo")
        return self


class DemoConfig(Run):
    model: Model
    data: Data
    loss: Loss
    sft: Sft
    rollout: RolloutSection
    trainer: Trainer
    grpo: Grpo
    monitor: Monitor = Monitor()
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _stages_agree(self) -> DemoConfig:
        check_depth(self.rollout, self.sft.depth, "sft.depth")
        check_untruncated(self.rollout)
        check_tasks(self.data, "demo")
        return self


class EvalConfig(Run):
    model: Model
    data: Data
    rollout: RolloutSection
    # draft depths to score
    depth: int = Field(3, ge=1, le=5)
    # temperatures to sample and score at, one after the other; null: rollout.temperature alone
    temperatures: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    logger: Logger = Logger()

    @property
    def swept(self) -> list[float]:
        """The temperatures to sample and score at."""
        return [self.rollout.temperature] if self.temperatures is None else self.temperatures

    @model_validator(mode="after")
    def _is_scorable(self) -> EvalConfig:
        if self.temperatures is None and self.rollout.temperature == 0:
            raise ConfigError(
                "rollout.temperature=0.0 in eval: acceptance is scored between two distributions; set a temperature "
                "above 0, 0.01 is greedy in effect"
            )
        if len(set(self.swept)) < len(self.swept):
            raise ConfigError(f"temperatures={self.swept}: expected each of them once")
        rollout = self.rollout
        if (rollout.top_p, rollout.top_k) != (1.0, 0):
            raise ConfigError(
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} in eval: heads are scored against whole "
                "distributions, which truncated text does not follow; set rollout.top_p=1.0 rollout.top_k=0"
            )
        if rollout.speculation == "mtp" and rollout.tree == "none" and rollout.num_speculative_tokens > self.depth:
            raise ConfigError(
                f"rollout.num_speculative_tokens={rollout.num_speculative_tokens} is deeper than depth={self.depth}, "
                f"what is scored: set depth={rollout.num_speculative_tokens} or lower rollout.num_speculative_tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_draft_length(self) -> EvalConfig:
        if self.rollout.draft_schedule is not None:
            raise ConfigError(
                "rollout.draft_schedule in eval: acceptance per depth is counted at one draft length; "
                "set rollout.draft_schedule=null"
            )
        return self


class BenchConfig(Run):
    model: Model
    data: Data
    rollout: RolloutSection
    bench: Bench = Bench()
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _sizes_fit(self) -> BenchConfig:
        if self.bench.suite != "speculators":
            check_tasks(self.data, "bench")
        rollout = self.rollout
        if self.bench.suite == "tree" and (rollout.top_p, rollout.top_k) != (1.0, 0):
            raise ConfigError(
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} in bench tree: trees are scored "
                "against whole distributions; set rollout.top_p=1.0 rollout.top_k=0"
            )
        most = max(self.bench.batch_sizes)
        if self.bench.suite == "rollout" and most > rollout.max_num_seqs:
            raise ConfigError(
                f"bench.batch_sizes={self.bench.batch_sizes}: the engine holds rollout.max_num_seqs="
                f"{rollout.max_num_seqs} requests at once; raise it or leave out the larger sizes"
            )
        return self


class DoctorConfig(Run):
    doctor: Doctor = Doctor()


class ReportConfig(Run):
    # folder of the finished or running run to report on
    run: FilePath


COMMANDS: dict[str, type[Run]] = {
    "sft": SftConfig,
    "grpo": GrpoConfig,
    "demo": DemoConfig,
    "eval": EvalConfig,
    "bench": BenchConfig,
    "doctor": DoctorConfig,
    "report": ReportConfig,
}


def check_depth(rollout: RolloutSection, depth: int, key: str) -> None:
    """Raise where a chain is longer than the head was trained for. `key` names where `depth` comes from.

    A tree may be deeper (`rollout.tree_depth`): it spends its nodes where the draft is sure.
    """
    if rollout.tree == "none" and rollout.speculation == "mtp" and rollout.num_speculative_tokens > depth:
        raise ConfigError(
            f"rollout.num_speculative_tokens={rollout.num_speculative_tokens} is deeper than the head was trained, "
            f"{key}={depth}: lower rollout.num_speculative_tokens or train with a larger {key}"
        )


def check_untruncated(rollout: RolloutSection) -> None:
    """Raise on truncated text to train on: the engine renormalises over the kept set, losses and trainer do not."""
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != off:
            raise ConfigError(
                f"rollout.{key}={value}: training on truncated sampling biases what is trained against whole "
                f"distributions, every importance ratio of RL included; set rollout.{key}={off}"
            )


def check_tasks(data: Data, command: str) -> None:
    """Raise where a command that makes its prompts of data.tasks is given a file."""
    if data.source == "parquet":
        raise ConfigError(
            f"data.source=parquet in {command}: its prompts are made of data.tasks; set data.source=self_distill "
            "data.path=null"
        )


def check(command: str, values: dict[str, Any]) -> Run:
    """Turn a composed config into the model of `command`, and import its plugins.

    Raises ConfigError with one line on the first fault; an error in a plugin's own code passes through.
    """
    model = COMMANDS[command]
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error.errors()[0], field_names(model))) from None
    registry.use(config.plugins)
    check_members(config)
    return config
