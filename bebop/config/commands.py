"""The config of each command: its sections, and the checks across them.

hydra composes configs/ over the schema's defaults (`defaults`). `check` turns the result into one of the frozen models
below. An unknown key, a wrong value or contradictory keys raise an error of one line, before any model loads.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from bebop import registry
from bebop.config.bench import Bench
from bebop.config.data import Data
from bebop.config.heads import Loss, Sft
from bebop.config.limits import check_lengths, check_numbers, check_temperatures
from bebop.config.members import check_members
from bebop.config.messages import one_line
from bebop.config.policy import CheckedModel, Model
from bebop.config.rl import Grpo, Monitor, Trainer
from bebop.config.rollout import Engine, RolloutSection, check_depth, check_sampled, check_untruncated
from bebop.config.section import FilePath, Section
from bebop.errors import BadInput, ConfigError


class Logger(Section):
    # Weights & Biases mode; offline needs no network and no key
    wandb: Literal["offline", "online", "disabled"] = "offline"
    # project in Weights & Biases: at most 128 characters, none of them / \\ # ? % or :
    project: str = "bebop"
    # name of the run in Weights & Biases, at most 128 characters; null: the name of the run folder
    name: str | None = None

    @field_validator("project", "name")
    @classmethod
    def _wandb_takes_it(cls, value: str | None, info: ValidationInfo) -> str | None:
        odd = r"[\x00-\x1f/\\#?%:]" if info.field_name == "project" else r"[\x00-\x1f]"
        if value is not None and (not value.strip() or len(value) > 128 or re.search(odd, value)):
            without = "control characters" + (r" and / \ # ? % :" if info.field_name == "project" else "")
            raise BadInput(
                f"logger.{info.field_name}: got {value!r:.140} ({len(value)} characters), expected 1 to 128 characters "
                f"without {without}"
            )
        return value


class Doctor(Section):
    # engine to check: vllm with chains, torch with chains and RheoSampling trees
    engine: Engine = "vllm"
    # number of requests of the losslessness check, per temperature
    num_requests: int = Field(4000, ge=100)
    # temperatures of the check
    temperatures: list[float] = Field(default_factory=lambda: [1.0, 0.7])
    # smallest p-value of the chi-square test that passes
    min_p_value: float = Field(1e-3, gt=0, lt=1)
    # apply bebop's fixes to vLLM; false shows which checks fail without them
    engine_fixes: bool = True
    # with a model: largest difference, in nats, of a token's log-probability between any two readers of the policy
    max_logprob_diff: float = Field(1e-4, gt=0)

    @model_validator(mode="after")
    def _fixes_are_for_vllm(self) -> Doctor:
        if self.engine != "vllm" and not self.engine_fixes:
            raise BadInput(
                f"doctor.engine_fixes: got false with doctor.engine={self.engine}, but the fixes are for vLLM; "
                "set doctor.engine=vllm"
            )
        check_temperatures(self.engine, self.temperatures, "doctor.temperatures")
        return self


class Run(Section):
    # folder of the run; null: `runs/<command>/<time>`. A folder with an unfinished run is resumed, except by bench
    # and doctor
    run_dir: FilePath | None = None
    # seed of all random numbers
    seed: int = Field(0, ge=0)
    # your own modules or Python files, imported in every process of the run; they register losses, rules, engines or
    # tasks
    plugins: list[str] = Field(default_factory=list)


class SftConfig(Run):
    """Train MTP heads on a frozen policy, before RL."""

    model: Model
    data: Data
    loss: Loss
    sft: Sft
    rollout: RolloutSection
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        check_depth(self.rollout, self.sft.depth, "sft.depth")
        if self.data.path is None:  # the limits of a given text are its own
            check_lengths(self.rollout, self.data)
        return _check_distributions(self)


class GrpoConfig(Run):
    """Async GRPO whose rollouts speculate with the MTP heads."""

    model: Model
    data: Data
    rollout: RolloutSection
    trainer: Trainer
    grpo: Grpo
    monitor: Monitor = Monitor()
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _prompts_have_tasks(self) -> Self:
        check_tasks(self.data, _command(self))
        check_lengths(self.rollout, self.data)
        return _check_distributions(self)


class DemoConfig(GrpoConfig, SftConfig):
    """A tiny policy, its heads, GRPO and the report, on a CPU."""


class EvalConfig(Run):
    """Acceptance of trained heads, observed in the engine and scored exactly."""

    model: Model
    data: Data
    rollout: RolloutSection
    # number of draft depths to score
    depth: int = Field(3, ge=1, le=5)
    # temperatures to sample and score at, one after the other; null: only rollout.temperature
    temperatures: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    logger: Logger = Logger()

    @property
    def swept(self) -> list[float]:
        """The temperatures to sample and score at."""
        return [self.rollout.temperature] if self.temperatures is None else self.temperatures

    @model_validator(mode="after")
    def _can_be_scored(self) -> EvalConfig:
        rollout = self.rollout
        if self.temperatures is None:
            check_sampled(rollout, "eval")
        check_untruncated(rollout, "eval")
        check_lengths(rollout, self.data)
        check_temperatures(rollout.engine, self.swept, "temperatures" if self.temperatures else "rollout.temperature")
        if len(set(self.swept)) < len(self.swept):
            raise ConfigError(f"temperatures: got {self.swept}, expected each temperature once")
        if rollout.speculation == "mtp" and rollout.tree == "none" and rollout.num_speculative_tokens > self.depth:
            raise ConfigError(
                f"rollout.num_speculative_tokens: got {rollout.num_speculative_tokens}, expected at most "
                f"depth={self.depth}, the depths that are scored; lower it or raise depth"
            )
        if rollout.draft_schedule is not None:
            raise ConfigError(
                "rollout.draft_schedule: got a schedule in eval, which counts acceptance at one draft length; set "
                "rollout.draft_schedule=null"
            )
        return self


class BenchConfig(Run):
    """Measure the engine, the kernels or draft trees."""

    model: Model
    data: Data
    rollout: RolloutSection
    bench: Bench = Bench()
    logger: Logger = Logger()

    @model_validator(mode="after")
    def _sections_agree(self) -> BenchConfig:
        check_tasks(self.data, "bench")
        if self.bench.suite != "kernels":
            check_lengths(self.rollout, self.data)
        if self.bench.suite == "rollout":
            check_temperatures(self.rollout.engine, [self.rollout.temperature], "rollout.temperature")
        if self.bench.suite == "tree":
            check_untruncated(self.rollout, "bench tree")
        if self.bench.suite == "rollout" and max(self.bench.batch_sizes) > self.rollout.max_num_seqs:
            raise ConfigError(
                f"bench.batch_sizes: got {self.bench.batch_sizes}, expected at most rollout.max_num_seqs="
                f"{self.rollout.max_num_seqs} requests; raise that or leave out the larger sizes"
            )
        return self


class DoctorConfig(Run):
    """What is installed, and whether the engine samples the right distribution or all readers of a policy agree."""

    doctor: Doctor = Doctor()
    model: CheckedModel = CheckedModel()


class ReportConfig(Run):
    """One HTML page from the records of a run."""

    # folder of the run, finished or not
    run: FilePath


class MonitorConfig(Run):
    """The monitor on records that exist: watch a run, replay its decisions, import another trainer's records."""

    # watch: print a run's steps as they come; replay: the decision after each step; import: write another trainer's
    # records to a run folder (run_dir)
    action: Literal["watch", "replay", "import"]
    # watch and replay: folder of the run
    run: FilePath | None = None
    # import: CSV file, verl console log, .wandb file of an offline run, or folder of vLLM's /metrics pages
    source: FilePath | None = None
    # import: a second source, whose steps are joined with those of the first
    counters: FilePath | None = None
    # import: draft tokens per target forward, where the source does not say
    num_speculative_tokens: int = Field(1, ge=1)
    # import: how drafts were verified, where the source does not say
    acceptance_rule: str = "rejection"
    # import: sampling temperature, where the source does not say
    temperature: float = Field(1.0, ge=0)
    # watch: seconds between two looks at the run
    every_s: float = Field(2.0, ge=0.1)

    @model_validator(mode="after")
    def _has_its_input(self) -> MonitorConfig:
        needed = "source" if self.action == "import" else "run"
        if getattr(self, needed) is None:
            raise BadInput(f"{needed}: missing; give monitor {self.action} <path>")
        return self


