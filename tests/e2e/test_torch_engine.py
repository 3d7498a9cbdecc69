"""bebop's own engine: what it samples, by every rule and tree, how it is updated while it runs, and how it ends."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bebop.config import RolloutSection
from bebop.doctor import exact
from bebop.engines import make_engine
from bebop.errors import EngineDied, EngineError, EngineRefused
from bebop.mtp import checkpoint_checksums, checksum
from bebop.policies import random_checkpoint
from bebop.records import DraftCounts, Sampling
from bebop.spec import apply_sampling

pytestmark = pytest.mark.e2e

VOCABULARY = 8
PROMPT = (1, 2, 3, 4)
PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 1, 2, 3), (2,)]
HEADS = "model.mtp_layers."
LIMITS = {"engine": "torch", "max_num_seqs": 64, "max_model_len": 256, "kv_cache_gib": 0.5}
TREE = {"tree_width": 3, "tree_depth": 3, "tree_budget": 7}
CHAIN, RHEO = {"rule": "rejection"}, {"tree": "rheo", **TREE}
PLAIN = {"speculation": "none"}
OTHERS = {
    "plain": PLAIN,
    "target_only": {"rule": "target_only"},
    "block": {"rule": "block"},
    "topk": {"tree": "topk", **TREE},
    "rrsw": {"tree": "rrsw", "tree_leads": 2, **TREE},
    "rheo-m0": {"tree": "rheo", "tree_leads": 0, **TREE},
    "deep": {"tree": "rheo", "tree_width": 4, "tree_depth": 6, "tree_budget": 12},
}
EVERY = {"chain": CHAIN, "rheo": RHEO, **OTHERS}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two random policies of one shape."""
    root = tmp_path_factory.mktemp("policies")
    return [random_checkpoint(root / str(seed), vocab=VOCABULARY, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tied one, with heads around a decoder layer of its own class."""
    return random_checkpoint(
        tmp_path_factory.mktemp("llama"), vocab=VOCABULARY, seed=1, model_type="llama", num_heads=4, tied=True
    )


@pytest.fixture
def start(policies):
    """Engines, on the first policy where no other is named, closed at the end of the test."""
    running = []

    def one(kind, policy=policies[0], **limits):
        running.append(make_engine(RolloutSection(**LIMITS | limits | kind), policy, seed=0))
        return running[-1]

    yield one
    for engine in running:
        engine.close()


def exact_logprobs(policy, rollout, temperature):
    """Log-probability of each token of a rollout, by transformers in float64."""
    model = exact.load_policy(policy)
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    positions = torch.arange(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[positions, ids[0, len(rollout.prompt_ids) :]].numpy()


def p_value(engine, wanted, temperature, num, **filters):
    limits = {"max_tokens": exact.LENGTH + 1, "ignore_eos": True, "logprobs": False}
    rollouts = engine.generate([PROMPT] * num, Sampling(temperature=temperature, **limits, **filters))
    counts = exact.tally((rollout.token_ids for rollout in rollouts), VOCABULARY)
    return exact.chi_square(counts, wanted)[0]


def warped_joint(policy, temperature, filters):
    parts = [
        apply_sampling(part.log(), temperature=temperature, **filters)
        for part in exact.conditionals(policy, PROMPT, 1.0)
    ]
    return (parts[0][:, None, None] * parts[1][:, :, None] * parts[2]).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [CHAIN, RHEO], ids=["chain", "rheo"])
def test_first_three_tokens_of_20000_requests_follow_the_joint(start, policies, kind, temperature):
    engine = start(kind, max_num_seqs=2000, max_model_len=32)
    assert p_value(engine, exact.joint(policies[0], PROMPT, temperature), temperature, 20_000) > 1e-3
    assert engine.counts().acceptance_length > 1.5


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_every_other_rule_and_tree_follows_it_too(start, policies, kind):
    engine = start(kind, max_num_seqs=2000, max_model_len=32)
    assert p_value(engine, exact.joint(policies[0], PROMPT, 0.7), 0.7, 4000) > 1e-3


@pytest.mark.parametrize("kind", [CHAIN, RHEO], ids=["chain", "rheo"])
def test_tied_llama_with_fresh_heads_is_sampled_exactly(start, llama, kind):
    engine = start(kind, llama, max_num_seqs=2000, max_model_len=32)
    assert p_value(engine, exact.joint(llama, PROMPT, 0.7), 0.7, 10_000) > 1e-3
    assert engine.counts().acceptance_length > 1.2


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "llama", "tied": True},
        {"model_type": "qwen3", "head_dim": 24},
        {"model_type": "mistral"},
    ],
    ids=lambda shape: shape["model_type"],
)
def test_greedy_text_is_what_transformers_generates(start, tmp_path, shape):
    policy = random_checkpoint(tmp_path, vocab=VOCABULARY, seed=3, num_heads=4, **shape)
    model = exact.load_policy(policy)
    engine = start(RHEO, policy)
    for rollout in engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)):
        prompt = torch.tensor([rollout.prompt_ids])
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, eos_token_id=None
        )
        assert rollout.token_ids == tuple(wanted[0, prompt.shape[1] :].tolist())
    assert engine.counts().acceptance_length > 1.0


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("kind", [CHAIN, RHEO, OTHERS["topk"]], ids=["chain", "rheo", "topk"])
def test_filters_hold_for_draft_and_target_alike_at_every_position(start, policies, kind, filters):
    engine = start(kind, max_num_seqs=2000, max_model_len=32)
    wanted = warped_joint(policies[0], 0.9, filters)
    assert (wanted == 0).any()
    assert p_value(engine, wanted, 0.9, 4000, **filters) > 1e-3


@pytest.mark.parametrize("kind", [CHAIN, OTHERS["block"], RHEO], ids=["chain", "block", "rheo"])
def test_drafts_are_filtered_too_not_only_verified_so(start, kind):
    """With top_k = 1 draft and target are point masses: what is accepted is what temperature 0 accepts."""
    engine = start(kind | ({"tree_leads": 0} if "tree" in kind else {}))
    greedy = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=40, ignore_eos=True))
    narrow = engine.generate(PROMPTS, Sampling(temperature=1.0, top_k=1, max_tokens=40, ignore_eos=True))
    assert [(r.token_ids, r.counts) for r in greedy] == [(r.token_ids, r.counts) for r in narrow]


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_greedy_text_is_the_policys_by_every_rule_and_tree(start, policies, kind):
    model = exact.load_policy(policies[0])
    rollouts = start(kind).generate(PROMPTS, Sampling(temperature=0.0, max_tokens=60, ignore_eos=True))
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            best = model(ids).logits[0].argmax(-1)
        assert rollout.token_ids == tuple(best[len(rollout.prompt_ids) - 1 : -1].tolist())
        # at temperature 0 the log-probability is that of temperature 1
        assert np.abs(np.array(rollout.logprobs) - exact_logprobs(policies[0], rollout, 1.0)).max() < 1e-5


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_seed_gives_the_same_tokens_in_any_batch(start, kind):
    engine = start(kind)
    sampling = Sampling(temperature=0.7, max_tokens=30, ignore_eos=True)
    prompts, seeds = PROMPTS * 4, list(range(16))
    together = [r.token_ids for r in engine.generate(prompts, sampling, seeds=seeds)]
    backwards = [r.token_ids for r in engine.generate(prompts[::-1], sampling, seeds=seeds[::-1])][::-1]
    alone = [engine.generate([prompts[i]], sampling, seeds=[i])[0].token_ids for i in range(4)]
    assert together == backwards
    assert alone == together[:4]
    assert len(set(together)) == 16


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_logprobs_are_at_the_sampling_temperature_with_speculation(start, policies, kind):
    engine = start(kind)
    for rollout in engine.generate(PROMPTS, Sampling(temperature=0.7, max_tokens=40, ignore_eos=True)):
        assert len(rollout.logprobs) == len(rollout.token_ids) == 40
        assert np.abs(np.array(rollout.logprobs) - exact_logprobs(policies[0], rollout, 0.7)).max() < 1e-5
        assert (rollout.counts is None) == (kind is PLAIN)
    counts = engine.counts()
    if kind is not PLAIN:
        drafted = {"chain": 3, "block": 3, "target_only": 3}.get(next(n for n, k in EVERY.items() if k is kind))
        assert drafted is None or counts.num_draft_tokens == drafted * counts.num_drafts
        assert list(counts.accepted_per_depth) == sorted(counts.accepted_per_depth, reverse=True)


def test_requests_with_different_settings_do_not_affect_each_other(start, policies):
    engine = start(RHEO)
    asked = [
        Sampling(temperature=t, top_k=k, max_tokens=30, ignore_eos=True, seed=5)
        for t, k in ((0.0, 0), (1.0, 0), (0.7, 2), (0.0, 0), (1.3, 5))
    ]

    async def together():
        return await asyncio.gather(*(engine.agenerate(PROMPT, sampling) for sampling in asked))

    mixed = asyncio.run(together())
    alone = [engine.generate([PROMPT], sampling)[0] for sampling in asked]
    assert [r.token_ids for r in mixed] == [r.token_ids for r in alone]
    assert mixed[0].token_ids == mixed[3].token_ids
    with ThreadPoolExecutor(2) as pool:  # from any event loop
        again = list(pool.map(lambda sampling: asyncio.run(engine.agenerate(PROMPT, sampling)), asked[:2]))
    assert [r.token_ids for r in again] == [r.token_ids for r in mixed[:2]]


@pytest.mark.parametrize("kind", [CHAIN, RHEO], ids=["chain", "rheo"])
def test_stop_token_cuts_tokens_logprobs_and_versions(start, kind):
    stop, limit = 5, 12
    rollouts = start(kind).generate(
        [PROMPTS[0]] * 200, Sampling(max_tokens=limit, stop_token_ids=(stop,), ignore_eos=True)
    )
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        length = len(rollout.token_ids)
        assert len(rollout.logprobs) == len(rollout.versions) == length
        if rollout.finish_reason == "stop":
            assert rollout.token_ids.index(stop) == length - 1
        else:
            assert length == limit and stop not in rollout.token_ids
    # tokens accepted behind the stop were dropped from some response: that is the case meant
    emitted = [1 + r.counts.num_drafts + sum(r.counts.accepted_per_depth) for r in rollouts]
    assert any(e > len(r.token_ids) for e, r in zip(emitted, rollouts, strict=True) if r.finish_reason == "stop")


def test_response_ends_at_end_of_text_or_length_limit(start, policies):
    engine = start(RHEO, max_model_len=64)
    ended = engine.generate([PROMPT] * 50, Sampling(max_tokens=1000))
    end = next(r.token_ids[-1] for r in ended if r.finish_reason == "stop")
    assert all(end not in r.token_ids[:-1] for r in ended)
    ignoring = engine.generate([PROMPT] * 50, Sampling(max_tokens=1000, ignore_eos=True))
    assert all(len(r.token_ids) == 60 and r.finish_reason == "length" for r in ignoring)
    assert any(end in r.token_ids[:-1] for r in ignoring)


# -- weights ------------------------------------------------------------------------------------------------------


def heads_of(policy):
    return {name: t for name, t in load_file(policy / "model.safetensors").items() if name.startswith(HEADS)}


def test_engine_checksums_equal_the_checkpoints_after_start_and_updates(start, policies):
    engine = start(CHAIN)
    assert engine.checksums() == checkpoint_checksums(policies[0])
    backbone = {n: t for n, t in load_file(policies[1] / "model.safetensors").items() if not n.startswith(HEADS)}
    held = engine.update_weights(backbone, version=3)
    assert held.heads == checkpoint_checksums(policies[0]).heads
    assert held.backbone == checksum(backbone) == checkpoint_checksums(policies[1]).backbone
    held = engine.update_weights(heads_of(policies[1]), version=4)
    assert held == engine.checksums() == checkpoint_checksums(policies[1])
    assert engine.version == 4
    # and what it samples is the other policy's
    rollout = engine.generate([PROMPT], Sampling(max_tokens=20, ignore_eos=True))[0]
    assert np.abs(np.array(rollout.logprobs) - exact_logprobs(policies[1], rollout, 1.0)).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{HEADS}0.nothing", torch.zeros(1), "heads: got 1 tensors, of which the engine has 0"),
        ("lm_head.weight", torch.zeros(4, 64), r"lm_head.weight: got shape \[4, 64\], expected \[8, 64\]"),
        ("model.nothing", torch.zeros(1), "model.nothing: the engine has no tensor"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(start, policies, name, tensor, message):
    engine = start(RHEO)
    good = {n: t for n, t in load_file(policies[1] / "model.safetensors").items() if n != "lm_head.weight"}
    with pytest.raises(EngineRefused, match=message):
        engine.update_weights({**good, name: tensor} if HEADS not in name else {name: tensor}, version=9)
    assert (engine.checksums(), engine.version) == (checkpoint_checksums(policies[0]), 0)


def test_without_speculation_the_engine_holds_no_heads(start, policies):
    engine = start(PLAIN)
    with pytest.raises(EngineRefused, match="heads: got 16 tensors, of which the engine has 0"):
        engine.update_weights(heads_of(policies[0]), version=1)
    assert engine.counts() == DraftCounts()


def wait_for(engine, num_drafts):
    before = engine.counts().num_drafts
    deadline = time.monotonic() + 60
    while engine.counts().num_drafts < before + num_drafts and time.monotonic() < deadline:
        time.sleep(0.002)


@pytest.mark.parametrize("kind", [CHAIN, RHEO], ids=["chain", "rheo"])
def test_running_requests_continue_with_new_weights_and_version_their_tokens(start, policies, kind):
    engine = start(kind)
    sampling = Sampling(temperature=0.7, max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, PROMPTS * 4, sampling)
        wait_for(engine, 200)
        engine.update_weights(load_file(policies[1] / "model.safetensors"), version=1)
        rollouts = running.result(timeout=120)
    cut = [rollout.versions.index(1) for rollout in rollouts if set(rollout.versions) == {0, 1}]
    assert cut, "the update came too early or too late to catch a request"
    for rollout in rollouts:
        assert list(rollout.versions) == sorted(rollout.versions)
        assert len(rollout.versions) == len(rollout.token_ids) == len(rollout.logprobs) == 200
        by_policy = [exact_logprobs(policy, rollout, 0.7) for policy in policies]
        wanted = [by_policy[version][i] for i, version in enumerate(rollout.versions)]
        assert np.abs(np.array(rollout.logprobs) - wanted).max() < 1e-4


# -- life ---------------------------------------------------------------------------------------------------------


def test_abort_returns_what_there_is_and_keep_continues_it(start):
    engine = start(RHEO)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    undisturbed = engine.generate(PROMPTS * 4, sampling, seeds=range(16))
    for mode in ("abort", "keep"):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.generate, PROMPTS * 4, sampling, seeds=range(16))
            wait_for(engine, 200)
            engine.pause(mode)
            if mode == "keep":
                drafts = engine.counts().num_drafts
                time.sleep(0.2)
                assert not running.done() and engine.counts().num_drafts == drafts
                engine.resume()
            rollouts = running.result(timeout=120)
        if mode == "abort":
            engine.resume()
            assert all(0 < len(r.token_ids) < 200 and r.finish_reason == "abort" for r in rollouts)
            assert all(len(r.logprobs) == len(r.versions) == len(r.token_ids) for r in rollouts)
        else:
            assert [r.token_ids for r in rollouts] == [r.token_ids for r in undisturbed]
            assert all(r.finish_reason == "length" for r in rollouts)


def test_requests_beyond_the_slots_wait_and_get_their_own_tokens(start):
    sampling = Sampling(max_tokens=25, ignore_eos=True)
    few, many = start(RHEO, max_num_seqs=3), start(RHEO)
    prompts, seeds = PROMPTS * 3, list(range(12))
    assert few.generate(prompts, sampling, seeds=seeds) != []
    narrow, wide = (engine.generate(prompts, sampling, seeds=seeds) for engine in (few, many))
    assert [r.token_ids for r in narrow] == [r.token_ids for r in wide]


def test_nan_fails_only_its_request_and_names_the_row(start, policies):
    engine = start(RHEO)
    embedding = engine._policy.embedding
    embedding[7] = torch.nan  # token 7 alone
    long = (1, 2, 3) * 20

    async def both():
        engine.pause("keep")  # so that they are admitted together, the longer one first
        good = asyncio.ensure_future(
            engine.agenerate(long, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True), "good")
        )
        bad = asyncio.ensure_future(engine.agenerate((1, 7) * 15, Sampling(max_tokens=9, ignore_eos=True), "bad"))
        await asyncio.sleep(0.02)
        engine.resume()
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(both())
    assert good.finish_reason == "length"
    assert isinstance(bad, EngineError)
    assert "request bad: target row 0, after position 29, is NaN" in str(bad)
    embedding[7] = load_file(policies[0] / "model.safetensors")["model.embed_tokens.weight"][7]
    # the slot that held NaN serves again, beside a longer text, for which its masked columns are read
    for rollout in engine.generate([long, (1, 7, 3)], Sampling(max_tokens=20, ignore_eos=True)):
        assert np.abs(np.array(rollout.logprobs) - exact_logprobs(policies[0], rollout, 1.0)).max() < 1e-5


def test_a_cancelled_request_leaves_and_the_others_go_on(start):
    engine = start(CHAIN)

    async def one_cancelled():
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, sampling, name)) for name in ("gone", "stays")]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    gone, stays = asyncio.run(one_cancelled())
    assert isinstance(gone, asyncio.CancelledError)
    assert len(stays.token_ids) == 200
    assert len(engine.generate([PROMPT], Sampling(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_a_request_id_that_runs_already_is_refused(start):
    engine = start(CHAIN)
    engine.pause("keep")

    async def twice():
        first = asyncio.ensure_future(engine.agenerate(PROMPT, Sampling(max_tokens=3), "same"))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineRefused, match="request_id: got 'same'"):
            await engine.agenerate(PROMPT, Sampling(max_tokens=3), "same")
        await asyncio.to_thread(engine.resume)
        return await first

    assert asyncio.run(twice()).request_id == "same"


def test_broken_engine_gives_its_error_to_all_requests(start, monkeypatch):
    engine = start(RHEO)
    monkeypatch.setattr(engine._rounds, "step", lambda version: 1 / 0)
    with pytest.raises(EngineDied, match="division by zero"):
        engine.generate([PROMPT] * 3, Sampling(max_tokens=9, ignore_eos=True))
    for call in (engine.counts, engine.checksums, lambda: engine.generate([PROMPT], Sampling(max_tokens=2))):
        with pytest.raises(EngineDied, match="division by zero"):
            call()


def test_closing_ends_running_requests_and_the_thread(start):
    engine = start(CHAIN)
    caught = []

    def generate():
        try:
            engine.generate([PROMPT], Sampling(max_tokens=10_000, ignore_eos=True))
        except EngineError as error:
            caught.append(str(error))

    engine.pause("keep")
    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.05)
    engine.close()
    engine.close()
    thread.join(timeout=30)
    assert caught == ["the engine is closed"]
    assert not [t for t in threading.enumerate() if t.name == "bebop-torch"]
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.checksums()
