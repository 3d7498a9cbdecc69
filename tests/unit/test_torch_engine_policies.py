"""Every kind of policy that the torch engine runs, against transformers' decoder and the head as it is trained."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bebop.backbone import load_backbone
from bebop.config import Model, RolloutSection
from bebop.engines import check_policy, make_engine
from bebop.engines.torch_engine.batch import make_caches, target_pass
from bebop.engines.torch_engine.drafter import Anchors, Drafter, Settings
from bebop.engines.torch_engine.kv_cache import Window
from bebop.engines.torch_engine.model import Policy
from bebop.errors import EngineRefused
from bebop.mtp import checkpoint_checksums, draft_hidden, family_of, load_heads
from bebop.mtp.checkpoint import Tensors, read_config
from bebop.policies import prepare_policy, random_checkpoint
from bebop.records import Sampling

CPU = torch.device("cpu")
VOCABULARY, LENGTH, DEPTH = 20, 9, 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
KINDS = {
    "qwen2": {},
    "mimo": {"model_type": "mimo"},
    "llama": {"model_type": "llama", "num_heads": 4},
    "llama tied": {"model_type": "llama", "num_heads": 4, "tied": True},
    "mistral": {"model_type": "mistral", "head_dim": 24},
    "qwen3": {"model_type": "qwen3", "num_heads": 4, "head_dim": 24},
    "qwen3 tied": {"model_type": "qwen3", "tied": True},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "glm4_moe": {"model_type": "glm4_moe", "num_layers": 3},
    "shared key heads": {"num_heads": 4},
    "qwen3 in MiMo's layout": {"model_type": "qwen3", "mtp": False},
    "biases": {"model_type": "llama"},
    "yarn": {"model_type": "qwen3"},
}


def write(path, kind, seed):
    """A random policy of one of KINDS."""
    random_checkpoint(path, vocab=VOCABULARY, seed=seed, **KINDS[kind])
    if kind == "yarn":
        rewrite(path, rope_parameters=YARN)
    elif kind == "shared key heads":
        rewrite(path, num_key_value_heads=2)
        halve(path)
    elif kind == "biases":
        rewrite(path, attention_bias=True, mlp_bias=True)
        add_biases(path)
    elif kind.endswith("MiMo's layout"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BEBOP_HOME", str(path.with_name(f"home-{seed}")))
            return prepare_policy(Model(name="hf", path=path, dtype="float32"), seed)
    return path


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    return write(tmp_path_factory.mktemp("policy") / "one", kind, seed=5)


def rewrite(path, **keys):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def halve(path):
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".k_proj." in name or ".v_proj." in name]:
        tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def add_biases(path):
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = 0.3 * torch.randn(len(tensors[name]), generator=generator)
        tensors[name.removesuffix("weight") + "bias"] = bias
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def policy(directory):
    return Policy(directory, heads=True, num_positions=64, dtype=torch.float32, device=CPU)


@torch.inference_mode()
def test_drafts_and_target_equal_training_and_transformers(policy, directory):
    """One round of one request: prefill, a chain by the head, the target's pass over it."""
    rollout = RolloutSection(engine="torch", rule="target_only", num_speculative_tokens=DEPTH, max_model_len=32)
    drafter = Drafter(rollout, policy)
    text = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    cache, head_cache = make_caches(policy, drafter, 32, 1)
    positions = torch.arange(LENGTH - 1).unsqueeze(0)
    hidden = policy.hidden(text[:, :-1], positions, Window(cache, 0, 0, causal=True))
    first = policy.first_state(hidden)
    state = policy.draft_state(first, text[:, 1:], positions, Window(head_cache, 0, 0, causal=True))
    anchors = Anchors(torch.tensor([LENGTH]), state[:, -1], None, LENGTH - 1)
    chain = drafter.draft(anchors, Settings(torch.ones(1), {}), None, head_cache)
    logits, _ = target_pass(policy, cache, chain, anchors, text[:, -1])

    ids = torch.cat([text, chain.tokens], 1)[0]
    backbone, bounds, places = load_backbone(directory, dtype=torch.float32), torch.tensor([0, len(ids)]), torch.arange
    wanted = backbone.model(ids[None]).logits[0]
    assert (policy.logits(hidden)[0] - wanted[: LENGTH - 1]).abs().max() < 2e-5
    assert (logits[0] - wanted[LENGTH - 1 :]).abs().max() < 2e-5
    normed, every = backbone.hidden(ids, places(len(ids)), bounds), places(len(ids))
    trained = draft_hidden(load_heads(directory), normed, backbone.embed_weight, ids, bounds, every, DEPTH)
    q = F.linear(trained, backbone.lm_head_weight)[:, LENGTH - 2]
    assert (policy.draft_logits(state[:, -1]) - q[0]).abs().max() < 1e-4
    assert torch.equal(chain.tokens[0], q.argmax(-1))


