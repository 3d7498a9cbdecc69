"""Head training before RL: the sections `loss` and `sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bebop.config.members import Member
from bebop.config.section import Section
from bebop.errors import BadInput

LossName = Annotated[str, Member("LOSSES")]
Impl = Literal["auto", "triton", "cpu", "reference"]


class Loss(Section):
    """Losses compare draft and target at rollout.temperature, the temperature of the training sequences."""

    # training loss of the heads
    name: LossName = "e2e_tv"
    # loss of the first steps; null: none. auto: lk before tv and e2e_tv if the heads are fresh, because these learn
    # slowly from fresh heads; otherwise none
    warmup: LossName | Literal["auto"] | None = "auto"
    # fraction of the steps that use `warmup`
    warmup_share: float = Field(0.6, ge=0, le=1)
    # upper limit of the tv or e2e_tv loss of each anchor; beyond it the gradient is 0. null: no limit
    tau_max: float | None = Field(None, gt=0)
    # implementation of the kernels; auto: the fastest that runs here
    impl: Impl = "auto"


class Sft(Section):
    # number of draft depths to train
    depth: int = Field(3, ge=1, le=5)
    # optimizer steps on the loss. 0: only regression_steps
    steps: int = Field(160, ge=0)
    # optimizer steps before `steps`, only for fresh heads: the heads learn to reproduce the backbone's hidden states.
    # Such a step needs no logits, so it is cheaper than a step on the loss
    regression_steps: int = Field(0, ge=0)
    # muon: orthogonalised momentum for matrices, scaled to the size of AdamW's updates; AdamW for other parameters
    optimizer: Literal["adamw", "muon"] = "adamw"
    # peak learning rate
    lr: float = Field(2e-3, gt=0)
    # learning-rate schedule after the warm-up; cosine: down to 0
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    # fraction of the steps in which the learning rate rises linearly from 0
    lr_warmup_share: float = Field(0.08, ge=0, le=1)
    # decoupled weight decay
    weight_decay: float = Field(0.0, ge=0)
    # largest norm of the gradient. With muon the gradient of each parameter is clipped separately, before the momentum,
    # to grad_clip / sqrt(number of parameters)
    grad_clip: float = Field(1.0, gt=0)
    # tokens per packed micro-batch and process
    batch_tokens: int = Field(4096, ge=64)
    # micro-batches per optimizer step
    grad_accum: int = Field(1, ge=1)
    # DeepSpeed's ZeRO stage
    zero_stage: Literal[0, 1, 2, 3] = 1
    # number of training processes on this machine
    num_processes: int = Field(1, ge=1)
    # type of the matrix products of heads and loss. bfloat16: autocast; master weights, optimizer state and softmax
    # statistics stay float32
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # recompute the MLP's inner activations in the backward pass instead of keeping them
    activation_checkpointing: bool = False
    # steps between two scorings of the held-out sequences
    eval_every: int = Field(40, ge=1)
    # steps between two checkpoints
    save_every: int = Field(40, ge=1)

    @model_validator(mode="after")
    def _something_to_do(self) -> Sft:
        if not self.steps + self.regression_steps:
            raise BadInput("sft.steps: got 0 with sft.regression_steps=0, expected at least one step; set one of them")
        return self

    @model_validator(mode="after")
    def _checkpointing_needs_whole_parameters(self) -> Sft:
        if self.activation_checkpointing and self.zero_stage == 3:
            raise BadInput(
                "sft.activation_checkpointing: got true with sft.zero_stage=3, which frees the parameters before the "
                "backward pass; set sft.zero_stage=2 or sft.activation_checkpointing=false"
            )
        return self
