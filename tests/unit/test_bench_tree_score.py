"""Scored trees against the same trees made the long way: every path drafted and judged from its whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bebop.backbone import load_backbone
from bebop.bench.tree.score import TreeScorer
from bebop.config import RolloutSection
from bebop.mtp import draft_hidden, load_heads
from bebop.policies import random_checkpoint
from bebop.spec import Streams, TreeGrower, TreeSpec, expected_accepted

SHAPE = {"tree_width": 3, "tree_depth": 3, "tree_budget": 8, "max_model_len": 32}


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in each layout of heads."""
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=60, seed=2, model_type=request.param)


def drafted(backbone, head, ids: list[int], anchor: int, paths: list[tuple[int, ...]]) -> torch.Tensor:
    """The draft's logits behind each path, teacher-forced on text[: anchor + 2] and the path: [n, V]."""
    rows = []
    for path in paths:
        text = torch.tensor([*ids[: anchor + 2], *path])
        places, bounds = torch.arange(len(text)), torch.tensor([0, len(text)])
        hidden = backbone.hidden(text, places, bounds)
        states = draft_hidden(
            head, hidden, backbone.embed_weight, text, bounds, places, len(path) + 1,
            anchors=torch.tensor([anchor]),
        )  # fmt: skip
        rows.append(F.linear(states[-1, 0], backbone.lm_head_weight))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize(("method", "temperature"), [("rheo", 1.0), ("rheo", 0.5), ("topk", 1.0), ("topk", 0.0)])
def test_tree_scores_equal_those_from_policy_and_head(policy, method, temperature):
    backbone, head = load_backbone(policy, dtype=torch.float64), load_heads(policy).double()
    rollout = RolloutSection(engine="torch", tree=method, tree_leads=1, **SHAPE)
    scorer = TreeScorer(policy, torch.float64, [rollout])
    ids = torch.randint(5, 60, (14,), generator=torch.Generator().manual_seed(3)).tolist()
    anchors = [0, 4, 9, 12]
    spec = TreeSpec(method, 3, 3, 8, 1)
    found = scorer.score(ids, anchors, temperature)[0]
    for anchor, score in zip(anchors, found.tolist(), strict=True):
        grower = TreeGrower(spec, Streams(torch.tensor([sum(ids)]), torch.tensor([anchor])), temperature=temperature)
        paths: list[tuple[int, ...]] = [()]
        while grower.frontier is not None:
            if grower.frontier.depth:
                rows, tokens = grower.frontier.parent_rows[0].tolist(), grower.frontier.tokens[0].tolist()
                paths = [(*paths[row], token) for row, token in zip(rows, tokens, strict=True)]
            grower.expand(drafted(backbone, head, ids, anchor, paths).unsqueeze(0))
        trees = grower.finish()
        rows = []
        for node in range(-1, trees.tokens.shape[1]):
            path: list[int] = []
            while node >= 0:
                path.insert(0, int(trees.tokens[0, node]))
                node = int(trees.parents[0, node])
            text = torch.tensor([*ids[: anchor + 2], *path])
            rows.append(backbone.model(text[None]).logits[0, -1])
        logits = torch.stack(rows)
        if temperature:
            target = (logits / temperature).softmax(-1)
        else:
            target = F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        wanted = 1.0 + float(expected_accepted(trees, target.unsqueeze(0)).sum())
        assert score == pytest.approx(wanted, abs=1e-6)  # transformers' norms and rotary angles are float32
