"""Attention of a recursive draft, computed as by an engine that applies one head K times.

The query of depth k at anchor t (rotary position t+k-1) attends to
  - the depth-1 keys of every position <= t of its document: the causal part, which the engine caches, and
  - the keys of depths 2..k of its own chain: the engine overwrites them at the next draft.
Both parts share one softmax. The causal part runs as flash attention, which also returns its log-sum-exp. With it, the
few chain columns are merged in, so no [T, T] matrix exists. The backward pass gives flash attention the *merged* output
and log-sum-exp. Then exp(s - lse) is the merged weight of each causal key, so the gradients are exact, without a
gradient through lse.

Shapes: T packed tokens, N of them queries, H heads, E width of a head, C = k - 1 chain columns, B documents padded to
L in a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Documents:
    """Packed documents in groups of similar length, each group padded to its longest document.

    groups: (rows [B, L]: packed row of each padded slot; slots [n]: slots of the group's n real tokens in the flattened
    group; packed [n]: their packed rows). Padding is after a document's tokens, where no causal query attends.
    """

    groups: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Documents:
        """cu_seqlens [B+1] integer, rising from 0. Within a group lengths differ by less than a factor of two."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        lengths, order = lengths.sort(descending=True)
        groups, first = [], 0
        sizes = lengths.tolist()
        while first < len(sizes):
            last = first
            while last < len(sizes) and 2 * sizes[last] > sizes[first]:
                last += 1
            member = order[first:last]
            offset = torch.arange(sizes[first], device=cu_seqlens.device)
            real = offset < lengths[first:last, None]
            rows = torch.where(real, starts[member][:, None] + offset, starts[member][:, None])
            groups.append((rows, real.flatten().nonzero().squeeze(1), rows[real]))
            first = last
        return cls(tuple(groups))


def chain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chain_k: Tensor,
    chain_v: Tensor,
    documents: Documents,
    anchors: Tensor | None = None,
) -> Tensor:
    """q [N, H, E]; k, v [T, H, E]; chain_k, chain_v [N, C, H, E], C = 0 at depth 1 -> [N, H, E]. Scale 1 / sqrt(E).

    anchors: long [N], the packed row of each query, all different; None: all rows, in order.
    """
    return _ChainAttention.apply(q, k, v, chain_k, chain_v, documents, anchors)


