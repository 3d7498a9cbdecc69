"""A Qwen2-type decoder and its MTP head as the torch engine runs them: inference alone, over a preallocated cache.

The computations are transformers' Qwen2ForCausalLM and `bebop.mtp.heads.mimo`. q, k, v and gate, up are one matrix
each, and rotary tables are made once. Weights are also seen under their checkpoint names, as views, for updates and
checksums.

Legend: B requests, T tokens of a pass, D width, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop.engines.torch_engine.kv_cache import Window
from bebop.errors import EngineRefused
from bebop.mtp.checkpoint import Tensors
from bebop.mtp.families import MIMO
from bebop.mtp.heads.mimo import HEAD_PREFIX, LAYER_PREFIX

PACKED_ROWS = 16  # rows that the packed layout is chosen for; it serves any number


class Projection:
    """A linear map of one or several checkpoint matrices that read the same input."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.bias = torch.cat(biases) if biases is not None else None
        self._sizes = [len(weight) for weight in weights]
        self._packed: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Follow a change of the weights. On a CPU, bfloat16 products read a copy in oneDNN's own layout.

        Without it oneDNN lays the matrix out anew in every call: 4.3 ms instead of 0.9 ms for one row of a [49152, 576]
        matrix (torch 2.13, 2 cores). These operators are the ones torch.compile's frozen graphs call.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and _packs():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)

    def views(self) -> tuple[Tensor, ...]:
        """The weights, then the biases, sharing memory."""
        biases = self.bias.split(self._sizes) if self.bias is not None else ()
        return (*self.weight.split(self._sizes), *biases)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class Layer:
    """One decoder layer, of the backbone or of the head."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, config: Any) -> None:
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim(config)
        names = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]
        self.norms = [tensors[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention")]
        self.qkv = Projection([tensors[f"{n}.weight"] for n in names], [tensors[f"{n}.bias"] for n in names])
        self.out = Projection([tensors[f"{prefix}self_attn.o_proj.weight"]])
        self.gate_up = Projection([tensors[name] for name in gate_up])
        self.down = Projection([tensors[f"{prefix}mlp.down_proj.weight"]])
        self.views = {
            f"{prefix}input_layernorm.weight": self.norms[0],
            f"{prefix}post_attention_layernorm.weight": self.norms[1],
            f"{prefix}self_attn.o_proj.weight": self.out.weight,
            f"{prefix}mlp.down_proj.weight": self.down.weight,
        }
        self.views |= zip([f"{n}.weight" for n in names] + [f"{n}.bias" for n in names], self.qkv.views(), strict=True)
        self.views |= zip(gate_up, self.gate_up.views(), strict=True)
        self.projections = [self.qkv, self.out, self.gate_up, self.down]

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], window: Window, index: int) -> Tensor:
        """x [B, T, D]; rotary as `Rotary.at` gives it; index: the layer's place in the window's cache."""
        batch, tokens, width = x.shape
        turned = self.num_heads + self.num_kv_heads
        heads = self.qkv(F.rms_norm(x, (width,), self.norms[0], self.eps)).view(batch, tokens, -1, self.head_dim)
        qk = rotate(heads[:, :, :turned], *rotary)
        attended = window.attend(index, qk[:, :, : self.num_heads], qk[:, :, self.num_heads :], heads[:, :, turned:])
        x = x + self.out(attended)
        gate, up = self.gate_up(F.rms_norm(x, (width,), self.norms[1], self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Head:
    """The MTP layer. Depth 1 reads the backbone's hidden state before its final norm, later depths its own output."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Any) -> None:
        self.eps = config.rms_norm_eps
        self.layer = Layer(tensors, LAYER_PREFIX, config)
        self.input = Projection([tensors[f"{LAYER_PREFIX}input_proj.weight"]])
        self.norms = {
            f"{LAYER_PREFIX}{name}_layernorm.weight": tensors[f"{LAYER_PREFIX}{name}_layernorm.weight"]
            for name in ("hidden", "token", "final")
        }
        self.views = self.layer.views | self.norms | {f"{LAYER_PREFIX}input_proj.weight": self.input.weight}
        self.projections = [*self.layer.projections, self.input]

    def __call__(
        self, state: Tensor, embedding: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], window: Window
    ) -> Tensor:
        """state, embedding [B, T, D], positions [B, T] -> the next state [B, T, D], from which logits are read."""
        hidden_norm, token_norm, final_norm = self.norms.values()
        width = (state.shape[-1],)
        embedding = embedding.masked_fill((positions == 0).unsqueeze(-1), 0)
        parts = [F.rms_norm(state, width, hidden_norm, self.eps), F.rms_norm(embedding, width, token_norm, self.eps)]
        x = self.layer(self.input(torch.cat(parts, -1)), rotary, window, 0)
        return F.rms_norm(x, width, final_norm, self.eps)


