"""The schema for composed configs, and the command line's overrides. See docs/config.md."""

from bebop.config.bench import Bench, KernelBench, TreeBench
from bebop.config.commands import (
    COMMANDS,
    BenchConfig,
    DemoConfig,
    Doctor,
    DoctorConfig,
    EvalConfig,
    GrpoConfig,
    Logger,
    ReportConfig,
    Run,
    SftConfig,
    check,
    check_tasks,
    defaults,
)
from bebop.config.data import Data, Task
from bebop.config.heads import Impl, Loss, LossName, Sft
from bebop.config.policy import Model, TinyModel
from bebop.config.rl import Grpo, Monitor, Trainer
from bebop.config.rollout import RolloutSection, Rule, TreeName, check_depth, check_sampled, check_untruncated
from bebop.config.section import FilePath, Section
from bebop.errors import ConfigError