def test_the_engine_holds_the_checkpoints_tensors_and_takes_new_values(kind, directory, tmp_path):
    other = write(tmp_path / "other", kind, seed=6)
    with make_engine(RolloutSection(engine="torch"), directory) as engine:
        assert engine.checksums() == checkpoint_checksums(directory)
        assert engine.update_weights(dict(Tensors(other)), version=1) == checkpoint_checksums(other)
        assert engine.checksums().num_head_tensors > 0


def test_unread_tensors_are_in_checksums_and_updates(tmp_path):
    """Further MTP layers, and the copies of embeddings and output matrix that GLM's checkpoints carry."""

    def two_layers(path, seed):
        random_checkpoint(path, vocab=VOCABULARY, seed=seed, **KINDS["glm4_moe"])
        tensors = load_file(path / "model.safetensors")
        head = "model.layers.3."
        further = {name.replace(head, "model.layers.4."): t.clone() for name, t in tensors.items() if head in name}
        copies = {head + name: tensors["lm_head.weight"].clone() for name in family_of(read_config(path)).shared}
        save_file(tensors | further | copies, path / "model.safetensors", metadata={"format": "pt"})
        rewrite(path, num_nextn_predict_layers=2)
        return path

    one, other = two_layers(tmp_path / "one", 5), two_layers(tmp_path / "other", 6)
    with make_engine(RolloutSection(engine="torch"), one) as engine:
        assert engine.checksums() == checkpoint_checksums(one)
        assert engine.update_weights(dict(Tensors(other)), version=1) == checkpoint_checksums(other)
        with pytest.raises(EngineRefused, match="of which the engine has 0"):
            engine.update_weights({"model.layers.5.eh_proj.weight": torch.zeros(1)}, version=2)


def test_a_tied_policy_has_its_embeddings_once(tmp_path):
    path = random_checkpoint(tmp_path, vocab=VOCABULARY, **KINDS["llama tied"])
    with make_engine(RolloutSection(engine="torch"), path) as engine:
        new = torch.randn(VOCABULARY, 64, generator=torch.Generator().manual_seed(0))
        engine.update_weights({"model.embed_tokens.weight": new}, version=1)
        tensors = dict(Tensors(path)) | {"model.embed_tokens.weight": new}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        assert engine.checksums() == checkpoint_checksums(path)
        rollout = engine.generate([(1, 2)], Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    best = load_backbone(path, dtype=torch.float32).model(ids).logits[0].argmax(-1)
    assert rollout.token_ids == tuple(best[1:-1].tolist())


def test_experts_of_a_trainer_that_stacks_them_are_taken(tmp_path):
    paths = [
        random_checkpoint(tmp_path / str(seed), vocab=VOCABULARY, seed=seed, **KINDS["qwen3_moe"]) for seed in (1, 2)
    ]
    stacked = load_backbone(paths[1], dtype=torch.float32).model.state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    with make_engine(RolloutSection(engine="torch"), paths[0]) as engine:
        assert engine.update_weights(stacked, version=1).backbone == checkpoint_checksums(paths[1]).backbone


# -- refusals -----------------------------------------------------------------------------------------------------

PLAIN = {"engine": "torch", "speculation": "none", "max_model_len": 128}


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("qwen3_next", {}, r"linear attention or gated attention \(model_type=qwen3_next\)"),
        ("qwen3_5_text", {}, r"linear attention or gated attention \(model_type=qwen3_5_text\)"),
        ("deepseek_v3", {}, r"low-rank keys and values \(model_type=deepseek_v3, MLA\)"),
        ("mistral", {"sliding_window": 64}, "sliding_window=64 below rollout.max_model_len=128"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window=64 below",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
)
def test_a_policy_of_another_kind_is_refused_by_its_config(tmp_path, kind, keys, message):
    path = random_checkpoint(tmp_path, vocab=VOCABULARY, model_type=kind, mtp=False)
    rewrite(path, **keys)
    with pytest.raises(EngineRefused, match=message) as error:
        check_policy(RolloutSection(**PLAIN), path)
    assert "set rollout.engine=vllm" in str(error.value) and "\n" not in str(error.value)


def test_sliding_window_of_the_longest_text_is_allowed(tmp_path):
    path = random_checkpoint(tmp_path, vocab=VOCABULARY, model_type="mistral", mtp=False)
    rewrite(path, sliding_window=128)
    check_policy(RolloutSection(**PLAIN), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": torch.inf}, r"model\.norm\.weight has a NaN or an infinity"),
        (
            {"model.layers.0.self_attn.q_proj.weight": None},
            r"1 tensors of the policy are missing, such as model\.layers\.0\.self_attn\.q_proj\.weight",
        ),
        ({"model.layers.0.self_attn.sinks": 0.0}, r"self_attn\.sinks belongs to nothing in LlamaForCausalLM"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    path = random_checkpoint(tmp_path, vocab=VOCABULARY, model_type="llama", mtp=False)
    tensors = load_file(path / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = torch.full_like(tensors.get(name, torch.ones(2)), value)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineRefused, match=message):
        make_engine(RolloutSection(**PLAIN), path)
