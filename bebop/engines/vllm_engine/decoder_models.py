"""The policies and drafters of family `decoder` for vLLM (see registration.py; vLLM 0.31.0).

A target is vLLM's own class, but skips the head's tensors. `DecoderMTP` drafts as bebop trains (bebop.mtp.head): depth
k at anchor t reads the embedding of token t+k and a hidden state. At depth 1 this is the target's, after its final
norm; later it is the drafter's own output at depth k-1:

  fc(cat[pre_fc_norm_embedding(e), pre_fc_norm_hidden(h)]) -> a decoder layer of the target's class -> norm -> lm_head

The layer is built from the target's config, and its number follows the target's last layer. vLLM replaces the drafter's
embeddings and lm_head by the target's.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from bebop.engines.vllm_engine.registration import STOCK, has_heads
from bebop.errors import EngineRefused
from bebop.mtp.families import DECODER, served_by_bebop

Weights = Iterable[tuple[str, Tensor]]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def __getattr__(name: str) -> Any:
    """The target class `<Class>ForCausalLM` for a row of DECODER, made on demand."""
    for model_type, prefix in served_by_bebop().items():
        if name == f"{prefix}ForCausalLM":
            globals()[name] = _target(model_type, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _target(model_type: str, name: str) -> type:
    stock = getattr(importlib.import_module(f"{STOCK}.{model_type}"), name)

    class Target(stock):  # type: ignore[valid-type, misc]
        __doc__ = f"vLLM's {name}, which leaves the tensors of an MTP layer to the drafter."

        def load_weights(self, weights: Weights) -> set[str]:
            return super().load_weights(_without_heads(weights, self.config) if has_heads(self.config) else weights)

    Target.__name__ = Target.__qualname__ = name
    return Target


def _without_heads(weights: Weights, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The decoder's tensors. A tied lm_head is left out too: vLLM raises if it gets the copy without the embeddings."""
    for name, tensor in weights:
        if not name.startswith(DECODER.prefix) and not (config.tie_word_embeddings and name == LM_HEAD):
            yield name, tensor


class DecoderLayerHead(nn.Module):
    """The head without lm_head: `model` of the drafter, with the names after `mtp.` in the checkpoint."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.number = str(config.num_hidden_layers)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = _decoder_layer(vllm_config, f"{prefix}.layers.{self.number}")
        self.layers = nn.ModuleDict({self.number: layer})
        norm = type(layer.input_layernorm)
        self.pre_fc_norm_hidden, self.pre_fc_norm_embedding, self.norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embedding: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        x, residual = self.layers[self.number](positions=positions, hidden_states=x, residual=None)
        return self.norm(x, residual)[0]


class DecoderMTP(nn.Module):
    """The drafter. Its signatures are those that vLLM calls."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.where = vllm_config.model_config.model
        # only the first load must be a whole checkpoint; with dummy weights there is no load
        self.whole = vllm_config.load_config.load_format == "dummy"
        self.model = DecoderLayerHead(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        stacked = getattr(_module(config), f"{_class(config)}Model").hf_to_vllm_mapper
        self.hf_to_vllm_mapper = stacked | WeightsMapper(
            orig_to_new_prefix={
                DECODER.prefix + "layers.0.": f"model.layers.{config.num_hidden_layers}.",
                DECODER.prefix: "model.",
            }
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor:
        embedding = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(embedding, positions, hidden_states)

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the head's tensors, embeddings and lm_head from `weights`. An update may contain any part, in any order.

        Raises EngineRefused if the first load, of the checkpoint, lacks a tensor of the head: it would be uninitialised
        memory, and vLLM would draft with it without an error.
        """
        seen: set[str] = set()
        loaded = AutoWeightsLoader(self).load_weights(self._own(weights, seen), mapper=self.hf_to_vllm_mapper)
        missing = [] if self.whole else sorted(_expected(self.config, seen) - seen)
        if missing:
            raise EngineRefused(
                f"{self.where}: config.json claims an MTP layer ({DECODER.count_key}), but {len(missing)} of its "
                f"tensors are missing: {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; add them, or "
                "serve the policy without speculation"
            )
        self.whole = True
        return loaded

    def _own(self, weights: Weights, seen: set[str]) -> Iterator[tuple[str, Tensor]]:
        further = DECODER.prefix + "layers."  # kept in the file, never served
        for name, tensor in weights:
            head = name.startswith(DECODER.prefix) and (not name.startswith(further) or name.startswith(further + "0."))
            if head or name == EMBEDDING or (name == LM_HEAD and not self.config.tie_word_embeddings):
                seen.add(name)
                yield name, tensor


def _class(config: Any) -> str:
    return served_by_bebop()[type(config).model_type]  # the draft's own model_type is `mtp`


def _module(config: Any) -> Any:
    return importlib.import_module(f"{STOCK}.{type(config).model_type}")


def _decoder_layer(vllm_config: VllmConfig, prefix: str) -> nn.Module:
    """A decoder layer of the target's class, with the arguments in its signature."""
    config = vllm_config.model_config.hf_config
    own = copy.deepcopy(config)
    if getattr(own, "layer_types", None):  # one per layer of the target
        own.layer_types = [*own.layer_types, "full_attention"]
    offered = {
        "vllm_config": vllm_config,
        "config": own,
        "cache_config": vllm_config.cache_config,
        "quant_config": vllm_config.quant_config,
        "prefix": prefix,
    }
    layer = getattr(_module(config), f"{_class(config)}DecoderLayer")
    wanted = inspect.signature(layer).parameters
    return layer(**{name: value for name, value in offered.items() if name in wanted})


def _expected(config: Any, seen: set[str]) -> set[str]:
    """Names of the head's tensors, as bebop writes them for this policy."""
    from bebop.mtp import MtpHead, head_state
    from bebop.mtp.names import stacks_experts

    own = copy.deepcopy(config)
    own.model_type = type(config).model_type
    with torch.device("meta"):
        return set(head_state(MtpHead(replace(DECODER, classes=served_by_bebop()), own, stacked=stacks_experts(seen))))
