"""Prompts and training sequences: the section `data`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bebop.config.section import FilePath, Section
from bebop.errors import BadInput


class Task(Section):
    # a data set of reasoning-gym, or open_prompts (no reward: for training and scoring heads)
    name: str
    # share of the prompts, relative to the other tasks
    weight: float = Field(1.0, gt=0)
    # parameters of the data set
    params: dict[str, Any] = Field(default_factory=dict)
    # text after the question, for example how to end a response; empty: only the question
    instruction: str = ""


class Data(Section):
    # self_distill: responses that the policy samples to prompts from `tasks`; parquet: text or chats from the file at
    # `path`, parquet or JSON lines
    source: Literal["self_distill", "parquet"] = "self_distill"
    # file with a column `messages`, `prompt` or `text`, .parquet or .jsonl; with source=parquet
    path: FilePath | None = None
    # tasks from which prompts are drawn
    tasks: list[Task] = Field(min_length=1)
    # number of prompts for training heads
    num_prompts: int = Field(768, ge=1)
    # number of prompts held out for scoring
    num_heldout: int = Field(64, ge=1)
    # longest response, in tokens
    max_response_tokens: int = Field(224, ge=1)
    # longest prompt, in tokens
    max_prompt_tokens: int = Field(128, ge=1)
    # where the backbone's hidden states of the training sequences are kept. memory: in each process; disk: in one file,
    # shared by all processes and later runs; stream: nowhere, the backbone runs for every batch. The size is compared
    # with the free memory or disk before training
    cache_hidden: Literal["memory", "disk", "stream"] = "memory"

    @model_validator(mode="after")
    def _source_has_its_file(self) -> Data:
        if self.source == "parquet" and self.path is None:
            raise BadInput("data.path: got null with data.source=parquet; set data.path=<file>.parquet or .jsonl")
        if self.source != "parquet" and self.path is not None:
            raise BadInput(f"data.path: got {self.path} with data.source={self.source}; set data.source=parquet")
        return self
