"""The frozen backbone, the policy cache, and mapping to the MiMo layout."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop.backbone import load_backbone
from bebop.config import Model, TinyModel
from bebop.mtp import head_state, init_heads, load_heads
from bebop.policies import prepare_policy, random_checkpoint
from bebop.store.caches import cached

FAST = TinyModel(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, pretrain_steps=2)


@pytest.fixture(scope="module")
def backbone(tiny_random):
    return load_backbone(tiny_random, dtype=torch.float32)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _packed(lengths, seed=0):
    ids = torch.randint(0, 400, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return ids, torch.cat([torch.arange(n) for n in lengths]), bounds


@pytest.mark.parametrize("lengths", [[1], [7, 1, 30, 12], [40] * 5, [300, 2, 3, 150, 151]])
def test_packed_documents_are_isolated(backbone, lengths):
    ids, positions, bounds = _packed(lengths)
    hidden = backbone.hidden(ids, positions, bounds)
    alone = [backbone.model.model(document[None]).last_hidden_state[0] for document in ids.split(lengths)]
    assert (hidden - torch.cat(alone)).abs().max() < 1e-5


def test_another_document_does_not_move_a_hidden_state(backbone):
    ids, positions, bounds = _packed([10, 10])
    changed = ids.clone()
    changed[10:] = (changed[10:] + 1) % 400
    before, after = (backbone.hidden(x, positions, bounds) for x in (ids, changed))
    assert torch.equal(before[:10], after[:10])
    assert not torch.equal(before[10:], after[10:])


def test_logits_come_from_hidden_and_lm_head(backbone):
    ids, positions, bounds = _packed([20])
    logits = backbone.hidden(ids, positions, bounds) @ backbone.lm_head_weight.T
    assert (logits - backbone.model(ids[None]).logits[0]).abs().max() < 1e-4


def test_nothing_of_it_can_be_trained(backbone):
    hidden = backbone.hidden(*_packed([5]))
    assert not hidden.requires_grad
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not backbone.model.training


def test_it_loads_in_bfloat16_too(tiny_random):
    backbone = load_backbone(tiny_random, dtype=torch.bfloat16)
    assert backbone.hidden(*_packed([5, 6])).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 3, 3, 5])}, "cu_seqlens"),
        ({"position_ids": torch.arange(4)}, "position_ids"),
        ({"input_ids": torch.tensor([0, 1, 2, 3, 9999])}, "input_ids"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(backbone, change, message):
    ids, positions, bounds = _packed([5])
    with pytest.raises(ValueError, match=message):
        backbone.hidden(**{"input_ids": ids, "position_ids": positions, "cu_seqlens": bounds} | change)


def test_no_policy_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_backbone(tmp_path, dtype=torch.float32)


def test_random_checkpoint_is_neither_flat_nor_certain(tmp_path):
    path = random_checkpoint(tmp_path / "r", vocab=8)
    backbone = load_backbone(path, dtype=torch.float32)
    ids = torch.randint(0, 8, (200,), generator=torch.Generator().manual_seed(0))
    logits = backbone.model(ids[None]).logits[0]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 0.5 < entropy < 2.0
    assert load_heads(path) is not None
    assert load_heads(random_checkpoint(tmp_path / "plain", vocab=8, mtp=False)) is None


def test_tiny_policy_is_made_once_and_cached_by_config(home):
    model = Model(name="tiny", tiny=FAST)
    first = prepare_policy(model, 0, progress=False)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare_policy(model, 0, progress=False) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert prepare_policy(model, 1, progress=False) != first
    assert first.parent == home / "policies"
    provenance = json.loads((first / "bebop.json").read_text())
    assert provenance["mtp_depth"] == 0
    assert json.loads((first / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    assert load_heads(first) is not None


def test_a_maker_that_fails_leaves_nothing_behind(home):
    def fail(inputs, directory):
        (directory / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        cached("p", {}, fail)
    assert [path.name for path in (home / "policies").iterdir() if path.is_dir()] == []


def test_two_callers_at_once_make_it_once(home):
    made = []

    def make(inputs, directory):
        made.append(directory)
        threading.Event().wait(0.3)

    callers = [threading.Thread(target=cached, args=("p", {"a": 1}, make)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(made) == 1


def test_text_longer_than_the_policys_positions_is_refused(tiny_random, home):
    for model in (Model(name="tiny"), Model(name="hf", path=tiny_random)):
        with pytest.raises(ValueError, match=r"rollout\.max_model_len: got 100000, expected at most 2048"):
            prepare_policy(model, 0, max_model_len=100_000)
    assert not (home / "policies").exists()


def test_hf_directory_in_mimo_layout_is_used_unchanged(tiny_random, home):
    assert prepare_policy(Model(name="hf", path=tiny_random), 0) == tiny_random.resolve()


def test_plain_qwen2_gets_an_mtp_layer_and_keeps_its_tensors(tmp_path, home):
    source = random_checkpoint(tmp_path / "plain", mtp=False)
    made = prepare_policy(Model(name="hf", path=source), 0)
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected = head_state(init_heads(source, "last_layer", 0))
    heads = {name: tensor for name, tensor in after.items() if "mtp_layers" in name}
    assert heads.keys() == expected.keys()
    assert all(torch.equal(heads[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2.*expected a causal"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "expected a causal"),
        (
            {"model_type": "llava", "architectures": ["Llava"], "text_config": {"model_type": "llama"}},
            "llava.*expected",
        ),
    ],
)
def test_unmappable_directory_is_refused_in_one_line(tmp_path, home, config, message):
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        prepare_policy(Model(name="hf", path=tmp_path), 0)
    assert "\n" not in str(error.value)


def test_missing_directory_is_refused(home):
    with pytest.raises(ValueError, match="no such directory"):
        prepare_policy(Model(name="hf", path=Path("/nowhere/at/all")), 0)


def test_tiny_tasks_are_those_of_pretraining(repo):
    import yaml

    from bebop.config import Task

    tasks = yaml.safe_load((repo / "configs" / "data" / "tiny_tasks.yaml").read_text())["tasks"]
    assert [Task(**task) for task in tasks] == TinyModel().tasks