class Rotary:
    """cos and sin of every position, the sign of `rotate`'s second half in the sines; [positions, E]."""

    def __init__(self, config: Any, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

        like = torch.empty(0, dtype=torch.float32)
        cos, sin = Qwen2RotaryEmbedding(config)(like, torch.arange(num_positions).unsqueeze(0))
        sign = torch.ones(sin.shape[-1]).index_fill(0, torch.arange(sin.shape[-1] // 2), -1.0)
        self.cos, self.sin = cos[0].to(device, dtype), (sin[0] * sign).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] -> two tables [B, T, 1, E]."""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


class Policy:
    """The weights of a policy directory and its forward passes. views: checkpoint name -> view into the weights.

    Raises EngineRefused where the directory does not hold a Qwen2-type policy, or weights that are not finite.
    """

    def __init__(
        self, policy_dir: Path, *, heads: bool, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        from transformers import AutoConfig

        self.config, self.dtype, self.device = AutoConfig.from_pretrained(policy_dir), dtype, device
        if self.config.model_type not in MIMO.classes or getattr(self.config, "use_sliding_window", False):
            raise EngineRefused(
                f"{policy_dir}: model_type {self.config.model_type!r}, sliding window "
                f"{getattr(self.config, 'use_sliding_window', False)}; rollout.engine=torch runs Qwen2-type policies "
                "with full attention, set rollout.engine=vllm"
            )
        tensors = _loaded(policy_dir, heads, dtype, device)
        layers = [f"model.layers.{i}." for i in range(self.config.num_hidden_layers)]
        try:
            self.embedding, self.norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
            tied = self.config.tie_word_embeddings
            self.lm_head = Projection([self.embedding if tied else tensors["lm_head.weight"]])
            self.layers = [Layer(tensors, prefix, self.config) for prefix in layers]
            self.head = Head(tensors, self.config) if heads else None
        except KeyError as error:
            raise EngineRefused(f"{policy_dir}: tensor {error} is missing, expected a Qwen2-type policy") from None
        self.rotary = Rotary(self.config, num_positions, dtype, device)
        self.views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not tied:
            self.views["lm_head.weight"] = self.lm_head.weight
        self._projections = [self.lm_head]
        for part in (*self.layers, *([self.head] if self.head else [])):
            self.views |= part.views
            self._projections += part.projections

    @property
    def vocabulary(self) -> int:
        return self.embedding.shape[0]

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def refresh(self) -> None:
        """Follow a change of the tensors behind `views`."""
        for projection in self._projections:
            projection.refresh()

    def cache_shape(self) -> dict[str, int]:
        """Sizes of a cache slot, apart from its columns."""
        return {"num_kv_heads": self.config.num_key_value_heads, "head_dim": head_dim(self.config)}

    def hidden(self, tokens: Tensor, positions: Tensor, window: Window) -> Tensor:
        """Hidden states before the final norm, [B, T, D]. tokens, positions: long [B, T]."""
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary.at(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, window, index)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] of `hidden` -> [..., V]."""
        return self.lm_head(F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps))

    def draft_state(self, state: Tensor, tokens: Tensor, positions: Tensor, window: Window) -> Tensor:
        """One depth of the head. state [B, T, D], tokens [B, T] (the embedded ones), positions [B, T] -> [B, T, D]."""
        embedding = F.embedding(tokens, self.embedding)
        return self.head(state, embedding, positions, self.rotary.at(positions), window)

    def draft_logits(self, state: Tensor) -> Tensor:
        """[..., D] of `draft_state` -> [..., V]."""
        return self.lm_head(state)


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, heads, E]: x cos + (second half, first half) sin, the sign in the sines."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _loaded(policy_dir: Path, heads: bool, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    tensors = Tensors(policy_dir)
    loaded = {n: tensors[n].to(device, dtype) for n in tensors if heads or not n.startswith(HEAD_PREFIX)}
    for name, tensor in loaded.items():
        if not bool(torch.isfinite(tensor).all()):
            raise EngineRefused(f"{policy_dir}: {name} holds values that are not finite")
    return loaded