def naive_chain_attention(
    q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The same with one dense mask over [T, T + C] columns: the formula, for readers and tests."""
    total = q.shape[0]
    document = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
    position = torch.arange(total)
    seen = (document[:, None] == document) & (position[:, None] >= position)
    scale = q.shape[-1] ** -0.5
    causal = torch.einsum("qhe,khe->hqk", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    chain = torch.einsum("the,tche->htc", q, chain_k).mul(scale)
    weights = torch.cat([causal, chain], -1).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights[..., :total], v) + torch.einsum(
        "htc,tche->the", weights[..., total:], chain_v
    )


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, chain_k, chain_v, documents, anchors):
        out, lse = torch.empty_like(k), k.new_empty(k.shape[:2], dtype=_statistic(k))
        everywhere = _spread(q, anchors, len(k))
        for rows, slots, packed in documents.groups:
            group_out, group_lse = _causal(*(_pad(x, rows) for x in (everywhere, k, v)))
            out[packed] = _unpad(group_out, slots)
            lse[packed] = _unpad(group_lse[..., None], slots).squeeze(-1)
        if anchors is not None:
            out, lse = out[anchors], lse[anchors]
        weights = None
        if chain_k.shape[1]:
            scores = (q[:, None] * chain_k).sum(-1).to(lse.dtype) * q.shape[-1] ** -0.5  # [N, C, H]
            total = torch.logaddexp(lse, scores.logsumexp(1))
            weights = (scores - total[:, None]).exp().to(q.dtype)
            out = out * (lse - total).exp().to(q.dtype)[..., None] + (weights[..., None] * chain_v).sum(1)
            lse = total
        ctx.documents = documents
        ctx.save_for_backward(q, k, v, chain_k, chain_v, out, lse, weights, anchors)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, chain_k, chain_v, out, lse, weights, anchors = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grads = [torch.empty_like(k) for _ in range(3)]
        # Rows without a query are zero in all four, so their gradients are zero.
        all_grad, all_q, all_out, all_lse = (_spread(x, anchors, len(k)) for x in (grad_out, q, out, lse[..., None]))
        for rows, slots, packed in ctx.documents.groups:
            # A padded slot repeats its document's first row; its query must not add a gradient.
            padded_grad = _pad(all_grad, rows, keep=slots)
            parts = _causal_backward(
                padded_grad, *(_pad(x, rows) for x in (all_q, k, v, all_out)), _pad(all_lse, rows).squeeze(-1)
            )
            for grad, part in zip(grads, parts, strict=True):
                grad[packed] = _unpad(part, slots)
        if anchors is not None:
            grads[0] = grads[0][anchors]
        if weights is None:
            return *grads, torch.zeros_like(chain_k), torch.zeros_like(chain_v), None, None
        scale = q.shape[-1] ** -0.5
        delta = (grad_out * out).sum(-1)  # [N, H]
        grad_scores = weights * ((grad_out[:, None] * chain_v).sum(-1) - delta[:, None]) * scale  # [N, C, H]
        grads[0] += (grad_scores[..., None] * chain_k).sum(1)
        return *grads, grad_scores[..., None] * q[:, None], weights[..., None] * grad_out[:, None], None, None


def _statistic(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _spread(x: Tensor, anchors: Tensor | None, total: int) -> Tensor:
    """A zero [T, ...] with [N, ...] written to its rows."""
    return x if anchors is None else x.new_zeros(total, *x.shape[1:]).index_copy_(0, anchors, x)


def _pad(x: Tensor, rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """[T, H, E] -> [B, H, L, E]; if `keep` is given, all other slots are zero."""
    padded = x.index_select(0, rows.flatten())
    if keep is not None and keep.shape[0] != padded.shape[0]:
        padded = torch.zeros_like(padded).index_copy_(0, keep, padded.index_select(0, keep))
    return padded.view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _unpad(x: Tensor, slots: Tensor) -> Tensor:
    """[B, H, L, E] -> [n, H, E]."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of [B, H, L, E], and the log-sum-exp [B, H, L] of the scaled scores (natural logarithm)."""
    return _CPU(q, k, v, 0.0, True) if q.device.type == "cpu" else dense_causal(q, k, v)


def _causal_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    if q.device.type == "cpu":
        return _CPU_BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, True)
    return dense_causal_backward(grad, q, k, v, out, lse)


BLOCK = 512  # queries in one block of scores, if no flash kernel runs


def dense_causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`_causal` for devices without a flash kernel that returns its log-sum-exp: [B, H, BLOCK, L] scores at once."""
    out, lse = torch.empty_like(v), q.new_empty(q.shape[:3], dtype=_statistic(q))
    for start, end in _blocks(q):
        scores = _scores(q, k, start, end)
        lse[:, :, start:end] = scores.logsumexp(-1)
        out[:, :, start:end] = (scores - lse[:, :, start:end, None]).exp_().to(v.dtype) @ v[:, :, :end]
    return out, lse


def dense_causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients on q, k, v. out and lse may be those of a longer softmax that contains these columns."""
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True)
    for start, end in _blocks(q):
        rows, seen = slice(start, end), slice(0, end)
        weights = (_scores(q, k, start, end) - lse[:, :, rows, None]).exp_().to(q.dtype)
        grad_scores = grad[:, :, rows] @ v[:, :, seen].mT
        grad_scores = grad_scores.sub_(delta[:, :, rows]).mul_(weights).mul_(q.shape[-1] ** -0.5)
        grad_q[:, :, rows] = grad_scores @ k[:, :, seen]
        grad_k[:, :, seen] += grad_scores.mT @ q[:, :, rows]
        grad_v[:, :, seen] += weights.mT @ grad[:, :, rows]
    return grad_q, grad_k, grad_v


def _blocks(q: Tensor) -> list[tuple[int, int]]:
    length = q.shape[2]
    return [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def _scores(q: Tensor, k: Tensor, start: int, end: int) -> Tensor:
    """[B, H, end - start, end] scaled, -inf above the diagonal, in the type of the statistics."""
    future = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
    scores = (q[:, :, start:end] @ k[:, :, :end].mT).to(_statistic(q))
    return scores.mul_(q.shape[-1] ** -0.5).masked_fill_(future, -torch.inf)
