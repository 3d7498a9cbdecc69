"""A head around a decoder layer of transformers, which is used as it is: norms, projections, experts, gates.

Only its attention is ours, through transformers' own registry of attention functions: the layer hands over queries,
keys and values as it made them (normed, rotated, shared between heads, low-rank), and `chain_core` computes what an
engine computes that applies one head K times (bebop.mtp.chain_attention). bebop.mtp.families says what differs.

Depth k at anchor t:
  input      x = proj(cat[token_norm(e), hidden_norm(h)]), e the embedding of token t+k
             h: depth 1 the backbone's hidden state at t after its final norm, later depths the head's own of k-1
  position   t + k - 1
  output     norm(layer(x)), from which the backbone's lm_head reads the logits for token t+k+1

Shapes: T packed tokens, N anchors, D width, K depths, V vocabulary, H heads, G key heads, E and F widths of a head's
keys and values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bebop.mtp.chain_attention import Documents, chain_attention
from bebop.mtp.families import Family
from bebop.mtp.names import FLOAT32

CORE = "bebop_chain"


@dataclass
class Chain:
    """Keys and values that later calls of one forward pass attend to. anchors: see `draft_hidden`."""

    documents: Documents
    anchors: Tensor | None
    keys: Tensor | None = None  # [T, H, E] depth 1, every position
    values: Tensor | None = None
    own_keys: list[Tensor] = field(default_factory=list)  # depths 2..k, each [N, H, E]
    own_values: list[Tensor] = field(default_factory=list)
    depth: int = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [N, H, E] of this call -> [N, H, E]; the first call with anchors only leaves its keys and values."""
        if self.keys is None:
            self.keys, self.values = k, v
            if self.anchors is not None:
                return torch.zeros_like(q)
        elif self.depth > 1:
            self.own_keys.append(k)
            self.own_values.append(v)
        columns = (self._stack(self.own_keys, q), self._stack(self.own_values, q))
        return chain_attention(q, self.keys, self.values, *columns, self.documents, self.anchors)

    @staticmethod
    def _stack(columns: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack(columns, 1) if columns else like.new_empty(like.shape[0], 0, *like.shape[1:])


def chain_core(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    *,
    chain: Chain,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, N, E], key [1, G, N, E], value [1, G, N, F] -> [1, N, H, F]."""
    heads, width = query.shape[1], query.shape[-1]
    value_width = value.shape[-1]
    if value_width < width:
        value = F.pad(value, [0, width - value_width])
    # Under autocast, norms hand over float32 beside bfloat16 values.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query * (scaling * width**0.5), key, value))
    if k.shape[1] < heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    return chain.attend(q.contiguous(), k.contiguous(), v.contiguous())[None, ..., :value_width], None


ALL_ATTENTION_FUNCTIONS.register(CORE, chain_core)


class ReusedHead(nn.Module):
    """MTP layer 0 of a family of the table. Parameter names: its `parts`, then the decoder layer's own."""

    def __init__(self, family: Family, config: Any, *, stacked: bool = False) -> None:
        """config: transformers' config of the decoder (`get_text_config()`). stacked: see bebop.mtp.names."""
        super().__init__()
        self.family, self.config, self.stacked = family, config, stacked
        model_type, width, eps = config.model_type, config.hidden_size, config.rms_norm_eps
        own = copy.deepcopy(config)
        own._attn_implementation, own._experts_implementation = CORE, "eager"
        index = config.num_hidden_layers
        if getattr(own, "layer_types", None):  # the head's layer attends, whatever the decoder's first does
            index, own.layer_types = 0, ["full_attention", *own.layer_types[1:]]
        norm = family.load_class(model_type, "RMSNorm")
        self.hidden_norm, self.token_norm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.layer = family.load_class(model_type, "DecoderLayer")(own, index)
        _freeze_buffers(self.layer)
        # In a list, so that .to(bfloat16) does not round its float32 frequencies.
        self._rotary = [family.load_class(model_type, family.rotary)(own)]

    def forward(
        self,
        hidden: Tensor,
        embed_weight: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        position_ids: Tensor,
        depth: int,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """See `bebop.mtp.draft_hidden`."""
        chain = Chain(Documents.of(cu_seqlens), anchors)
        embed_weight = embed_weight.detach()
        rows = torch.arange(len(input_ids), device=input_ids.device)
        state = hidden.detach().to(self.proj.weight.dtype)
        outputs = []
        for chain.depth in range(1, depth + 1):
            tokens = input_ids[(rows + chain.depth).clamp(max=len(input_ids) - 1)]
            positions = position_ids[rows] + chain.depth - 1
            embedding = F.embedding(tokens, embed_weight).to(state.dtype)
            if self.family.zero_at_start:
                embedding = embedding.masked_fill((positions == 0)[:, None], 0)
            x = self.proj(torch.cat([self.token_norm(embedding), self.hidden_norm(state)], -1))
            if chain.depth == 1 and anchors is not None:
                # Keys and values are needed at every position, all else at the anchors alone.
                self.layer.self_attn(
                    self.layer.input_layernorm(x[None]),
                    position_embeddings=self._rotary[0](x[None], positions[None]),
                    attention_mask=None,
                    chain=chain,
                )
                rows, x, positions = rows[anchors], x[anchors], positions[anchors]
            rotary = self._rotary[0](x[None], positions[None])
            x = self.layer(x[None], position_embeddings=rotary, attention_mask=None, chain=chain)[0]
            normed = self.norm(x)
            state = normed if self.family.chains_normed else x
            outputs.append(normed)
        return torch.stack(outputs)


def _freeze_buffers(layer: nn.Module) -> None:
    """Buffers that a checkpoint holds (the router's correction) become frozen float32 parameters: they travel with the
    others, are gathered with them, and no optimizer moves them."""
    for module in list(layer.modules()):
        for name in FLOAT32:
            if name in module._buffers:
                value = module._buffers.pop(name)
                module.register_parameter(name, nn.Parameter(value.float(), requires_grad=False))
