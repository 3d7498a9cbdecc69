"""From the policy's own samples to served heads: distillation, training and `eval` on the real engine."""

import json

import pytest

from bebop import evaluate
from bebop.config import Data, EvalConfig, Loss, Model, RolloutSection, Sft, SftConfig, Task
from bebop.data.self_distill import read_rows
from bebop.monitor import read_records
from bebop.sft import run

pytestmark = pytest.mark.e2e
DATA = Data(tasks=[Task(name="chain_sum")], num_prompts=96, num_heldout=64, max_response_tokens=48)
ROLLOUT = RolloutSection(max_model_len=256, kv_cache_gib=0.5)


@pytest.fixture(scope="module")
def heads(tiny_random, tmp_path_factory):
    """Heads of the random policy, trained on what it samples at T = 1."""
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEBOP_HOME", str(folder / "home"))
        config = SftConfig(
            model=Model(name="hf", path=tiny_random),
            data=DATA,
            loss=Loss(),
            sft=Sft(steps=30, eval_every=30, save_every=30, batch_tokens=2048, lr=3e-3),
            rollout=ROLLOUT,
        )
        yield run(config, folder / "run"), folder


def test_the_policy_s_own_samples_are_kept_with_their_logprobs(heads):
    result, folder = heads
    (text,) = (file.parent for file in (folder / "home" / "text").glob("*/heldout.parquet"))
    rows = read_rows(text / "train.parquet")
    assert len(rows) == DATA.num_prompts
    assert all(len(row.logprobs) == len(row.response_ids) == len(row.response_mask) for row in rows)
    assert all(value < 0 for row in rows for value in row.logprobs)
    assert len({row.response_ids for row in rows}) > 90
    assert result.summary["data"]["sampled_by_policy"]
    held = {row.prompt_ids for row in read_rows(text / "heldout.parquet")}
    assert not held & {row.prompt_ids for row in rows}


def test_observed_acceptance_of_the_served_heads_equals_the_scored_one(heads, tmp_path, monkeypatch):
    """The engine loads the checkpoint as it is; what it accepts is what the trainer's own computation says."""
    result, _ = heads
    config = EvalConfig(
        model=Model(name="hf", path=result.checkpoint),
        data=DATA.model_copy(update={"num_heldout": 128}),
        rollout=ROLLOUT,
        depth=3,
    )
    summary = evaluate.run(config, tmp_path)
    found = summary["tasks"]["all"]
    counts, scored = found["counts"], found["scored"]
    assert counts["num_drafts"] > 1000
    agreement = found["agreement"]
    assert agreement["num_drafts"] == counts["num_drafts"] and agreement["agrees"], agreement
    assert max(agreement["half_width_99"]) < 0.05 and not summary["alarms"]
    for depth in range(3):
        observed = counts["accepted_per_depth"][depth] / counts["num_drafts"]
        assert observed == agreement["observed"][depth]
        assert scored["accepted_block"][depth] >= scored["accepted"][depth] - 1e-9
    assert result.summary["acceptance_length"] == pytest.approx(scored["acceptance_length"], abs=0.1)
    (record,) = read_records(tmp_path, "eval")
    assert record["tasks"]["all"]["counts"] == json.loads(json.dumps(counts))
    lines = (tmp_path / "eval.csv").read_text().splitlines()
    assert lines[0].startswith("task,temperature,depth,num_drafts,num_accepted") and len(lines) == 4
    assert json.loads((tmp_path / "summary.json").read_text())["rule"] == "rejection"
    assert all((tmp_path / figure).stat().st_size > 10_000 for figure in summary["figures"])
    # stopped after sampling, it goes on without an engine
    monkeypatch.setattr(evaluate.stage, "make_engine", None)
    assert evaluate.run(config, tmp_path)["tasks"] == summary["tasks"]


def test_engine_with_other_heads_raises_the_alarm(heads, tiny_random, tmp_path, monkeypatch):
    """The trained heads are scored; the engine (bebop's own, quick to start) drafts with the untrained ones."""
    result, _ = heads
    engine = evaluate.stage.make_engine
    monkeypatch.setattr(evaluate.stage, "make_engine", lambda rollout, _, **rest: engine(rollout, tiny_random, **rest))
    config = EvalConfig(
        model=Model(name="hf", path=result.checkpoint),
        data=DATA,
        rollout=ROLLOUT.model_copy(update={"engine": "torch"}),
        depth=3,
        temperatures=[1.0, 0.7],
    )
    summary = evaluate.run(config, tmp_path)
    assert [entry["temperature"] for entry in summary["by_temperature"]] == [1.0, 0.7]
    assert len(summary["alarms"]) == 2 and "the engine serves other heads" in summary["alarms"][0]
