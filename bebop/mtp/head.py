"""The MTP head: a decoder layer of transformers between a projection and a norm, trained as an engine serves it.

The layer's norms, projections, experts and gates are used unchanged. Only its attention is replaced, through
transformers' registry of attention functions. The layer passes its queries, keys and values (normed, rotated, shared
between heads, low-rank) to `chain_core`, which computes attention like an engine that applies one head K times
(bebop.mtp.chain_attention). The differences between families are in bebop.mtp.families.

Depth k at anchor t, as vLLM 0.31 drafts (v1/spec_decode/llm_base_proposer.py):
  input      x = proj(cat[token_norm(e), hidden_norm(h)]), MiMo's in the other order
             e: embedding of token t+k; some families zero it at rotary position 0
             h: at depth 1 the backbone's hidden state at t, at later depths the head's own from depth k-1
  position   t + k - 1: depth 1 is at its anchor, each further depth one position later
  attention  over depth-1 keys of positions <= t and the chain's own keys of depths 2..k
  output     norm(layer(x)), from which the backbone's lm_head reads the logits for token t+k+1

The head gets hidden states after the backbone's final norm, because the target logits need these and one copy per token
is enough. MiMo's head reads the state before that norm. Dividing by the norm's weight gives that state up to a scale
per token, and hidden_norm removes scales.

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

from bebop.errors import BadInput
from bebop.mtp.chain_attention import Documents, chain_attention
from bebop.mtp.families import Family
from bebop.mtp.names import FLOAT32, to_checkpoint

CORE = "bebop_chain"


@dataclass
class Chain:
    """Keys and values to which later calls of the same forward pass attend. anchors: see `draft_hidden`."""

    documents: Documents
    anchors: Tensor | None
    keys: Tensor | None = None  # [T, H, E] depth 1, every position
    values: Tensor | None = None
    own_keys: list[Tensor] = field(default_factory=list)  # depths 2..k, each [N, H, E]
    own_values: list[Tensor] = field(default_factory=list)
    depth: int = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [N, H, E] of the rows in this call of the layer -> [N, H, E]. Scale 1 / sqrt(E).

        With anchors, the first call only stores its keys and values.
        """
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
    # Under autocast, norms return float32 queries and keys, while values are bfloat16.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query * (scaling * width**0.5), key, value))
    if k.shape[1] < heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    return chain.attend(q.contiguous(), k.contiguous(), v.contiguous())[None, ..., :value_width], None


ALL_ATTENTION_FUNCTIONS.register(CORE, chain_core)


class MtpHead(nn.Module):
    """MTP layer 0 of a family. Parameter names: the family's `parts`, then the decoder layer's own names."""

    backbone_norm: Tensor | None  # [D] weight of the backbone's final norm, for families that read the state before it

    def __init__(
        self, family: Family, config: Any, backbone_norm: Tensor | None = None, *, stacked: bool = False
    ) -> None:
        """config: transformers' config of the decoder (`get_text_config()`). backbone_norm [D]: weight of the
        backbone's final norm, for families whose head reads the state before it. stacked: see bebop.mtp.names.

        Raises ValueError if the decoder has a sliding window, or if backbone_norm has a zero and cannot be undone.
        """
        super().__init__()
        self.family, self.config, self.stacked = family, config, stacked
        window = getattr(config, "sliding_window", None)
        if window is not None and window < config.max_position_embeddings:
            raise BadInput(f"config.sliding_window={window}: the head attends to all positions; expected null")
        self.register_buffer("backbone_norm", _divisor(family, config, backbone_norm), persistent=False)
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
        """See `draft_hidden`."""
        chain = Chain(Documents.of(cu_seqlens), anchors)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        hidden = hidden.detach()
        state = (hidden if self.backbone_norm is None else hidden / self.backbone_norm).to(self.proj.weight.dtype)
        outputs = []
        for chain.depth in range(1, depth + 1):
            tokens = input_ids[(rows + chain.depth).clamp(max=len(input_ids) - 1)]
            positions = position_ids[rows] + chain.depth - 1
            x = self._input(state, F.embedding(tokens, embed_weight.detach()), positions)
            if chain.depth == 1 and anchors is not None:
                # Keys and values are needed at every position, everything else only at the anchors.
                self.layer.self_attn(self.layer.input_layernorm(x[None]), **self._attending(x, positions, chain))
                rows, x, positions = rows[anchors], x[anchors], positions[anchors]
            x = self.layer(x[None], **self._attending(x, positions, chain))[0]
            outputs.append(self.norm(x))
            state = outputs[-1] if self.family.chains_normed else x
        return torch.stack(outputs)

    def _input(self, state: Tensor, embedding: Tensor, positions: Tensor) -> Tensor:
        """state, embedding [N, D], positions [N] -> the layer's input [N, D]."""
        embedding = embedding.to(state.dtype)
        if self.family.zero_at_start:
            embedding = embedding.masked_fill((positions == 0)[:, None], 0)
        parts = [self.token_norm(embedding), self.hidden_norm(state)]
        return self.proj(torch.cat(parts[::-1] if self.family.hidden_first else parts, -1))

    def _attending(self, x: Tensor, positions: Tensor, chain: Chain) -> dict[str, Any]:
        """Arguments of transformers' layer for its attention; x [N, D]."""
        rotary = self._rotary[0](x[None], positions[None])
        return {"position_embeddings": rotary, "attention_mask": None, "chain": chain}


