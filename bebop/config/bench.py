"""Measurements: the section `bench`, with one section for each suite that needs more keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bebop.config.rollout import Rule
from bebop.config.section import Section
from bebop.errors import BadInput


class KernelBench(Section):
    # numbers of rows of logits for tv_overlap and topk, and of anchors for linear_tv_overlap
    rows: list[int] = Field(default_factory=lambda: [256, 1024])
    # vocabulary sizes
    vocab_sizes: list[int] = Field(default_factory=lambda: [49152, 151936])
    # width of the hidden states for linear_tv_overlap
    width: int = Field(576, ge=1)
    # draft depths for linear_tv_overlap
    depth: int = Field(3, ge=1)


class TreeBench(Section):
    # what to compare: plain decoding, chains by an acceptance rule, trees; rheo is measured once for each of `leads`
    methods: list[Literal["plain", "topk", "rrsw", "rheo"] | Rule] = Field(
        default_factory=lambda: ["plain", "rejection", "block", "topk", "rrsw", "rheo"]
    )
    # RheoSampling's m: numbers of deterministic children before the sampled one
    leads: list[int] = Field(default_factory=lambda: [0, 1, 2, 3])
    # sampling temperatures
    temperatures: list[float] = Field(default_factory=lambda: [0.0, 0.3, 0.7, 1.0])
    # prompts per measurement
    num_prompts: int = Field(16, ge=1)
    # positions of each response at which all trees are scored in closed form; 0: none
    score_positions: int = Field(8, ge=0)


class Bench(Section):
    # rollout: the engine with and without speculation, by batch size; kernels: time and memory of the kernels; tree:
    # draft trees on the torch engine
    suite: Literal["rollout", "kernels", "tree"] = "rollout"
    # numbers of requests in flight
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [1, 8, 64], min_length=1)
    # repetitions; the median is reported
    repeats: int = Field(3, ge=1)
    # shapes, for suite=kernels
    kernels: KernelBench = KernelBench()
    # what to compare, for suite=tree
    tree: TreeBench = TreeBench()

    @model_validator(mode="after")
    def _each_size_once(self) -> Bench:
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise BadInput(f"bench.batch_sizes: got {self.batch_sizes}, expected each size once")
        return self
