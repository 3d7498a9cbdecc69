"""A decoder and its MTP head for the torch engine: inference only, over a preallocated cache.

Both are loaded with transformers' own classes (`bebop.backbone`, `bebop.mtp`), which determine what is computed:
biases, q/k norms, head width, partial or scaled rotary positions, experts. Here q, k, v are one matrix, and so are gate
and up; rotary tables are computed once; experts run as transformers' module. Weights are also available under their
checkpoint names, as views, for updates and checksums.

Legend: B requests, T tokens of a pass, D width, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bebop.backbone import load_backbone
from bebop.engines.torch_engine.kv_cache import Cache, Window
from bebop.errors import EngineRefused
from bebop.mtp import MtpHead, load_heads
from bebop.mtp.checkpoint import Tensors
from bebop.mtp.names import cast, split_experts, stacks_experts, to_checkpoint
from bebop.mtp.reading import LM_HEAD, Reading

PACKED_ROWS = 16  # number of rows for which the packed layout is chosen; it works for any number


class Projection:
    """One or more linear modules with the same input, as one matrix."""

    def __init__(self, modules: Mapping[str, nn.Linear]) -> None:
        """modules: by name in the layer."""
        weights, biases = [m.weight.detach() for m in modules.values()], [m.bias for m in modules.values()]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.views = _parts(modules, "weight", self.weight, weights)
        if self.bias is not None:
            self.views |= _parts(modules, "bias", self.bias, weights)
        self._packed: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Call after the weights changed. On a CPU, bfloat16 products read a copy in oneDNN's own layout.

        Without the copy, oneDNN converts the matrix in every call: 4.3 ms instead of 0.9 ms for one row of a
        [49152, 576] matrix (torch 2.13, 2 cores). torch.compile's frozen graphs call the same operators.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and _packs():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class Layer:
    """One decoder layer, of the backbone or the head. views: tensors by their names in transformers' layer."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim(config)
        self.norms = [layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()]
        normed = getattr(layer.self_attn, "q_norm", None) is not None
        self.qk_norms = [layer.self_attn.get_submodule(f"{p}_norm").weight.detach() for p in "qk"] if normed else []
        self.qkv = Projection(_linears(layer, "self_attn", ("q_proj", "k_proj", "v_proj")))
        self.out = Projection(_linears(layer, "self_attn", ("o_proj",)))
        self.projections = [self.qkv, self.out]
        self.experts = None
        if hasattr(layer.mlp, "experts"):
            self.experts = layer.mlp
        else:
            self.gate_up = Projection(_linears(layer, "mlp", ("gate_proj", "up_proj")))
            self.down = Projection(_linears(layer, "mlp", ("down_proj",)))
            self.projections += [self.gate_up, self.down]
        self.views = layer.state_dict()
        for projection in self.projections:
            self.views |= projection.views

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], window: Window, index: int) -> Tensor:
        """x [B, T, D]; rotary: from `Rotary.at`; index: number of the layer in the window's cache."""
        batch, tokens, width = x.shape
        turned = self.num_heads + self.num_kv_heads
        heads = self.qkv(F.rms_norm(x, (width,), self.norms[0], self.eps)).view(batch, tokens, -1, self.head_dim)
        qk = heads[:, :, :turned]
        if self.qk_norms:
            pair = zip(qk.split([self.num_heads, self.num_kv_heads], 2), self.qk_norms, strict=True)
            qk = torch.cat([F.rms_norm(part, (self.head_dim,), weight, self.eps) for part, weight in pair], 2)
        qk = rotate(qk, *rotary)
        attended = window.attend(index, qk[:, :, : self.num_heads], qk[:, :, self.num_heads :], heads[:, :, turned:])
        x = x + self.out(attended)
        normed = F.rms_norm(x, (width,), self.norms[1], self.eps)
        if self.experts is not None:
            return x + self.experts(normed)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Head:
    """The MTP layer, with the conventions of its family (bebop.mtp.families).

    Depth 1 reads the backbone's hidden state (before the final norm if `before_norm`), later depths the head's own.
    """

    def __init__(self, head: MtpHead, config: Any) -> None:
        self.family, self.eps = head.family, config.rms_norm_eps
        self.hidden_norm, self.token_norm, self.norm = (
            module.weight.detach() for module in (head.hidden_norm, head.token_norm, head.norm)
        )
        self.layer = Layer(head.layer, config)
        self.input = Projection({"proj": head.proj})
        state = head.state_dict() | self.input.views | {f"layer.{n}": view for n, view in self.layer.views.items()}
        self.views = to_checkpoint(head.family, config, state, stacked=head.stacked)
        self.projections = [*self.layer.projections, self.input]

    def __call__(
        self, state: Tensor, embedding: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], window: Window
    ) -> Tensor:
        """state, embedding [B, T, D], positions [B, T] -> the next state [B, T, D]."""
        if self.family.zero_at_start:
            embedding = embedding.masked_fill((positions == 0).unsqueeze(-1), 0)
        parts = [self._normed(state, self.hidden_norm), self._normed(embedding, self.token_norm)]
        x = self.input(torch.cat(parts if self.family.hidden_first else parts[::-1], -1))
        x = self.layer(x, rotary, window, 0)
        return self._normed(x, self.norm) if self.family.chains_normed else x

    def output(self, state: Tensor) -> Tensor:
        """The state from which the draft's logits are computed."""
        return state if self.family.chains_normed else self._normed(state, self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class Rotary:
    """cos and sin of every position, [positions, R], R at most E. The sines include the sign for `rotate`."""

    def __init__(self, embedding: nn.Module, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """embedding: the decoder's own rotary module, with its scaling."""
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = embedding(like, torch.arange(num_positions, device=device).unsqueeze(0))
        sign = torch.ones(sin.shape[-1], device=device)
        sign[: len(sign) // 2] = -1.0
        self.cos, self.sin = cos[0].to(dtype), (sin[0] * sign).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] -> two tables [B, T, 1, R]."""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


class Policy:
    """The weights of a policy directory and its forward passes. views: checkpoint name -> view into the weights.

    Raises BadInput on what `bebop.backbone.load_backbone` refuses, EngineRefused on tensors that only other engines
    know. `bebop.engines.torch_engine.supported` refuses kinds of policies before anything loads.
    """

    def __init__(
        self, policy_dir: Path, *, heads: bool, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        backbone = load_backbone(policy_dir, dtype=dtype, device=device)
        network, self.config, self.dtype, self.device = backbone.model.model, backbone.config, dtype, device
        self.reading, files = backbone.reading, Tensors(policy_dir)
        self._add_biases(backbone.model, files)
        self.embedding, self.norm = backbone.embed_weight.detach(), network.norm.weight.detach()
        self.tied, lm_head = backbone.tied, backbone.model.get_output_embeddings().weight.detach()
        self.lm_head = Projection({"lm_head": _rows(lm_head, backbone.num_ids)})
        self.rotary = Rotary(network.rotary_emb, num_positions, dtype, device)
        state = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.tied:
            state["lm_head.weight"] = lm_head
        modules, network.layers = list(network.layers), None
        self.layers: list[Layer] = []
        while modules:  # whose matrices are copied: one layer is held twice, not all
            self.layers.append(Layer(modules.pop(0), self.config))
            prefix = f"model.layers.{len(self.layers) - 1}."
            state |= {prefix + name: view for name, view in self.layers[-1].views.items()}
        self.stacked = stacks_experts(files)
        self.views = state if self.stacked else split_experts(state)
        self._check_names(backbone.reading)
        self.head = None
        if heads:
            head = load_heads(policy_dir)
            head.load_state_dict(cast(head.state_dict(), dtype), assign=True)
            self.head = Head(head.to(device).requires_grad_(False), self.config)
            self.views |= self.head.views
        self._projections = [self.lm_head]
        for part in (*self.layers, *([self.head] if self.head else [])):
            self._projections += part.projections

    def is_head(self, name: str) -> bool:
        """Whether a checkpoint's tensor is the head's."""
        return self.reading.is_head(name)

    @property
    def vocabulary(self) -> int:
        """Ids that there are logits of: the tokenizer's, without the model's padding."""
        return self.lm_head.weight.shape[0]

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def refresh(self) -> None:
        """Call after the tensors in `views` changed."""
        for projection in self._projections:
            projection.refresh()

    def cache_shape(self) -> dict[str, int]:
        """Sizes of a cache slot, without the number of columns."""
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
        return self.lm_head(self._normed(hidden))

    @torch.inference_mode()
    def prompt_logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probability of each token after the first, [T - 1], of a text in a cache of its own. tokens: long [T]."""
        tokens = tokens.to(self.device)
        cache = Cache(
            num_layers=len(self.layers),
            num_slots=1,
            num_columns=len(tokens),
            dtype=self.dtype,
            device=self.device,
            **self.cache_shape(),
        )
        positions = torch.arange(len(tokens) - 1, device=self.device).unsqueeze(0)
        hidden = self.hidden(tokens[:-1].unsqueeze(0), positions, Window(cache, 0, 0, causal=True))
        logprobs = self.logits(hidden)[0].float().log_softmax(-1)
        return logprobs.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)

    def first_state(self, hidden: Tensor) -> Tensor:
        """[..., D] of `hidden` -> what depth 1 of the head reads."""
        return hidden if self.head.family.before_norm else self._normed(hidden)

    def draft_state(self, state: Tensor, tokens: Tensor, positions: Tensor, window: Window) -> Tensor:
        """One depth of the head. state [B, T, D], tokens [B, T] (the embedded ones), positions [B, T] -> [B, T, D]."""
        embedding = F.embedding(tokens, self.embedding)
        return self.head(state, embedding, positions, self.rotary.at(positions), window)

    def draft_logits(self, state: Tensor) -> Tensor:
        """[..., D] of `draft_state` -> [..., V]."""
        return self.lm_head(self.head.output(state))

    def _normed(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps)

    def _add_biases(self, model: nn.Module, files: Tensors) -> None:
        """Biases that the checkpoint has but transformers' class lacks: Qwen3 in MiMo's layout. vLLM applies them."""
        for name in files:
            found = re.fullmatch(r"(model\.layers\.\d+\.self_attn\.[qkv]_proj)\.bias", name)
            if found and not self.is_head(name) and model.get_submodule(found[1]).bias is None:
                bias = files[name].to(self.device, self.dtype)
                model.get_submodule(found[1]).bias = nn.Parameter(bias, requires_grad=False)

    def _check_names(self, reading: Reading) -> None:
        named = {name for name in reading.shapes if not reading.is_head(name) and not name.endswith("inv_freq")}
        copies = {LM_HEAD} if self.tied else set()  # transformers takes the embedding
        if unknown := sorted(named - self.views.keys() - copies):
            raise EngineRefused(
                f"{reading.path}: tensor {unknown[0]} is in no module that rollout.engine=torch supports; "
                "set rollout.engine=vllm"
            )


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, heads, E]: x cos + (second half, first half) sin. The sines include the sign.

    Only the first R of the E numbers are rotated.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], -1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)


def _linears(layer: nn.Module, part: str, names: Iterable[str]) -> dict[str, nn.Linear]:
    return {f"{part}.{name}": layer.get_submodule(f"{part}.{name}") for name in names}


def _rows(weight: Tensor, num: int) -> nn.Linear:
    """The first rows of a projection, as a view."""
    module = nn.Linear(weight.shape[1], num, bias=False, device="meta")
    module.weight = nn.Parameter(weight[:num], requires_grad=False)
    return module


def _parts(modules: Iterable[str], leaf: str, whole: Tensor, weights: list[Tensor]) -> dict[str, Tensor]:
    """Views of the parts of one tensor, one per module."""
    pieces = whole.split([len(weight) for weight in weights])
    return {f"{name}.{leaf}": piece for name, piece in zip(modules, pieces, strict=True)}


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
