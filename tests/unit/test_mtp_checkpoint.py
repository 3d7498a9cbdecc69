"""Checkpoints in and out: every tensor is kept, replaced, added or named as dropped, or nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.mtp import checkpoint_checksums, checksum, head_state, init_heads, load_heads, write_checkpoint
from bebop.mtp.checkpoint import INDEX, Tensors

OWN_HEAD = "model.mtp_layers.0.lm_head.weight"
D2T = "model.mtp_layers.0.d2t"


@pytest.fixture
def sharded(tiny_random, tmp_path) -> Path:
    """The random policy in two shards; the second holds the last layer, lm_head, and a head with more than MiMo's."""
    policy = tmp_path / "sharded"
    shutil.copytree(tiny_random, policy)
    tensors = load_file(policy / "model.safetensors")
    (policy / "model.safetensors").unlink()
    tensors |= {OWN_HEAD: tensors["lm_head.weight"] + 1, D2T: torch.tensor([0, 0, 0, 7])}
    second = {n: t for n, t in tensors.items() if n.startswith(("model.layers.1.", "lm_head", "model.mtp_layers."))}
    first = {n: t for n, t in tensors.items() if n not in second}
    weight_map = {}
    for number, shard in enumerate((first, second), 1):
        save_file(shard, policy / f"model-0000{number}-of-00002.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-0000{number}-of-00002.safetensors")
    (policy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return policy


def edit_config(policy: Path, **values) -> None:
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | values))


def without(policy: Path, dest: Path, prefix: str) -> Path:
    """A copy of a single-file policy that lacks the tensors of a prefix."""
    shutil.copytree(policy, dest)
    tensors = load_file(dest / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith(prefix)}, dest / "model.safetensors")
    return dest


def test_written_heads_are_read_back_with_an_unchanged_backbone(tiny_random, tmp_path):
    head = init_heads(tiny_random, "random", seed=5)
    out = write_checkpoint(tiny_random, tmp_path / "out", head_state(head), {"loss": "e2e_tv", "mtp_depth": 3})
    read = load_heads(out)
    assert checksum(head_state(read)) == checksum(head_state(head))
    before, after = checkpoint_checksums(tiny_random), checkpoint_checksums(out)
    assert after.backbone == before.backbone and after.heads != before.heads
    assert after.num_head_tensors == before.num_head_tensors == 16
    provenance = json.loads((out / "bebop.json").read_text())
    assert provenance["loss"] == "e2e_tv" and provenance["mtp_depth"] == 3
    assert provenance["checksum"] == {"backbone": after.backbone, "heads": after.heads}
    assert provenance["tensors"]["replaced"] == 16 and provenance["tensors"]["kept"] == len(Tensors(out)) - 16
    names = {file.name for file in tiny_random.iterdir()}
    assert {file.name for file in out.iterdir()} == names | {"bebop.json"}


def test_every_tensor_of_every_shard_survives(sharded, tmp_path):
    head = init_heads(sharded, "random", seed=5)
    out = write_checkpoint(sharded, tmp_path / "out", head_state(head), {})
    source, written = Tensors(sharded), Tensors(out)
    assert set(written) == set(source)
    for name, tensor in source.items():
        expected = head_state(head).get(name, tensor)
        assert torch.equal(written[name], expected) and written[name].dtype == expected.dtype, name
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())


def test_a_heads_own_lm_head_and_draft_vocabulary_are_kept(sharded, tmp_path):
    out = Tensors(write_checkpoint(sharded, tmp_path / "out", head_state(init_heads(sharded)), {}))
    assert torch.equal(out[OWN_HEAD], out["lm_head.weight"] + 1)
    assert out[D2T].tolist() == [0, 0, 0, 7]  # token 3 of the draft vocabulary is 3 + 7


def test_dropped_tensors_are_named(sharded, tmp_path):
    out = write_checkpoint(sharded, tmp_path / "out", {}, {}, drop=[D2T, OWN_HEAD])
    assert not {D2T, OWN_HEAD} & set(Tensors(out))
    assert json.loads((out / "bebop.json").read_text())["tensors"]["dropped"] == [D2T, OWN_HEAD]
    with pytest.raises(ValueError, match=r"drop: \['nothing'\] not in"):
        write_checkpoint(sharded, tmp_path / "out2", {}, {}, drop=["nothing"])


