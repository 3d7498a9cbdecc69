"""Draft trees emit exactly the target: every probe draw and every choice enumerated in float64 over the shipped code.

How the law is made: tests/helpers/tree_oracle.py. The faults at the end must show, or the enumeration proves nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tree_oracle import Law, Model, all_trees, emitted_law, random_model, target_rows

from bebop.spec import TreeSpec, distributions, expected_accepted
from bebop.spec.tree import grow as tree_grow

EXACT = 1e-12
RULES = [("topk", 0), *(("rheo", m) for m in range(4)), *(("rrsw", m) for m in range(4))]
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("target", ["dense", "zeros", "one_hot", "draft"])
@pytest.mark.parametrize("draft", ["ties", "zeros", "one_hot", "peaked"])
def test_adversarial_models_leave_the_target_unchanged(draft, target, temperature):
    """Ties, -inf logits, point masses (z = 0), drafts that never agree or always do; every rule, budgets that bite."""
    for number, (method, leads) in enumerate(RULES):
        shapes = [(4, 2, 4, 5, 4)] if leads == 3 else [(3, 3, 2, 4, 3), (4, 2, 3, 5, 3)]
        for vocabulary, depth, width, budget, support in shapes:
            if leads < width:
                spec = TreeSpec(method, width, depth, budget, leads, support)
                law = emitted_law(random_model(vocabulary, depth, number, draft, target), spec, temperature=temperature)
                assert law.total_variation <= EXACT, (spec, law.total_variation)


@pytest.mark.parametrize("part", range(10))
def test_random_trees_leave_the_target_unchanged(part):
    """20 draws each of model, rule, width, depth, budget, support and temperature; 200 in all."""
    for number in range(20):
        draw = random.Random(1000 * part + number)
        vocabulary, depth, width = draw.choice(
            [(3, 3, 2), (3, 3, 3), (4, 3, 2), (5, 2, 3), (6, 2, 3), (4, 2, 4), (6, 1, 6)]
        )
        method, leads = draw.choice([rule for rule in RULES if rule[1] < width])
        if leads and number % 4 == 0:  # fewer draws, so larger models
            vocabulary, depth, width = draw.choice([(6, 3, 2), (4, 3, 3)]) if leads == 1 else (4, 3, 3)
            leads = min(leads, width - 1)
        spec = TreeSpec(
            method,
            width,
            depth,
            budget=draw.randint(1, width * (1 + (depth - 1) * width)),
            leads=leads,
            support=draw.choice([vocabulary - 1, vocabulary, 128]),
        )
        kinds = draw.choice(["dense", "ties", "zeros", "peaked"]), draw.choice(["dense", "zeros", "draft"])
        model = random_model(vocabulary, depth, 1000 * part + number, *kinds)
        law = emitted_law(model, spec, temperature=draw.choice([0.3, 0.7, 1.0, 1.5]))
        assert law.total_variation <= EXACT, (spec, kinds, law.total_variation)


def test_enumerated_trees_are_of_all_kinds():
    """The cases above would prove little if probes were never pruned, kept, or expanded."""
    trees, mass = all_trees(random_model(4, 3, 2), TreeSpec("rheo", 3, 3, 9, 1), 1.0)
    assert len(mass) > 1000 and float(mass.sum()) == pytest.approx(1.0)
    expanded = trees.family[:, 1:] >= 0
    probes_per_tree = trees.is_probe.sum(1)
    assert bool((trees.is_probe & expanded).any()) and bool((trees.is_probe & ~expanded).any())
    assert bool((probes_per_tree < (trees.family >= 0).sum(1)).any()), "some families lose their probe"
    assert len(trees.parents.unique(dim=0)) > 1, "trees differ in shape by what was drawn"


def test_node_acceptance_is_the_theorems():
    """RheoSampling's theorem 3: acceptance of n candidates, the probe among them, and of n without it (TopK)."""
    for seed in range(12):
        model = random_model(6, 1, seed)
        p, q = model.target[0][0], model.draft[0][0].softmax(-1)
        order = q.argsort(descending=True)
        p_ranked, q_ranked = p[order], q[order]
        for leads in range(3):
            for n in range(leads + 1, 6):
                tail = torch.where(torch.arange(6) < leads, 0.0, q_ranked)
                qt = tail / tail.sum()
                r = distributions.residual(p_ranked, qt)
                expected = p_ranked[: n - 1].sum() + torch.minimum(p_ranked, qt)[n - 1 :].sum()
                expected += r[n - 1] * (qt - p_ranked).clamp(min=0)[: n - 1].sum()
                for spec in (TreeSpec("rheo", n, 1, n, leads), TreeSpec("rheo", 6, 1, n, leads)):
                    found = emitted_law(model, spec).root_acceptance
                    assert found == pytest.approx(float(expected), abs=1e-12)
                topk = emitted_law(model, TreeSpec("topk", 6, 1, n)).root_acceptance
                assert topk == pytest.approx(float(p_ranked[:n].sum()), abs=1e-12)
                if leads:  # its probe pruned: only the leads
                    alone = emitted_law(model, TreeSpec("rheo", 6, 1, leads, leads)).root_acceptance
                    assert alone == pytest.approx(float(p_ranked[:leads].sum()), abs=1e-12)


