"""Trees as structures: growth against a slow search written from the definition, chains, ties, batches, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bebop.spec import (
    StreamId,
    Streams,
    TreeBatch,
    TreeGrower,
    TreeSpec,
    apply_sampling,
    grow_tree,
    invert,
    verify_chain,
    verify_tree,
    verify_trees,
)
from bebop.spec.tree.spec import AUTO_LEADS_ABOVE


class Draft:
    """Random logits behind every text, made when first asked for; ties where `levels` logit values are allowed."""

    def __init__(self, vocabulary: int, seed: int, levels: int | None = None) -> None:
        self.vocabulary, self.levels, self.table = vocabulary, levels, {}
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, paths: list[tuple[int, ...]]) -> Tensor:
        return torch.stack([self.one(path) for path in paths])

    def one(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.table:
            values = torch.randn(self.vocabulary, generator=self.generator, dtype=torch.float64) * 1.5
            if self.levels:
                values = torch.randint(0, self.levels, values.shape, generator=self.generator).double()
            self.table[path] = values
        return self.table[path]


def grown(draft: Draft, spec: TreeSpec, draws: Streams, **settings) -> tuple[TreeBatch, list[list[list[tuple]]]]:
    """The trees of one draft for every stream, and the frontiers' texts by level and request."""
    grower = TreeGrower(spec, draws, **settings)
    batch = len(draws.seeds)
    texts: list[list[tuple]] = [[()] for _ in range(batch)]
    levels = [texts]
    for _ in range(spec.depth):
        grower.expand(torch.stack([draft(row) for row in texts]))
        if grower.frontier is not None:
            rows, tokens = grower.frontier.parent_rows.tolist(), grower.frontier.tokens.tolist()
            texts = [[(*texts[b][r], t) for r, t in zip(rows[b], tokens[b], strict=True)] for b in range(batch)]
            levels.append(texts)
    return grower.finish(), levels


def requests(num: int) -> Streams:
    return Streams(torch.arange(num), torch.zeros(num, dtype=torch.long))


def texts_of(tree) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def search(draft: Draft, spec: TreeSpec, leads: int, draws: Streams) -> list[tuple[tuple[int, ...], float, bool]]:
    """The definition, one node at a time: (text, score, is_probe) of the kept nodes, by depth, then from the left."""
    frontier: list[tuple] = [((), (), 1.0)]  # text, slots, score
    candidates = []
    for depth in range(spec.depth):
        level = []
        numbers = draws.uniforms(StreamId.DRAFT, depth, rows=len(frontier))[0]
        for (text, slots, score), number in zip(frontier, numbers, strict=True):
            logits = draft.one(text)
            order = sorted(range(len(logits)), key=lambda x: (-float(logits[x]), x))[: spec.support]
            q = logits[order].softmax(-1).tolist()
            if spec.method == "topk":
                slotted = [(order[i], q[i], False) for i in range(spec.width)]
            else:
                weights = torch.tensor([0.0] * leads + q[leads:], dtype=torch.float64)
                drawn = int(invert(weights / weights.sum(), number))
                proxy = min(q[leads - 1], math.fsum(q[leads:])) if leads else q[0]
                slotted = [(order[i], q[i], False) for i in range(leads)] + [(order[drawn], proxy, True)]
                fills = [i for i in range(leads, len(order)) if i != drawn]
                slotted += [(order[i], q[i], False) for i in fills][: spec.width - leads - 1]
            for slot, (token, factor, is_probe) in enumerate(slotted):
                level.append(((*text, token), (*slots, slot), score * factor, is_probe))
        candidates += level
        best = sorted(level, key=lambda node: (-node[2], node[1]))[: spec.width]
        frontier = [node[:3] for node in sorted(best, key=lambda node: node[1])]
    best = sorted(candidates, key=lambda node: (-node[2], len(node[0]), node[1]))[: spec.budget]
    return [(text, score, probe) for text, _, score, probe in sorted(best, key=lambda n: (len(n[0]), n[1]))]


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
@pytest.mark.parametrize(("method", "leads"), [("topk", 0), ("rheo", 0), ("rheo", 1), ("rheo", 2), ("rrsw", 1)])
def test_growth_equals_the_definition_searched_node_by_node(method, leads, levels):
    for seed in range(5):
        spec = TreeSpec(method, 4, 4, 15, leads, support=8)
        draft, draws = Draft(12, seed, levels), Streams(torch.tensor([seed]), torch.tensor([7]))
        tree = grown(draft, spec, draws, temperature=1.0)[0].row(0)
        expected = search(draft, spec, leads, draws)
        assert texts_of(tree) == [text for text, _, _ in expected]
        assert tree.is_probe.tolist() == [probe for _, _, probe in expected]
        torch.testing.assert_close(tree.scores, torch.tensor([s for _, s, _ in expected], dtype=torch.float64))
        assert tree.depths.tolist() == [len(text) for text in texts_of(tree)]


