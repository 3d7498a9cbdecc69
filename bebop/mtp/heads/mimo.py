"""The MTP head of the MiMo layout, trained on the computation that an engine serves: one layer, applied K times.

Depth k at anchor t, as vLLM 0.31 drafts (model_executor/models/mimo_mtp.py, v1/spec_decode/llm_base_proposer.py):
  input      x = input_proj(cat[hidden_layernorm(h), token_layernorm(e)])
             h: depth 1 the backbone's hidden state at t *before* its final norm (mimo.py norms in compute_logits);
             later depths the head's own output of depth k-1, after final_layernorm.
             e: embedding of token t+k, zero where the rotary position is 0
  position   t + k - 1: depth 1 sits on its anchor, each further depth one on
  attention  over depth-1 keys of positions <= t and the chain's own keys of depths 2..k, see bebop.mtp.chain_attention
  output     final_layernorm(x), from which the backbone's lm_head reads the logits for token t+k+1

Hidden states come to the head after the final norm, since the target logits are read from them and one copy per token
is enough. Dividing by that norm's weight gives the state before it up to a scale per token, and hidden_layernorm
forgets scales: the head's input is the engine's.

Shapes: T packed tokens, N anchors, D width, K depths, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RotaryEmbedding, rotate_half

from bebop.errors import BadInput
from bebop.mtp.chain_attention import Documents, chain_attention
from bebop.mtp.families import MIMO, Family
from bebop.mtp.heads.decoder_layer import ReusedHead
from bebop.mtp.names import to_checkpoint

HEAD_PREFIX = "model.mtp_layers."
LAYER_PREFIX = HEAD_PREFIX + "0."


class MtpAttention(nn.Module):
    """Projections of Qwen2's attention, or of Qwen3's with their norms; the attention itself is `chain_attention`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if getattr(config, "qk_norm", False):  # the key by which vLLM's MiMo has them
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, D]; cos, sin [N, head_dim] -> rotated q [N, num_heads, head_dim]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        return _rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> rotated k, and v, each [T, num_heads, head_dim]; shared key heads are repeated."""
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        k = _rotate(k if self.k_norm is None else self.k_norm(k), cos, sin)
        v = self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        repeat = self.num_heads // self.num_kv_heads
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return k, v


class MtpHead(nn.Module):
    """One MiMo MTP layer. Parameter names are the checkpoint's, without the prefix `model.mtp_layers.0.`."""

    family: Family = MIMO
    stacked = False
    backbone_norm: Tensor  # [D] weight of the backbone's final norm, which the head's first input is taken out of

    def __init__(self, config: PretrainedConfig, backbone_norm: Tensor) -> None:
        super().__init__()
        if getattr(config, "use_sliding_window", False):
            raise BadInput("config.use_sliding_window=true: the head attends to all positions; expected false")
        if backbone_norm.shape != (config.hidden_size,) or bool((backbone_norm == 0).any()):
            raise BadInput(
                f"backbone_norm: {list(backbone_norm.shape)} with {int((backbone_norm == 0).sum())} zeros, "
                f"expected [{config.hidden_size}] without a zero"
            )
        self.config = config
        self.register_buffer("backbone_norm", backbone_norm.detach().clone(), persistent=False)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(width, eps)
        self.hidden_layernorm = nn.RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = MtpAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = Qwen2MLP(config)
        self.final_layernorm = nn.RMSNorm(width, eps)
        # In a list, so that .to(bfloat16) does not round its float32 frequencies.
        self._rotary = [Qwen2RotaryEmbedding(config)]

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
        documents = Documents.of(cu_seqlens)
        embed_weight = embed_weight.detach()
        rows = torch.arange(len(input_ids), device=input_ids.device)
        state = (hidden.detach() / self.backbone_norm).to(self.input_proj.weight.dtype)
        chain_keys: list[Tensor] = []
        chain_values: list[Tensor] = []
        outputs = []
        for k in range(1, depth + 1):
            tokens = input_ids[(rows + k).clamp(max=len(input_ids) - 1)]
            positions = position_ids[rows] + k - 1
            embedding = F.embedding(tokens, embed_weight).masked_fill((positions == 0)[:, None], 0)
            x = self.input_proj(
                torch.cat([self.hidden_layernorm(state), self.token_layernorm(embedding.to(state.dtype))], -1)
            )
            normed = self.input_layernorm(x)
            cos, sin = (table[0] for table in self._rotary[0](x, positions[None]))
            if k == 1:
                # Keys and values are needed at every position, all else at the anchors alone.
                keys, values = self.self_attn.key_value(normed, cos, sin)
                if anchors is not None:
                    rows, x, normed, cos, sin = (tensor[anchors] for tensor in (rows, x, normed, cos, sin))
            else:
                key, value = self.self_attn.key_value(normed, cos, sin)
                chain_keys.append(key)
                chain_values.append(value)
            query = self.self_attn.query(normed, cos, sin)
            chain = _stack(chain_keys, query), _stack(chain_values, query)
            attended = chain_attention(query, keys, values, *chain, documents, anchors)
            x = x + self.self_attn.o_proj(attended.flatten(1))
            x = x + self.mlp(self.post_attention_layernorm(x))
            state = self.final_layernorm(x)
            outputs.append(state)
        return torch.stack(outputs)


Head = MtpHead | ReusedHead


def draft_hidden(
    head: Head,
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
    Returns [K, N, D] in the head's dtype, N = T without anchors; row t of depth k is meaningful where t+k is in t's
    document, elsewhere it is finite filler. Only keys and values are computed outside the anchors. Gradient reaches the
    head's parameters alone: backbone and embedding are detached here.
    Raises ValueError naming the argument on wrong shapes, ids outside the vocabulary or a depth below 1.
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
    return head(hidden, embed_weight, input_ids, cu_seqlens, position_ids, depth, anchors)


def head_state(head: Head) -> dict[str, Tensor]:
    """The head's tensors under their checkpoint names, detached, sharing memory."""
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    return to_checkpoint(head.family, head.config, state, stacked=head.stacked)


def _check_anchors(anchors: Tensor, total: int) -> None:
    if anchors.dtype != torch.int64 or anchors.dim() != 1:
        raise BadInput(f"anchors: {anchors.dtype} {list(anchors.shape)}, expected torch.int64 [N]")
    if len(anchors) and (int(anchors.min()) < 0 or int(anchors.max()) >= total or len(anchors.unique()) < len(anchors)):
        raise BadInput(
            f"anchors: {len(anchors)} values {int(anchors.min())}..{int(anchors.max())}, "
            f"expected distinct positions in [0, {total})"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def _stack(columns: list[Tensor], like: Tensor) -> Tensor:
    """C tensors [N, H, E] -> [N, C, H, E]."""
    return torch.stack(columns, 1) if columns else like.new_empty(like.shape[0], 0, *like.shape[1:])