COMMANDS: dict[str, type[Run]] = {
    "sft": SftConfig,
    "grpo": GrpoConfig,
    "demo": DemoConfig,
    "eval": EvalConfig,
    "bench": BenchConfig,
    "doctor": DoctorConfig,
    "report": ReportConfig,
    "monitor": MonitorConfig,
}


def _command(config: Run) -> str:
    return next(name for name, model in COMMANDS.items() if model is type(config))


def _check_distributions(config: Any) -> Any:
    """Raise where the rollouts of a command that compares distributions are greedy or truncated."""
    check_sampled(config.rollout, _command(config))
    check_temperatures(config.rollout.engine, [config.rollout.temperature], "rollout.temperature")
    check_untruncated(config.rollout, _command(config))
    return config


def check_tasks(data: Data, command: str) -> None:
    """Raise ConfigError if a command that samples prompts from data.tasks gets a file."""
    if data.source == "parquet":
        raise ConfigError(
            f"data.source: got parquet in {command}, which takes its prompts from data.tasks; set "
            "data.source=self_distill data.path=null"
        )


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Every key of a config model with its default; `???` (hydra's "missing") for keys without one."""
    values: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if not info.is_required():
            value = info.get_default(call_default_factory=True)
            values[name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            values[name] = defaults(info.annotation)
        else:
            values[name] = "???"
    return values


def check(command: str, values: dict[str, Any]) -> Run:
    """Turn a composed config into the model of `command`, and import its plugins.

    Raises ConfigError for the first fault; an error in a plugin's own code passes through unchanged.
    """
    model = COMMANDS[command]
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error.errors(), model)) from None
    check_numbers(config)
    registry.use(config.plugins)
    check_members(config)
    return config