def test_batched_trees_equal_single_trees_at_each_temperature():
    temperatures = torch.tensor([0.0, 1.0, 0.7, 0.0, 0.2], dtype=torch.float64)
    draws = Streams(torch.arange(5) * 77, torch.arange(5))
    spec, draft = TreeSpec("rheo", 4, 3, 12, "auto"), Draft(20, 3)
    together = grown(draft, spec, draws, temperature=temperatures)[0]
    for b in range(5):
        leads = 1 if temperatures[b] > AUTO_LEADS_ABOVE else 0
        alone_draws = Streams(draws.seeds[b : b + 1], draws.positions[b : b + 1])
        alone = grown(draft, TreeSpec("rheo", 4, 3, 12, leads), alone_draws, temperature=float(temperatures[b]))[0]
        for name in ("tokens", "parents", "depths", "is_probe", "scores", "probe_probs"):
            assert torch.equal(getattr(together.row(b), name), getattr(alone.row(0), name)), name


@pytest.mark.parametrize(("method", "rule"), [("rheo", "rejection"), ("rrsw", "rejection"), ("topk", "target_only")])
def test_tree_of_width_1_equals_the_chain_token_for_token(method, rule):
    """Same streams: drafted by the tree or one token after the other, verified as a tree or as a chain."""
    batch, depth, vocabulary = 2000, 4, 6
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(batch, depth, vocabulary, generator=generator, dtype=torch.float64)
    target = (torch.randn(batch, depth + 1, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
    draws = Streams(torch.arange(batch), torch.arange(batch) % 7)
    spec = TreeSpec(method, 1, depth, depth)
    grower = TreeGrower(spec, draws, temperature=0.8)
    for level in range(depth):
        grower.expand(draft[:, level : level + 1])
    trees = grower.finish()
    assert trees.parents.tolist() == [[-1, 0, 1, 2]] * batch

    q = apply_sampling(draft, temperature=0.8)
    result = verify_trees(trees, target, draws=draws)
    chain = verify_chain(target, None if rule == "target_only" else q, trees.tokens, rule=rule, draws=draws)
    assert torch.equal(result.tokens, chain.tokens) and torch.equal(result.num_accepted, chain.num_accepted)
    assert set(result.num_accepted.tolist()) == set(range(depth + 1))
    if rule == "rejection":
        ranked, order = draft.sort(dim=-1, descending=True, stable=True)
        numbers = draws.uniforms(StreamId.DRAFT, torch.arange(depth).unsqueeze(0), rows=1).squeeze(-1)
        drawn = order.gather(-1, invert((ranked / 0.8).softmax(-1), numbers).unsqueeze(-1)).squeeze(-1)
        assert torch.equal(drawn, trees.tokens)


def test_one_seed_gives_tree_and_chain_the_same_tokens():
    draft, target = Draft(8, 1), torch.randn(4, 8, dtype=torch.float64).softmax(-1)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        tree = grow_tree(draft, TreeSpec("rheo", 1, 3, 3), temperature=1.0, generator=generator)
        result = verify_tree(tree, target, generator=generator)
        generator = torch.Generator().manual_seed(seed)
        tree = grow_tree(draft, TreeSpec("rheo", 1, 3, 3), temperature=1.0, generator=generator)
        paths = [()] + [tuple(tree.tokens[:n].tolist()) for n in (1, 2)]
        q = draft(paths).softmax(-1).unsqueeze(0)
        chain = verify_chain(target.unsqueeze(0), q, tree.tokens.unsqueeze(0), generator=generator)
        assert result.tokens.tolist() == [t for t in chain.tokens[0].tolist() if t >= 0]
        assert result.path.tolist() == list(range(len(result.tokens) - 1))


@pytest.mark.parametrize("method", ["topk", "rheo", "rrsw"])
def test_more_than_32_siblings_work(method):
    vocabulary = 100
    draft, p = Draft(vocabulary, 5), torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)
    tree = grow_tree(draft, TreeSpec(method, 70, 1, 70, 1), temperature=1.0, generator=torch.Generator().manual_seed(0))
    assert len(set(tree.tokens.tolist())) == 70
    accepted = {
        node
        for seed in range(300)
        for node in verify_tree(tree, p.expand(71, -1), generator=torch.Generator().manual_seed(seed)).path.tolist()
    }
    assert len(accepted) > 20 and max(accepted) > 64


def test_vocabulary_smaller_than_width_gives_a_smaller_tree():
    for method in ("topk", "rheo", "rrsw"):
        tree = grow_tree(Draft(3, 0), TreeSpec(method, 6, 2, 60, 4), temperature=1.0)
        assert len(tree.tokens) == 3 + 9 and sorted(tree.tokens[:3].tolist()) == [0, 1, 2]


def test_probe_comes_from_the_support_alone():
    draft = Draft(50, 2)
    top = set(draft.one(()).topk(4).indices.tolist())
    trees, _ = grown(
        draft,
        TreeSpec("rheo", 2, 1, 2, 1, support=4),
        Streams(torch.arange(500), torch.zeros(500).long()),
        temperature=1.0,
    )
    assert set(trees.tokens.flatten().tolist()) == top and int((trees.probe_probs > 0).sum(-1).max()) == 3


@pytest.mark.parametrize("vocabulary", [20_000, 49_152, 151_937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_support_is_the_highest_logits_with_stable_ties(vocabulary, dtype):
    """bfloat16 logits tie at the support's edge all the time."""
    logits = torch.randn(2, 1, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
    grower = TreeGrower(TreeSpec("rheo", 3, 1, 3, 1), requests(2), temperature=1.0)
    grower.expand(logits)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[..., :128]
    assert torch.equal(grower.finish().support_ids, expected)


def test_scores_are_without_temperature_and_draws_with_it():
    draft, spec = Draft(20, 4), TreeSpec("rheo", 3, 1, 3, 1)
    draws = requests(1)
    cold, warm = (grown(draft, spec, draws, temperature=t)[0] for t in (0.5, 2.0))
    assert torch.equal(cold.scores[:, :2], warm.scores[:, :2])
    ranked = draft.one(()).sort(descending=True).values
    for trees, temperature in ((cold, 0.5), (warm, 2.0)):
        tail = (ranked / temperature)[1:].softmax(-1)
        torch.testing.assert_close(trees.probe_probs[0, 0, 1:], tail)


def test_filters_bind_the_probe_as_they_bind_the_target():
    draws = requests(300)
    draft = Draft(20, 4)
    trees, _ = grown(draft, TreeSpec("rheo", 3, 1, 3, 1), draws, temperature=1.0, top_k=3)
    allowed = set(draft.one(()).topk(3).indices.tolist())
    assert set(trees.tokens[trees.is_probe].tolist()) == allowed - {int(draft.one(()).argmax())}


def test_ancestors_are_the_path_to_the_root():
    trees, _ = grown(
        Draft(9, 0), TreeSpec("rheo", 3, 4, 14, 1), Streams(torch.arange(6), torch.arange(6)), temperature=1.0
    )
    mask = trees.ancestors()
    for b in range(6):
        for node in range(14):
            above, expected = node, set()
            while above >= 0:
                expected.add(above)
                above = int(trees.parents[b, above])
            assert set(mask[b, node].nonzero().flatten().tolist()) == expected


def test_verification_reads_only_the_rows_on_the_path():
    draws = requests(50)
    trees, _ = grown(Draft(9, 0), TreeSpec("rheo", 3, 3, 10, 1), draws, temperature=1.0)
    target = torch.randn(50, 11, 9, dtype=torch.float64).softmax(-1)
    given = verify_trees(trees, target, draws=draws)
    asked = verify_trees(trees, lambda at: target[torch.arange(50), at], draws=draws)
    assert torch.equal(given.tokens, asked.tokens) and torch.equal(given.path, asked.path)
    assert torch.equal((given.tokens >= 0).sum(1), given.num_accepted + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "eagle"}, "method='eagle'"),
        ({"width": 0}, "width=0"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"budget": -1}, "budget=-1"),
        ({"support": True}, "support=True"),
        ({"width": 4, "leads": 4}, r"leads=4: expected 'auto' or an integer in \[0, width - 1\] = \[0, 3\]"),
        ({"leads": "two"}, "leads='two'"),
    ],
)
def test_unfit_specs_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        TreeSpec(**settings)


