"""bench tree's numbers: pooled acceptance length, its errors by prompt, the paired gain and what survives of it."""

from __future__ import annotations

import numpy as np
import pytest

from bebop.bench.tree import stage as tree
from bebop.config import BenchConfig, check
from bebop.errors import ConfigError


def config(**sections: dict) -> BenchConfig:
    values: dict = {"model": {"name": "tiny"}, "data": {"tasks": [{"name": "chain_sum"}]}, "rollout": {}}
    return check("bench", values | sections)


def tally(accepted: np.ndarray, drafts: np.ndarray, seconds: float = 1.0) -> tree.Tally:
    return tree.Tally(accepted.astype(float), drafts.astype(float), [1000] * 3, [seconds] * 3)


def test_error_of_the_pooled_length_is_that_of_repeated_experiments():
    """Prompts differ in length and ease; errors told from one set of prompts match the spread over many sets."""
    rng = np.random.default_rng(0)

    def experiment() -> tuple[tree.Tally, tree.Tally]:
        drafts = rng.integers(5, 40, 60)
        ease = rng.normal(0.5, 0.1, 60).clip(0.1, 0.9)
        return (
            tally(rng.binomial(3 * drafts, ease), drafts),
            tally(rng.binomial(3 * drafts, (ease + 0.03).clip(0, 1)), drafts),
        )

    pairs = [experiment() for _ in range(800)]
    lengths = np.array([[one.acceptance_length for one in pair] for pair in pairs])
    told = np.mean([tree.error_of(pair[0].influence) for pair in pairs])
    assert told == pytest.approx(lengths[:, 0].std(), rel=0.1)
    paired = np.mean([tree.error_of(pair[1].influence - pair[0].influence) for pair in pairs])
    assert paired == pytest.approx((lengths[:, 1] - lengths[:, 0]).std(), rel=0.1)
    assert paired < told, "the prompts' own difficulty is out of it"


def test_surviving_speed_is_given_only_for_a_clear_gain():
    drafts = np.full(50, 100)
    noise = np.arange(50) % 5
    topk, rheo = tally(200 + noise, drafts, seconds=1.0), tally(215 + noise, drafts, seconds=1 / 1.04)
    kinds = {kind.name: kind for kind in tree.variants(config())}
    tallies = {"plain": tally(drafts * 0, drafts * 0, 3.0), "topk": topk, "rheo m=1": rheo, "rheo m=0": topk}
    row = tree._row(config(), kinds["rheo m=1"], tallies, {}, 1, 1.0)
    assert row["gain"] == pytest.approx(0.15) and row["acceptance_length"] == pytest.approx(3.17)
    assert row["surviving"] == pytest.approx(0.04 / (3.17 / 3.02 - 1), rel=1e-6)
    assert row["speedup"] == pytest.approx(3 * 1.04)
    level = tree._row(config(), kinds["rheo m=0"], tallies, {}, 1, 1.0)
    assert level["gain"] == 0 and level["surviving"] is None
    plain = tree._row(config(), kinds["plain"], tallies, {}, 1, 1.0)
    assert plain["acceptance_length"] == 1.0 and plain["gain"] is None and plain["budget"] is None


def test_every_variant_is_a_section_of_the_torch_engine():
    kinds = tree.variants(config(rollout={"tree_width": 5, "tree_budget": 20, "top_k": 0}))
    assert [kind.name for kind in kinds] == [
        *("plain", "rejection", "block", "topk", "rrsw m=1"),
        *(f"rheo m={leads}" for leads in range(4)),
    ]
    assert {kind.rollout.engine for kind in kinds} == {"torch"}
    assert [kind.rollout.tree for kind in kinds[:3]] == ["none"] * 3
    assert kinds[0].rollout.speculation == "none" and kinds[2].rollout.rule == "block"
    assert {kind.rollout.tree_budget for kind in kinds} == {20}
    assert [kind.rollout.tree_leads for kind in kinds[5:]] == [0, 1, 2, 3]


def test_too_many_leads_are_refused_by_their_key():
    with pytest.raises(ConfigError, match=r"bench\.tree\.leads 3: expected 0 to rollout\.tree_width - 1 = 2"):
        tree.variants(config(rollout={"tree_width": 3}))


def test_seeds_of_prompts_and_repeats_differ():
    seeds = {tree._seed(seed, repeat, i) for seed in range(3) for repeat in range(5) for i in range(200)}
    assert len(seeds) == 3 * 5 * 200


def test_plots_show_every_variant_with_its_error(tmp_path):
    from bebop.bench.tree import plots as tree_plots

    rows = []
    for temperature in (0.0, 1.0):
        for kind in tree.variants(config()):
            rounds = 0 if kind.method == "plain" else 10
            rows.append(
                {
                    **{"temperature": temperature, "batch_size": 1, "variant": kind.name, "method": kind.method},
                    **{"leads": kind.leads, "rounds": rounds},
                    **{"acceptance_length": 3.0 - temperature, "acceptance_length_error": 0.1},
                }
            )
    written = tree_plots.write(rows, tmp_path)
    assert [path.name for path in written] == ["al_by_temperature.png", "al_by_leads.png"]
    assert all(path.stat().st_size > 10_000 for path in written)
    figure = tree_plots.by_temperature([row for row in rows if row["rounds"]])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == [kind.name for kind in tree.variants(config()) if kind.method != "plain"]
    assert tree_plots.by_leads([row for row in rows if row["leads"] in (None, 1)]) is None
