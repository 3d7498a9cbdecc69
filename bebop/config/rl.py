"""Reinforcement learning: the sections `trainer`, `grpo` and `monitor`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bebop.config.section import Section
from bebop.errors import BadInput


class Trainer(Section):
    # verl's trainer mode. colocate_async: sampling and training overlap; sync: they alternate
    mode: Literal["colocate_async", "sync"] = "colocate_async"
    # number of policy versions that a sample may lag behind; in async modes
    max_staleness: int = Field(1, ge=0)
    # correction for samples of an older policy: truncated importance weights, per token or per sequence; none only
    # with mode=sync
    importance_correction: Literal["none", "token", "sequence"] = "token"
    # largest importance weight
    importance_cap: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _async_needs_a_correction(self) -> Trainer:
        if self.mode != "sync" and self.importance_correction == "none":
            raise BadInput(
                f"trainer.importance_correction: got none with trainer.mode={self.mode}, whose samples come from an "
                "older policy; set trainer.importance_correction=token or sequence, or trainer.mode=sync"
            )
        return self


class Grpo(Section):
    # RL steps
    steps: int = Field(40, ge=1)
    # prompts per step
    prompts_per_step: int = Field(16, ge=1)
    # responses per prompt, the group of GRPO
    group_size: int = Field(8, ge=2)
    # peak learning rate of the policy; it rises linearly over the first 10 % of the steps, at most 3 steps
    lr: float = Field(1e-6, gt=0)
    # AdamW's epsilon; 1e-8 is standard AdamW. At 1e-3 the size of an update follows the size of the gradient, which
    # keeps a tiny policy from amplifying noise
    adam_eps: float = Field(1e-8, gt=0)
    # weight of the KL penalty to the initial policy; 0: none
    kl_coef: float = Field(0.0, ge=0)
    # steps between two checkpoints; the last step always writes one
    save_every: int = Field(20, ge=1)
    # number of checkpoints to keep
    keep_checkpoints: int = Field(2, ge=1)
    # largest difference between rollout and trainer probabilities of on-policy samples; the run stops beyond it.
    # null: 1e-4 in float32 and 0.1 in bfloat16 on a CPU, 0.01 and 0.5 on a GPU
    probs_diff_limit: float | None = Field(None, gt=0)
    # the run stops if a rollout server or agent loop does not answer for this many seconds. Trainer workers and reward
    # actors may be busy longer, and stop the run only if Ray reports them dead
    watchdog_s: float = Field(60.0, gt=0, le=1e6)
    # a reward function of your own, `module:name` or `path/to/file.py:name`, called with verl's arguments
    # (data_source, solution_str, ground_truth, extra_info). null: the verifiers of data.tasks. Rewards are computed in
    # the box: a process with limits on time and memory, which cannot use the network, start processes, or read files
    # other than the installed Python packages and the function's own code
    reward_function: str | None = None
    # false: your reward function may use network, files and environment, for example to call a judge; the limits on
    # time and memory stay
    reward_sealed: bool = True
    # seconds for the reward of one response; beyond it the reward is 0 and counts as failed
    reward_timeout_s: float = Field(4.0, gt=0, le=1e6)
    # largest share of rewards that may fail over the last 10 steps; the run stops beyond it
    reward_failures_limit: float = Field(0.5, gt=0, le=1)
    # overrides of verl's own config, as on verl's command line; `verl.<key>=<value>` on bebop's command line adds to
    # them
    verl_overrides: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _only_own_rewards_are_open(self) -> Grpo:
        if not self.reward_sealed and self.reward_function is None:
            raise BadInput(
                "grpo.reward_sealed: got false without grpo.reward_function; the verifiers of data.tasks need no "
                "network: set it to true, or name your function"
            )
        return self


class Monitor(Section):
    # the decomposition fits its slope to this many steps from the start
    early_steps: int = Field(20, ge=3)
    # smallest number of steps for a decision; with fewer it is "undetermined". A slope needs 4 steps
    min_steps: int = Field(8, ge=4)
    # smallest loss of acceptance length by mismatch, in tokens per target forward, at which updating the heads pays
    min_mismatch: float = Field(0.05, ge=0)
    # lowest and highest entropy, in nats, of the sequences that the heads were trained on; null: read from the heads'
    # checkpoint, if recorded there
    entropy_range: list[float] | None = None