def test_unfit_inputs_are_refused_by_name():
    draws, spec = requests(2), TreeSpec("rheo", 2, 1, 2, 1)
    with pytest.raises(ValueError, match=r"logits: got torch.float32 \[2, 3, 5\], expected floats .* W = 1"):
        TreeGrower(spec, draws, temperature=1.0).expand(torch.zeros(2, 3, 5))
    logits = torch.zeros(2, 1, 5)
    logits[1, 0, 2] = torch.nan
    with pytest.raises(ValueError, match="logits: NaN or no finite value in request 1, frontier node 0"):
        TreeGrower(spec, draws, temperature=1.0).expand(logits)
    with pytest.raises(ValueError, match="temperature: got -1"):
        TreeGrower(spec, draws, temperature=-1.0).expand(torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match=r"temperature: got \[3\]"):
        TreeGrower(spec, draws, temperature=torch.ones(3)).expand(torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match="finish: got 0 expanded levels"):
        TreeGrower(spec, draws, temperature=1.0).finish()
    with pytest.raises(ValueError, match="draft_fn: got logits"):
        grow_tree(lambda paths: torch.zeros(3, 5), spec, temperature=1.0)
    grower = TreeGrower(spec, draws, temperature=1.0)
    grower.expand(torch.zeros(2, 1, 5))
    trees = grower.finish()
    with pytest.raises(ValueError, match=r"target_probs: got \[2, 2, 5\], expected \[B, N\+1, V\] = \[2, 3, V\]"):
        verify_trees(trees, torch.full((2, 2, 5), 0.2))
    with pytest.raises(ValueError, match=r"target_probs: got sum nan.*request 1, row 0"):
        verify_trees(trees, torch.tensor([0.2, torch.nan]).reshape(2, 1, 1).expand(2, 3, 5))
    with pytest.raises(ValueError, match=r"trees: got token 4, expected ids in \[0, 3\)"):
        verify_trees(trees, torch.full((2, 3, 3), 1 / 3))