@pytest.mark.parametrize(("method", "leads"), RULES)
def test_temperature_0_emits_the_greedy_text(method, leads):
    for seed in range(10):
        model = random_model(4, 3, seed, draft="ties" if seed % 2 else "dense")
        greedy = [torch.nn.functional.one_hot(table.argmax(-1), 4).double() for table in model.target]
        spec = TreeSpec(method, 4, 3, 7, leads)
        law = emitted_law(replace(model, target=greedy), spec, temperature=0.0)
        assert law.total_variation == 0.0
        assert sum(int((mass > 0).sum()) for mass in law.emitted) == 1


@pytest.mark.parametrize("draft", ["dense", "ties", "zeros"])
def test_at_temperature_0_auto_leads_give_the_topk_tree(draft):
    for seed in range(10):
        model = random_model(5, 3, seed, draft)
        greedy = [torch.nn.functional.one_hot(table.argmax(-1), 5).double() for table in model.target]
        model = replace(model, target=greedy)
        auto, topk = (
            emitted_law(model, TreeSpec(method, 3, 3, 6, "auto"), temperature=0.0) for method in ("rheo", "topk")
        )
        assert auto.acceptance_length == topk.acceptance_length


def one_level(p: torch.Tensor, q: torch.Tensor) -> Model:
    return Model([q.log().unsqueeze(0)], [p.unsqueeze(0), p.expand(len(p), -1)])


def test_two_siblings_are_accepted_with_probability_0_9():
    """p = [.5, .3, .2], q = [.2, .2, .6], two children: the output is p and the node's acceptance .90."""
    law = emitted_law(one_level(P, Q), TreeSpec("rheo", 2, 1, 2, 0))
    assert law.root_acceptance == pytest.approx(0.90, abs=1e-12) and law.total_variation <= EXACT


def test_certain_top_1_child_is_accepted_with_its_target_probability():
    """Not with min(1, p / q) = 1, since it was not sampled."""
    half = torch.tensor([0.51, 0.49], dtype=torch.float64)
    for method in ("topk", "rheo", "rrsw"):
        law = emitted_law(one_level(half, half), TreeSpec(method, 2, 1, 1, 1))
        assert law.root_acceptance == pytest.approx(0.51, abs=1e-12) and law.total_variation <= EXACT


def test_rheo_accepts_more_than_rrsw_than_topk():
    """Temperature 1, drafts near the target; the order the paper reports."""
    lengths = {}
    for method in ("topk", "rrsw", "rheo"):
        found = []
        for seed in range(20):
            model = random_model(6, 2, seed)
            noisy = [(t.softmax(-1) * 0.5 + p * 0.5) for t, p in zip(model.draft, model.target, strict=False)]
            model = replace(model, draft=[table.log() for table in noisy])
            found.append(emitted_law(model, TreeSpec(method, 3, 2, 6, 1)).acceptance_length)
        lengths[method] = sum(found) / len(found)
    assert lengths["rheo"] > lengths["rrsw"] and lengths["rheo"] > lengths["topk"], lengths


def worst(spec: TreeSpec, **kinds: str) -> Law:
    laws = [emitted_law(random_model(4, 2, seed, **kinds), spec) for seed in range(12)]
    return max(laws, key=lambda law: law.total_variation)


def test_fault_probe_ranked_by_its_own_q_shows(monkeypatch):
    right = tree_grow.children

    def faulty(logits, *args, **kwargs):
        below = right(logits, *args, **kwargs)
        own = logits.softmax(-1).gather(-1, below.tokens)
        return replace(below, factors=torch.where(below.is_probe, own, below.factors))

    spec = TreeSpec("rheo", 3, 2, 4, 1)
    assert worst(spec).total_variation <= EXACT
    monkeypatch.setattr(tree_grow, "children", faulty)
    assert worst(spec).total_variation > 1e-3


def test_fault_siblings_judged_without_the_update_shows(monkeypatch):
    """After a rejected probe p itself instead of norm(max(0, p - qt)): on the check vector [.4, .4, .2] or the like."""
    monkeypatch.setattr(distributions, "residual", lambda target, draft, weight=1.0: target)
    assert worst(TreeSpec("rheo", 3, 2, 6, 1)).total_variation > 1e-3
    assert emitted_law(one_level(P, Q), TreeSpec("rheo", 2, 1, 2, 0)).total_variation > 1e-3


def test_probe_verified_with_unnormalised_q_is_detected(monkeypatch):
    right = tree_grow.children

    def faulty(logits, *args, **kwargs):
        below = right(logits, *args, **kwargs)
        q = logits.softmax(-1).gather(-1, below.support_ids)
        return replace(below, probe_probs=torch.where(below.probe_probs > 0, q, 0.0))

    monkeypatch.setattr(tree_grow, "children", faulty)
    assert worst(TreeSpec("rheo", 3, 2, 6, 1)).total_variation > 1e-3


def test_expected_acceptance_of_trees_averages_to_the_acceptance_length():
    """Over every tree that can be drafted, with its probability; per depth it never rises."""
    for number, (method, leads) in enumerate(RULES):
        if leads > 2:
            continue
        for seed, (draft, target) in enumerate([("dense", "dense"), ("ties", "zeros"), ("zeros", "dense")]):
            model = random_model(4, 2, 10 * number + seed, draft, target)
            spec = TreeSpec(method, 3, 2, 5, leads)
            trees, mass = all_trees(model, spec, 0.8)
            rows = target_rows(model, trees)
            per_depth = expected_accepted(trees, rows)
            assert bool((per_depth.diff(dim=1) <= 1e-12).all()) and bool((per_depth <= 1 + 1e-12).all())
            found = 1.0 + float((per_depth.sum(1) * mass).sum())
            assert found == pytest.approx(emitted_law(model, spec, temperature=0.8).acceptance_length, abs=1e-12)
