"""Scores of sampled responses at every position where an engine could have started a draft.

A draft that starts near the end of a response can extend beyond it. The engine still verifies that draft and counts its
accepted tokens. To score such drafts, each response is continued here by K tokens from the same policy (backbone only).
Only the last anchors read the continuation.

K depths. Anchor i of a response with n tokens, i = 0..n-2, drafts after token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bebop.acceptance.scores import AnchorScores, concatenate, score_anchors
from bebop.backbone import Backbone
from bebop.backbone.hidden_states import HiddenStates
from bebop.data.batches import pack_rows
from bebop.data.self_distill import TextRow
from bebop.errors import BadInput
from bebop.mtp import MtpHead

BATCH_TOKENS = 4096


@torch.no_grad()
def score_responses(
    backbone: Backbone, head: MtpHead, rows: Sequence[TextRow], *, depth: int, temperature: float, seed: int
) -> AnchorScores:
    """Score the heads on responses sampled at `temperature`.

    Documents are the responses, numbered as in `rows`. position: index in the response of the token before the draft,
    from 0. Responses of fewer than 2 tokens had no draft and get no anchor. Raises ValueError if no response has one.
    """
    kept = [i for i, row in enumerate(rows) if len(row.response_ids) > 1]
    if not kept:
        raise BadInput(f"sampled text: 0 of {len(rows)} responses have the 2 tokens that a draft needs")
    generator = torch.Generator().manual_seed(seed)
    longer = [rows[i] for i in kept]
    for _ in range(depth):
        longer = _continued(backbone, longer, temperature, generator)
    tokens = max(BATCH_TOKENS, max(len(row.input_ids) for row in longer))
    hidden = HiddenStates(backbone, longer, tokens, name="sampled text", how="stream")
    weights = backbone.embed_weight.float(), backbone.lm_head_weight.float()
    scores = concatenate(
        [
            score_anchors(head, hidden.batch(indexed), *weights, temperature=temperature)
            for indexed in pack_rows(longer, range(len(longer)), tokens, depth)
        ]
    )
    response = torch.tensor(kept)[scores.document]
    prompt_tokens = torch.tensor([len(row.prompt_ids) for row in rows])[response]
    position = scores.position + 1 - prompt_tokens
    # the engine does not draft after the last token of a response
    inside = position < torch.tensor([len(row.response_ids) for row in rows])[response] - 1
    return replace(scores, document=response, position=position, num_documents=len(rows)).where(inside)


def _continued(
    backbone: Backbone, rows: Sequence[TextRow], temperature: float, generator: torch.Generator
) -> list[TextRow]:
    """Every response with one more token from the backbone at `temperature`."""
    tokens = max(BATCH_TOKENS, max(len(row.input_ids) for row in rows))
    states = HiddenStates(backbone, rows, tokens, name="continued text", how="stream")
    lm_head = backbone.lm_head_weight.float()
    sampled: list[int] = []
    for indexed in pack_rows(rows, range(len(rows)), tokens, depth=1):
        batch = states.batch(indexed)
        probs = torch.softmax(batch.hidden[batch.cu_seqlens[1:] - 1] @ lm_head.T / temperature, -1)
        sampled += torch.multinomial(probs.cpu(), 1, generator=generator).squeeze(1).tolist()
    return [
        replace(row, response_ids=(*row.response_ids, token), response_mask=(*row.response_mask, 1), logprobs=None)
        for row, token in zip(rows, sampled, strict=True)
    ]