def draft_hidden(
    head: MtpHead,
    hidden: Tensor,
    embed_weight: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    depth: int,
    *,
    anchors: Tensor | None = None,
) -> Tensor:
    """Hidden states of all draft depths, teacher-forced on the packed text.

    hidden [T, D] backbone, after its final norm; embed_weight [V, D]; input_ids, position_ids [T] integer; cu_seqlens
    [B+1]; depth K at least 1; anchors long [N], distinct positions to draft at, None for all T.
    Returns [K, N, D] in the head's dtype, N = T without anchors. Row t of depth k is valid if t+k is in t's document;
    other rows are finite but meaningless. Outside the anchors only keys and values are computed. Only the head's
    parameters get a gradient: backbone and embedding are detached here.
    Raises ValueError, which names the argument, for wrong shapes, ids outside the vocabulary or a depth below 1.
    """
    total, width = len(input_ids), head.config.hidden_size
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise BadInput(f"depth={depth!r}: expected an integer of at least 1")
    for argument, value, shape in (
        ("hidden", hidden, (total, width)),
        ("position_ids", position_ids, (total,)),
        ("embed_weight", embed_weight, (embed_weight.shape[0], width)),
    ):
        if tuple(value.shape) != shape:
            raise BadInput(f"{argument}: shape {list(value.shape)}, expected {list(shape)}")
    if not total or int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total or bool((cu_seqlens.diff() <= 0).any()):
        raise BadInput(f"cu_seqlens: {cu_seqlens.tolist()}, expected rising from 0 to T={total}, T at least 1")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= embed_weight.shape[0]:
        raise BadInput(
            f"input_ids: values {int(input_ids.min())}..{int(input_ids.max())}, "
            f"expected token ids in [0, {embed_weight.shape[0]})"
        )
    if anchors is not None:
        _check_anchors(anchors, total)
        if not len(anchors):  # transformers' layers reject an empty batch; every parameter still gets a gradient of 0
            return head(hidden, embed_weight, input_ids, cu_seqlens, position_ids, depth, anchors.new_zeros(1))[:, :0]
    return head(hidden, embed_weight, input_ids, cu_seqlens, position_ids, depth, anchors)


def head_state(head: MtpHead) -> dict[str, Tensor]:
    """The head's tensors under their checkpoint names, detached, sharing memory."""
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    return to_checkpoint(head.family, head.config, state, stacked=head.stacked)


def _divisor(family: Family, config: Any, norm: Tensor | None) -> Tensor | None:
    if not family.before_norm:
        return None
    if norm is None or norm.shape != (config.hidden_size,) or bool((norm == 0).any()):
        found = None if norm is None else f"{list(norm.shape)} with {int((norm == 0).sum())} zeros"
        raise BadInput(f"backbone_norm: {found}, expected [{config.hidden_size}] without a zero")
    return norm.detach().clone()


def _check_anchors(anchors: Tensor, total: int) -> None:
    if anchors.dtype != torch.int64 or anchors.dim() != 1:
        raise BadInput(f"anchors: {anchors.dtype} {list(anchors.shape)}, expected torch.int64 [N]")
    if len(anchors) and (int(anchors.min()) < 0 or int(anchors.max()) >= total or len(anchors.unique()) < len(anchors)):
        raise BadInput(
            f"anchors: {len(anchors)} values {int(anchors.min())}..{int(anchors.max())}, "
            f"expected distinct positions in [0, {total})"
        )


def _freeze_buffers(layer: nn.Module) -> None:
    """Turn buffers that a checkpoint contains (the router's correction) into frozen float32 parameters, so that they
    are saved and gathered with the other parameters, and no optimizer changes them."""
    for module in list(layer.modules()):
        for name in FLOAT32:
            if name in module._buffers:
                value = module._buffers.pop(name)
                module.register_parameter(name, nn.Parameter(value.float(), requires_grad=False))
