"""Every family's heads: the attention of a chain in each, names there and back, shards that stay as they are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.backbone import load_backbone
from bebop.data import anchor_labels, anchors, pack, target_index
from bebop.losses import head_loss
from bebop.mtp import (
    checkpoint_checksums,
    checksum,
    draft_hidden,
    head_state,
    head_tensors,
    init_heads,
    is_head_name,
    load_heads,
    write_checkpoint,
)
from bebop.mtp.checkpoint import HEADS_SHARD, INDEX, Tensors
from bebop.mtp.reading import read_policy
from bebop.policies import random_checkpoint

# llama and qwen3_moe in the layout of family `decoder`
OWN = {"llama": {"tied": True}, "qwen3_moe": {"head_dim": 24}, "qwen3": {"layout": "mimo"}}
NATIVE = ("mimo", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe", *OWN)
COUNT = {name: "mtp_num_hidden_layers" if "3_5" in name else "num_nextn_predict_layers" for name in NATIVE}
CU = torch.tensor([0, 3, 14, 20])
IDS = torch.randint(5, 300, (20,), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(n) for n in CU.diff().tolist()])


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    sizes = {"hidden_size": 32, "num_heads": 4}
    return {name: random_checkpoint(folder / name, model_type=name, **sizes, **OWN.get(name, {})) for name in NATIVE}


@pytest.fixture(params=NATIVE)
def policy(request, policies) -> Path:
    return policies[request.param]


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def split(policy: Path, dest: Path) -> Path:
    """The policy in three shards: the MTP layer's parts lie in the last two, beside tensors of the decoder."""
    shutil.copytree(policy, dest)
    tensors, config = load_file(dest / "model.safetensors"), config_of(policy)
    (dest / "model.safetensors").unlink()
    heads = [name for name in tensors if is_head_name(name, config)]
    second = {n for n in tensors if n.startswith("model.layers.1.")} | {*heads[: len(heads) // 2]}
    third = {"lm_head.weight", "model.norm.weight", *heads[len(heads) // 2 :]} & set(tensors)
    weight_map = {}
    for number, part in enumerate((set(tensors) - second - third, second, third), 1):
        file = f"model-0000{number}-of-00003.safetensors"
        save_file({name: tensors[name] for name in sorted(part)}, dest / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (dest / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return dest


def projected(head, state, embedding):
    parts = [head.token_norm(embedding), head.hidden_norm(state)]
    return head.proj(torch.cat(parts[::-1] if head.family.hidden_first else parts, -1))


@torch.no_grad()
def test_depth_one_is_the_stock_layer_over_the_document(policy):
    """With no chain yet, our attention is plain causal attention: transformers' own layer, unpatched, says the same."""
    head, backbone = load_heads(policy), load_backbone(policy, dtype=torch.float32)
    hidden = backbone.hidden(IDS, POSITIONS, CU)
    (drafts,) = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 1)
    stock = head.layer
    stock.self_attn.config._attn_implementation = "eager"
    hidden = hidden / (head.backbone_norm if head.family.before_norm else 1)
    for start, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        e = backbone.embed_weight[IDS[(torch.arange(start, end) + 1).clamp(max=len(IDS) - 1)]]
        if head.family.zero_at_start:
            e[0] = 0
        x = projected(head, hidden[start:end], e)[None]
        mask = torch.full((end - start, end - start), -torch.inf).triu(1)[None, None]
        rotary = head._rotary[0](x, POSITIONS[start:end][None])
        expected = head.norm(stock(x, position_embeddings=rotary, attention_mask=mask))[0]
        torch.testing.assert_close(drafts[start:end], expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_later_depths_are_the_engines_recursion(policy):
    """One anchor, step by step, as an engine drafts: each step's layer sees the causal keys and its own chain's."""
    head, backbone = load_heads(policy), load_backbone(policy, dtype=torch.float32)
    hidden = backbone.hidden(IDS, POSITIONS, CU)
    got = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 3)
    start, anchor = 3, 9
    stock = head.layer
    stock.self_attn.config._attn_implementation = "eager"
    rows = torch.arange(start, anchor + 1)
    hidden = hidden / (head.backbone_norm if head.family.before_norm else 1)
    state, inputs, positions = hidden[rows], [], []
    for depth in (1, 2, 3):
        e = backbone.embed_weight[IDS[rows + depth]]
        at = POSITIONS[rows] + depth - 1
        if head.family.zero_at_start:
            e = e.masked_fill((at == 0)[:, None], 0)
        inputs.append(projected(head, state, e))
        positions.append(at)
        x, place = torch.cat(inputs)[None], torch.cat(positions)[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        out = stock(x, position_embeddings=head._rotary[0](x, place), attention_mask=mask)[0, -1:]
        torch.testing.assert_close(got[depth - 1, anchor], head.norm(out)[0], atol=5e-5, rtol=1e-5)
        state, rows = (head.norm(out) if head.family.chains_normed else out), torch.tensor([anchor])


def test_anchors_give_the_same_gradients_and_train_every_weight(policy):
    head, backbone = load_heads(policy), load_backbone(policy, dtype=torch.float32)
    hidden = backbone.hidden(IDS, POSITIONS, CU)
    at = torch.tensor([1, 5, 9, 16])
    every = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 3)[:, at]
    some = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 3, anchors=at)
    torch.testing.assert_close(some, every, atol=1e-5, rtol=1e-4)
    learning = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert [n for n, p in head.named_parameters() if not p.requires_grad] == [
        n for n in head.state_dict() if n.endswith("e_score_correction_bias")
    ]
    direction = torch.randn_like(every)
    one, other = (torch.autograd.grad(x, list(learning.values()), direction) for x in (every, some))
    for name, a, b in zip(learning, one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        assert a.abs().sum() > 0 or name.endswith("k_proj.bias"), name


def test_bfloat16_arithmetic_over_float32_weights_gives_nearly_the_same_states(policy):
    head, backbone = load_heads(policy), load_backbone(policy, dtype=torch.float32)
    hidden = backbone.hidden(IDS, POSITIONS, CU)
    exact = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 2)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 2)
    rounded.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())
    error = (rounded - exact).float().norm(dim=-1) / exact.norm(dim=-1)  # a token whose expert flips is far off
    assert error.median() < 0.05
    head.bfloat16()
    assert head._rotary[0].inv_freq.dtype == torch.float32
    own = draft_hidden(head, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 2)
    assert own.dtype == torch.bfloat16 and own.isfinite().all()


@torch.no_grad()
def test_packed_documents_stay_apart_in_every_backbone(policy):
    """Linear attention included: each document's states are those of the document alone."""
    backbone = load_backbone(policy, dtype=torch.float32)
    together = backbone.hidden(IDS, POSITIONS, CU)
    for start, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        alone = backbone.model.model(input_ids=IDS[None, start:end], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[start:end], alone, atol=1e-5, rtol=1e-4)


def test_training_changes_only_the_head_and_survives_a_checkpoint(policy, tmp_path):
    head, backbone = load_heads(policy), load_backbone(policy, dtype=torch.float32)
    (batch,) = pack([(IDS[a:b].tolist(), [1] * (b - a)) for a, b in itertools.pairwise(CU.tolist())], 64)
    hidden, at = backbone.hidden(IDS, POSITIONS, CU), anchors(batch, 2)
    index, labels = target_index(at, 2), anchor_labels(batch, at, 2)
    trunk = dict(backbone.model.state_dict())
    before = checksum(trunk)

    def loss(of):
        rows = draft_hidden(of, hidden, backbone.embed_weight, IDS, CU, POSITIONS, 2, anchors=at)
        return head_loss("e2e_tv", rows, hidden, backbone.lm_head_weight, index, labels)[0]

    learning = {name: p for name, p in head.named_parameters() if p.requires_grad}
    fixed = {name: p.clone() for name, p in head.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(learning.values(), lr=3e-3)
    start = loss(head).item()
    for _ in range(8):
        optimizer.zero_grad()
        loss(head).backward()
        optimizer.step()
    end = loss(head).item()
    assert end < start - 0.01
    assert checksum(trunk) == before and all(torch.equal(head.get_parameter(n), p) for n, p in fixed.items())
    heads = head_tensors(policy, {name: p.detach() for name, p in head.named_parameters()}, torch.float32)
    read = load_heads(write_checkpoint(policy, tmp_path / "out", heads, {}))
    assert loss(read).item() == pytest.approx(end, abs=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_heads_are_read_and_written_under_their_own_names(policy, stacked, tmp_path):
    source = shutil.copytree(policy, tmp_path / "source")
    if stacked:  # as some checkpoints have their experts
        head = load_heads(source)
        head.stacked = True
        tensors, config = load_file(source / "model.safetensors"), config_of(source)
        rest = {name: tensor for name, tensor in tensors.items() if not is_head_name(name, config)}
        whole = {**rest, **{name: tensor.clone() for name, tensor in head_state(head).items()}}
        save_file(whole, source / "model.safetensors", metadata={"format": "pt"})
    before = {name: t for name, t in Tensors(source).items() if is_head_name(name, config_of(source))}
    state = head_state(load_heads(source))
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)
    trained = {name: tensor + 1 for name, tensor in load_heads(source).named_parameters()}
    heads = head_tensors(source, trained, torch.float32)
    assert heads.keys() == before.keys()
    out = write_checkpoint(source, tmp_path / "out", heads, {})
    assert all(torch.equal(t, trained[n]) for n, t in load_heads(out).named_parameters())
    assert checkpoint_checksums(out).backbone == checkpoint_checksums(source).backbone
    assert config_of(out) == config_of(source)


def test_unchanged_shards_stay_byte_identical(policy, tmp_path):
    source = split(policy, tmp_path / "source")
    heads = {name: tensor + 1 for name, tensor in head_state(load_heads(source)).items()}
    out = write_checkpoint(source, tmp_path / "out", heads, {})
    first = "model-00001-of-00003.safetensors"
    assert (out / first).read_bytes() == (source / first).read_bytes()
    before, after = Tensors(source), Tensors(out)  # raises where index and shards disagree
    assert after.files == before.files
    for name in before:
        assert torch.equal(after[name], heads.get(name, before[name])), name
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert json.loads((out / "bebop.json").read_text())["tensors"]["replaced"] == len(heads)


def test_a_policy_without_heads_gets_them_in_its_familys_layout(policy, tmp_path):
    config = config_of(policy)
    name = config["model_type"]
    bare = shutil.copytree(policy, tmp_path / "bare")
    tensors = {n: t for n, t in load_file(policy / "model.safetensors").items() if not is_head_name(n, config)}
    save_file(tensors, bare / "model.safetensors", metadata={"format": "pt"})
    (bare / "config.json").write_text(json.dumps(config | {COUNT[name]: 0}))
    assert load_heads(bare) is None and read_policy(bare).mtp_layers == 0
    head = init_heads(bare, "last_layer")
    last = {n.removeprefix("model.layers.1."): t for n, t in tensors.items() if n.startswith("model.layers.1.")}
    prefix = {"mtp.": "mtp.layers.0.", "model.mtp_layers.0.": "model.mtp_layers.0."}.get(
        head.family.prefix, "model.layers.2."
    )
    state = head_state(head)
    assert all(torch.equal(state[prefix + n], t) for n, t in last.items())
    out = write_checkpoint(bare, tmp_path / "out", state, {})
    assert config_of(out)[COUNT[name]] == 1 and read_policy(out).mtp_layers == 1
    assert checksum(head_state(load_heads(out))) == checksum(state)
    assert {n for n in Tensors(policy) if is_head_name(n, config)} == set(state)
    random = [checksum(head_state(init_heads(bare, "random", seed))) for seed in (0, 0, 1)]
    assert random[0] == random[1] != random[2]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_heads_own_lm_head_is_kept_whatever_is_trained(policies, name, tmp_path):
    """And a draft vocabulary's map beside it; the engine drafts with the policy's lm_head, and so does training."""
    source = split(policies[name], tmp_path / "source")
    own = {
        "model.layers.2.shared_head.head.weight": torch.randn(7, 32),
        "model.layers.2.embed_tokens.weight": torch.randn(7, 32),
    }
    save_file(own, source / "own.safetensors", metadata={"format": "pt"})
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(own, "own.safetensors")
    (source / INDEX).write_text(json.dumps(index))
    assert load_backbone(source, dtype=torch.float32).lm_head_weight.shape[0] > 7
    heads = head_tensors(source, dict(load_heads(source).named_parameters()), torch.float32)
    assert not heads.keys() & own.keys()
    out = write_checkpoint(source, tmp_path / "out", heads, {})
    assert (out / "own.safetensors").read_bytes() == (source / "own.safetensors").read_bytes()


def test_draft_vocabulary_map_is_kept_and_not_trained(policies, tmp_path):
    source = split(policies["qwen3_5_text"], tmp_path / "source")
    heads = head_state(load_heads(source))
    d2t = torch.tensor([0, 0, 0, 7])
    first = write_checkpoint(source, tmp_path / "first", heads | {"mtp.d2t": d2t}, {})
    assert Tensors(first).files["mtp.d2t"] == HEADS_SHARD
    out = Tensors(write_checkpoint(first, tmp_path / "out", heads, {}))
    assert torch.equal(out["mtp.d2t"], d2t) and out["mtp.d2t"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"unexpected \['d2t'\]"):
        load_heads(first)


def test_further_mtp_layers_are_kept_and_named_heads(policies, tmp_path):
    for name, further in (("qwen3_next", "mtp.layers.1.x.weight"), ("deepseek_v3", "model.layers.3.x.weight")):
        source = shutil.copytree(policies[name], tmp_path / name)
        tensors = load_file(source / "model.safetensors") | {further: torch.ones(3)}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        (source / "config.json").write_text(json.dumps(config_of(source) | {"num_nextn_predict_layers": 2}))
        out = write_checkpoint(source, tmp_path / f"{name}-out", head_state(load_heads(source)), {})
        assert torch.equal(Tensors(out)[further], torch.ones(3))
        assert load_backbone(out, dtype=torch.float32) is not None


def test_a_published_qwen3_next_claims_no_layer_and_has_one(policies, tmp_path):
    source = shutil.copytree(policies["qwen3_next"], tmp_path / "silent")
    config = config_of(source)
    del config["num_nextn_predict_layers"]
    (source / "config.json").write_text(json.dumps(config))
    assert read_policy(source).mtp_layers == 1 and load_heads(source) is not None


def test_a_claim_without_tensors_and_quantised_heads_are_refused(policy, tmp_path):
    config = config_of(policy)
    tensors = load_file(policy / "model.safetensors")
    heads = [name for name in tensors if is_head_name(name, config)]
    hollow, quantised = (shutil.copytree(policy, tmp_path / name) for name in ("hollow", "quantised"))
    save_file({n: t for n, t in tensors.items() if n not in heads}, hollow / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \["):
        load_heads(hollow)
    with pytest.raises(ValueError, match=r"claims 1 MTP layers .*no tensor"):
        write_checkpoint(hollow, tmp_path / "out", {}, {})
    scale = f"{max(heads, key=len)}_scale_inv"
    save_file(tensors | {scale: torch.ones(1)}, quantised / "model.safetensors")
    with pytest.raises(ValueError, match="convert the checkpoint to bfloat16"):
        load_heads(quantised)


def test_unknown_family_is_refused_with_the_known_ones(policies, tmp_path):
    source = shutil.copytree(policies["qwen3_5_text"], tmp_path / "other")
    (source / "config.json").write_text(json.dumps(config_of(source) | {"model_type": "gpt2"}))
    for call in (load_heads, init_heads, lambda path: load_backbone(path, dtype=torch.float32)):
        with pytest.raises(ValueError, match=r"model_type.gpt2.* expected .*mimo.*glm4_moe.*FAMILIES") as error:
            call(source)
        assert "\n" not in str(error.value)


def test_a_model_with_eyes_keeps_its_decoder_behind_text_config(policies, tmp_path):
    """Qwen3.5 as published: nested config, `model.language_model.` names, a vision tower that nobody touches."""
    source = tmp_path / "seeing"
    shutil.copytree(policies["qwen3_5_text"], source)
    text = config_of(source)
    nested = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps(nested | {"tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    moved = {
        n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: t for n, t in tensors.items()
    }
    save_file(moved | {"model.visual.x.weight": torch.ones(2)}, source / "model.safetensors", metadata={"format": "pt"})
    plain, seeing = (load_backbone(p, dtype=torch.float32) for p in (policies["qwen3_5_text"], source))
    assert torch.equal(plain.hidden(IDS, POSITIONS, CU), seeing.hidden(IDS, POSITIONS, CU))
    heads = head_state(load_heads(source))
    assert checksum(heads) == checksum(head_state(load_heads(policies["qwen3_5_text"])))
    bare = {n: t for n, t in Tensors(source).items() if not n.startswith("mtp.")}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(nested | {"text_config": text | {"mtp_num_hidden_layers": 0}}))
    out = write_checkpoint(source, tmp_path / "out", head_state(init_heads(source)), {})
    assert config_of(out)["text_config"]["mtp_num_hidden_layers"] == 1 and read_policy(out).mtp_layers == 1
    assert "model.visual.x.weight" in Tensors(out)


def test_qwen3_in_mimo_layout_needs_zero_biases(policies, tmp_path):
    source = policies["qwen3"]
    biases = [name for name in Tensors(source) if name.endswith("_proj.bias")]
    assert len(biases) == 3 * 3 and not any(Tensors(source)[name].any() for name in biases)
    head = load_heads(source)
    assert not any(name.endswith("bias") for name, _ in head.named_parameters())
    assert {"layer.self_attn.q_norm.weight", "layer.self_attn.k_norm.weight"} <= dict(head.named_parameters()).keys()
    out = write_checkpoint(source, tmp_path / "out", head_tensors(source, head.state_dict(), torch.float32), {})
    assert all(not Tensors(out)[name].any() for name in biases)
    for name, call in ((biases[0], load_heads), (biases[-1], lambda p: load_backbone(p, dtype=torch.float32))):
        bent = shutil.copytree(source, tmp_path / name)
        save_file(dict(Tensors(source)) | {name: Tensors(source)[name] + 1}, bent / "model.safetensors")
        with pytest.raises(ValueError, match=r"proj\.bias is not zero"):
            call(bent)
    lacking = shutil.copytree(source, tmp_path / "lacking")
    save_file({n: t for n, t in Tensors(source).items() if n != biases[0]}, lacking / "model.safetensors")
    for policy, changes, message in (
        (lacking, {}, "1 biases missing"),
        (source, {"qk_norm": False}, "qk_norm=False"),
        (source, {"hidden_size": 33}, "hidden_size=33"),
    ):
        other = shutil.copytree(policy, tmp_path / message.replace(" ", "-"))
        (other / "config.json").write_text(json.dumps(config_of(other) | changes))
        with pytest.raises(ValueError, match=message):
            write_checkpoint(other, tmp_path / "never", {}, {})


def test_a_sliding_window_that_binds_is_refused(tmp_path):
    policy = random_checkpoint(tmp_path / "policy", model_type="mistral", mtp=False)
    (policy / "config.json").write_text(json.dumps(config_of(policy) | {"sliding_window": 64}))
    with pytest.raises(ValueError, match=r"sliding_window=64: .*expected null"):
        init_heads(policy)
