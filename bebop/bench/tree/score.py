"""Scored acceptance of draft trees: at the same positions of the policy's own text, every variant's tree is grown and
its expected acceptance taken in closed form (`bebop.spec.expected_accepted`).

The engine's counters tell what happened in rounds of texts that part at the first difference; this tells what is to
expect in a round at a given place. Differences between variants are then paired by position, and differences of a few
percent show after hundreds of rounds where counters need ten thousands.

Legend: A anchors of one text, the last one that the policy has read is t; L its tokens, W frontier nodes, N tree nodes,
D width, H heads, E width of a head, V vocabulary, C = k - 1 own keys of a chain at depth k.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop.backbone import load_backbone
from bebop.errors import ConfigError
from bebop.mtp import MtpHead, load_heads
from bebop.spec import Streams, TreeBatch, TreeGrower, TreeSpec, expected_accepted, warp

ANCHORS = 8  # of one target pass


class TreeScorer:
    """A policy and its heads, for texts of token ids."""

    def __init__(self, policy_dir: Path, dtype: torch.dtype) -> None:
        self.backbone = load_backbone(policy_dir, dtype=dtype)
        head = load_heads(policy_dir)
        if not isinstance(head, MtpHead):
            raise ConfigError(
                f"bench.tree.score_positions: the heads in {policy_dir} are none that drafts are scored for"
            )
        self.head = head.to(dtype).eval()

    @torch.no_grad()
    def score(
        self, text: Sequence[int], anchors: Sequence[int], specs: Sequence[TreeSpec], temperature: float
    ) -> Tensor:
        """float64 [len(specs), A]: expected tokens, 1 + accepted, of the round behind text[t + 1], for each anchor t.

        anchors: in [0, len(text) - 1).
        """
        ids = torch.tensor(text)
        cache = self._read(ids)
        found = torch.empty(len(specs), len(anchors), dtype=torch.float64)
        for first in range(0, len(anchors), ANCHORS):
            at = torch.tensor(anchors[first : first + ANCHORS])
            for number, spec in enumerate(specs):
                trees = self._grow(ids, at, spec, temperature)
                hidden = self._target_hidden(trees, at, len(ids), cache)
                expected = expected_accepted(trees, lambda row, h=hidden: self._target(h, row, temperature))
                found[number, first : first + len(at)] = 1.0 + expected.sum(1)
        return found

    def _read(self, ids: Tensor) -> object:
        """The text's keys and values; its hidden states stay for the drafts."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.backbone.config)
        out = self.backbone.model.model(input_ids=ids[None], past_key_values=cache, use_cache=True)
        self._hidden = out.last_hidden_state[0]
        return cache

    def _grow(self, ids: Tensor, at: Tensor, spec: TreeSpec, temperature: float) -> TreeBatch:
        """Trees behind text[t + 1], drafted as an engine drafts: see `bebop.mtp.heads.mimo`."""
        head, attention = self.head, self.head.self_attn
        rows = torch.arange(len(ids) - 1)
        first, positions = self._input(self._hidden[:-1] / head.backbone_norm, ids[1:], rows)
        keys, values = attention.key_value(head.input_layernorm(first), *positions)  # depth 1, at every position
        seen = rows <= at.unsqueeze(1)  # [A, L-1]
        # the place in the text, taken as the round's, makes the probes of a text's anchors independent
        grower = TreeGrower(spec, Streams(at * 0 + int(ids.sum()), at.clone()), temperature=temperature)
        state = None
        own_keys = own_values = keys.new_empty(len(at), 1, 0, *keys.shape[1:])  # [A, W, C, H, E]
        for depth in range(spec.depth):
            frontier = grower.frontier
            if depth == 0:
                x, rotary = first[at], tuple(table[at] for table in positions)
            else:
                parent = frontier.parent_rows

                def of_parent(value: Tensor, parent: Tensor = parent) -> Tensor:
                    index = parent.reshape(*parent.shape, *(1,) * (value.ndim - 2)).expand(-1, -1, *value.shape[2:])
                    return value.gather(1, index)

                place = (at + depth).unsqueeze(1).expand_as(parent).flatten()
                x, rotary = self._input(of_parent(state).flatten(0, 1), frontier.tokens.flatten(), place)
            width = frontier.tokens.shape[1] if depth else 1
            normed = head.input_layernorm(x)
            query = attention.query(normed, *rotary).unflatten(0, (len(at), width))
            if depth:
                key, value = (part.unflatten(0, (len(at), width)) for part in attention.key_value(normed, *rotary))
                own_keys = torch.cat([of_parent(own_keys), key.unsqueeze(2)], 2)
                own_values = torch.cat([of_parent(own_values), value.unsqueeze(2)], 2)
            x = x + attention.o_proj(_attend(query, keys, values, seen, own_keys, own_values).flatten(0, 1))
            x = x + head.mlp(head.post_attention_layernorm(x))
            state = head.final_layernorm(x).unflatten(0, (len(at), width))
            grower.expand(F.linear(state, self.backbone.lm_head_weight))
        return grower.finish()

    def _input(self, state: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The head's input [n, D] and its rotation, (cos, sin) [n, E]."""
        embedding = F.embedding(tokens, self.backbone.embed_weight).masked_fill((positions == 0)[:, None], 0)
        joined = torch.cat([self.head.hidden_layernorm(state), self.head.token_layernorm(embedding)], -1)
        x = self.head.input_proj(joined)
        return x, tuple(table[0] for table in self.head._rotary[0](x, positions[None]))

    def _target_hidden(self, trees: TreeBatch, at: Tensor, length: int, cache: object) -> Tensor:
        """[A, N+1, D]: the policy's state behind the root and behind every node, all anchors in one pass."""
        batch, num = trees.tokens.shape
        to_text = (torch.arange(length) <= (at + 1).unsqueeze(1)).unsqueeze(1).expand(-1, num, -1)  # [A, N, L]
        to_nodes = torch.zeros(batch, num, batch, num, dtype=torch.bool)
        each = torch.arange(batch)
        to_nodes[each, :, each] = trees.ancestors()
        mask = torch.cat([to_text, to_nodes.flatten(2)], -1).reshape(1, 1, batch * num, length + batch * num)
        out = self.backbone.model.model(
            input_ids=trees.tokens.clamp(min=0).reshape(1, -1),
            position_ids=((at + 1).unsqueeze(1) + trees.depths).reshape(1, -1),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(length)
        nodes = out.last_hidden_state.view(batch, num, -1)
        return torch.cat([self._hidden[at + 1].unsqueeze(1), nodes], 1)

    def _target(self, hidden: Tensor, row: Tensor, temperature: float) -> Tensor:
        logits = F.linear(hidden[torch.arange(len(row)), row], self.backbone.lm_head_weight)
        return warp(logits, temperature=temperature)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """query [A, W, H, E]; keys, values [L, H, E] under seen [A, L]; own ones [A, W, C, H, E] -> [A, W, H * E]."""
    scale = query.shape[-1] ** -0.5
    text = torch.einsum("awhe,lhe->awhl", query, keys).mul(scale)
    text = text.masked_fill(~seen[:, None, None, :], -torch.inf)
    chain = torch.einsum("awhe,awche->awhc", query, own_keys).mul(scale)
    weights = torch.cat([text, chain], -1).float().softmax(-1).to(query.dtype)
    attended = torch.einsum("awhl,lhe->awhe", weights[..., : keys.shape[0]], values)
    return (attended + torch.einsum("awhc,awche->awhe", weights[..., keys.shape[0] :], own_values)).flatten(2)