def test_config_claims_heads_that_were_added(tiny_random, tmp_path):
    plain = without(tiny_random, tmp_path / "plain", "model.mtp_layers.")
    edit_config(plain, num_nextn_predict_layers=0, architectures=["Qwen2ForCausalLM"])
    assert load_heads(plain) is None
    out = write_checkpoint(plain, tmp_path / "out", head_state(init_heads(plain)), {})
    config = json.loads((out / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["architectures"] == ["MiMoForCausalLM"]
    assert load_heads(out) is not None


def test_a_claimed_mtp_layer_without_its_tensors_is_an_error(tiny_random, tmp_path):
    hollow = without(tiny_random, tmp_path / "hollow", "model.mtp_layers.")
    with pytest.raises(ValueError, match=r"claims 1 MTP layers .*no tensor"):
        write_checkpoint(hollow, tmp_path / "out", {}, {})
    with pytest.raises(ValueError, match=r"0 tensors .* expected 16; missing"):
        load_heads(hollow)
    assert not list(tmp_path.glob("out*"))


def test_missing_or_extra_head_tensor_gives_both_counts(tiny_random, sharded, tmp_path):
    lacking = without(tiny_random, tmp_path / "lacking", "model.mtp_layers.0.input_proj")
    with pytest.raises(ValueError, match=r"15 tensors .* expected 16; missing \['input_proj.weight'\]"):
        load_heads(lacking)
    with pytest.raises(ValueError, match=r"18 tensors .* expected 16; .*unexpected \['d2t', 'lm_head.weight'\]"):
        load_heads(sharded)
    with pytest.raises(ValueError, match=r"lacks model.mtp_layers.0.input_proj.weight"):
        write_checkpoint(lacking, tmp_path / "out", {}, {})


def test_index_and_shards_must_agree(sharded, tmp_path):
    index = json.loads((sharded / INDEX).read_text())
    broken = json.loads(json.dumps(index))
    del broken["weight_map"]["lm_head.weight"]
    (sharded / INDEX).write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"only in the shard \['lm_head.weight'\]"):
        write_checkpoint(sharded, tmp_path / "out", {}, {})
    broken["weight_map"] = index["weight_map"] | {"extra": "model-00001-of-00002.safetensors"}
    (sharded / INDEX).write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"only in the index \['extra'\]"):
        Tensors(sharded)
    (sharded / INDEX).write_text(json.dumps(index))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-00002-of-00002.safetensors, which is not there"):
        Tensors(sharded)


def test_lm_head_is_required_unless_embeddings_are_tied(tiny_random, tmp_path):
    bare = without(tiny_random, tmp_path / "bare", "lm_head")
    with pytest.raises(
        ValueError, match=r"no lm_head.weight, expected one unless config.json sets tie_word_embeddings"
    ):
        write_checkpoint(bare, tmp_path / "out", {}, {})
    edit_config(bare, tie_word_embeddings=True)
    out = write_checkpoint(bare, tmp_path / "out", head_state(init_heads(bare)), {})
    assert "lm_head.weight" not in Tensors(out)


def test_unknown_names_and_wrong_shapes_write_nothing(tiny_random, tmp_path):
    with pytest.raises(ValueError, match=r"head_tensors: \['lm_heed.weight'\] not in"):
        write_checkpoint(tiny_random, tmp_path / "out", {"lm_heed.weight": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"head_tensors: lm_head.weight is \[1\], expected"):
        write_checkpoint(tiny_random, tmp_path / "out", {"lm_head.weight": torch.zeros(1)}, {})
    assert not list(tmp_path.glob("out*"))


def test_source_may_be_rewritten_in_place_and_keeps_its_provenance(tiny_random, tmp_path):
    policy = tmp_path / "policy"
    write_checkpoint(tiny_random, policy, {}, {"mtp_depth": 3})
    write_checkpoint(policy, policy, head_state(init_heads(policy, "random")), {"step": 7})
    record = json.loads((policy / "bebop.json").read_text())
    assert record["mtp_depth"] == 3 and record["step"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_heads_start_from_the_last_layer(tiny_random):
    head, tensors = init_heads(tiny_random), Tensors(tiny_random)
    last = f"model.layers.{head.config.num_hidden_layers - 1}."
    for name in ("self_attn.q_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.equal(head.layer.state_dict()[name], tensors[last + name])
    assert torch.equal(head.norm.weight, tensors["model.norm.weight"])
    assert checksum(head_state(head)) == checksum(head_state(init_heads(tiny_random, seed=9)))
    first, again, other = (init_heads(tiny_random, "random", seed) for seed in (0, 0, 1))
    assert checksum(head_state(first)) == checksum(head_state(again)) != checksum(head_state(other))
    with pytest.raises(ValueError, match=r"how='zeros': expected last_layer or random"):
        init_heads(tiny_random, "zeros")


class TestChecksum:
    def test_checksum_depends_on_names_shapes_and_values_not_order(self):
        a, b = torch.arange(6.0), torch.ones(2)
        one = checksum({"a": a, "b": b})
        assert len(one) == 16 and one == checksum({"b": b, "a": a})
        others = [{"a": b, "b": a}, {"a": a.view(2, 3), "b": b}, {"a": a + 1e-6, "b": b}, {"a": a}]
        assert len({one, *map(checksum, others)}) == 5

    def test_bfloat16_equals_its_exact_float32_copy(self):
        value = torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert checksum({"a": value}) == checksum({"a": value.float()})

    def test_strided_and_empty_tensors(self):
        value = torch.randn(4, 6)
        assert checksum({"a": value.T}) == checksum({"a": value.T.contiguous()})
        assert checksum({"a": torch.empty(0, 3)}) != checksum({"a": torch.empty(3, 0)})
