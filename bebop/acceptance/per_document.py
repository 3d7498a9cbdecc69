"""Sampled text -> statistics of the heads at every position where an engine could have started a draft.

A draft that starts close to the end of a response runs over it: the engine verifies it all the same and counts what it
accepts. So that such drafts can be scored, each response is continued here by K tokens from the same target (with the
backbone alone); the continuation is read by the last anchors and appears nowhere else.

Shapes: K depths, N anchors, S responses. Anchor i of a response with n tokens, i = 0..n-2, drafts after token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bebop.acceptance.scores import accepted_by_rule, anchor_statistics, join
from bebop.backbone import Backbone
from bebop.backbone.hidden_states import HiddenStates
from bebop.data.batches import pack_rows
from bebop.data.self_distill import TextRow
from bebop.errors import BadInput
from bebop.head_training.objective import anchor_rows
from bebop.mtp.heads.mimo import Head

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Anchors:
    """statistics: [K,N] each, see bebop.acceptance.scores; accepted: [K,N] float64 by rule, unbiased for P(first j
    drafts accepted); response [N] which of the scored responses; position [N] number of the response's token that
    the draft follows, from 0."""

    statistics: dict[str, Tensor]
    accepted: dict[str, Tensor]
    response: Tensor
    position: Tensor
    temperature: float

    @property
    def entropy_nats(self) -> Tensor:
        """[N] target entropy at the first draft's position."""
        return self.statistics["target_entropy"][0].double()

    def length(self, rule: str) -> Tensor:
        """[N] expected acceptance length, tokens per target forward."""
        return 1 + self.accepted[rule].sum(0)

    def of(self, responses: Sequence[int]) -> Anchors:
        """Those of some responses, with the numbers they have."""
        chosen = torch.isin(self.response, torch.tensor(list(responses)))
        return Anchors(
            {name: value[:, chosen] for name, value in self.statistics.items()},
            {name: value[:, chosen] for name, value in self.accepted.items()},
            self.response[chosen],
            self.position[chosen],
            self.temperature,
        )


@torch.no_grad()
def score_text(
    backbone: Backbone, head: Head, rows: Sequence[TextRow], *, depth: int, temperature: float, seed: int
) -> Anchors:
    """Score the heads on responses sampled at `temperature`. Those of less than 2 tokens had no draft and have no
    anchor; where all are, a ValueError."""
    kept = [i for i, row in enumerate(rows) if len(row.response_ids) > 1]
    if not kept:
        raise BadInput(f"sampled text: 0 of {len(rows)} responses have the 2 tokens that a draft needs")
    generator = torch.Generator().manual_seed(seed)
    longer = [rows[i] for i in kept]
    for _ in range(depth):
        longer = _continued(backbone, longer, temperature, generator)
    tokens = max(BATCH_TOKENS, max(len(row.input_ids) for row in longer))
    hidden = HiddenStates(backbone, longer, tokens, name="sampled text", how="stream")
    embed, lm_head = backbone.embed_weight.float(), backbone.lm_head_weight.float()
    parts, responses, positions = [], [], []
    for indexed in pack_rows(longer, range(len(longer)), tokens, depth):
        batch = hidden.batch(indexed)
        parts.append(anchor_statistics(anchor_rows(head, batch, embed, depth), batch, lm_head, temperature=temperature))
        document = torch.searchsorted(indexed.packed.cu_seqlens, indexed.anchors, right=True) - 1
        which = torch.tensor(indexed.sequences)[document]
        responses.append(torch.tensor(kept)[which])
        start = torch.tensor([len(row.prompt_ids) for row in longer])[which]
        positions.append(indexed.packed.position_ids[indexed.anchors] + 1 - start)
    response, position = torch.cat(responses), torch.cat(positions)
    # After a response's last token the engine drafts no more.
    inside = position < torch.tensor([len(row.response_ids) for row in rows])[response] - 1
    statistics = {name: value[:, inside] for name, value in join(parts).items()}
    return Anchors(statistics, accepted_by_rule(statistics), response[inside], position[inside], temperature)


def _continued(
    backbone: Backbone, rows: Sequence[TextRow], temperature: float, generator: torch.Generator
) -> list[TextRow]:
    """Every response with one more token from the backbone at `temperature`."""
    tokens = max(BATCH_TOKENS, max(len(row.input_ids) for row in rows))
    states = HiddenStates(backbone, rows, tokens, name="continued text", how="stream")
    lm_head, drawn = backbone.lm_head_weight.float(), []
    for indexed in pack_rows(rows, range(len(rows)), tokens, depth=1):
        batch = states.batch(indexed)
        probs = torch.softmax(batch.hidden[batch.cu_seqlens[1:] - 1] @ lm_head.T / temperature, -1)
        drawn += torch.multinomial(probs.cpu(), 1, generator=generator).squeeze(1).tolist()
    return [
        replace(row, response_ids=(*row.response_ids, token), response_mask=(*row.response_mask, 1), logprobs=None)
        for row, token in zip(rows, drawn, strict=True)
    ]
