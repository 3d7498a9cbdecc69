"""The real vLLM engine: what it samples, how it is updated while it runs, and how it ends."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from bebop.config import RolloutSection
from bebop.data.tokenizer import num_token_ids
from bebop.doctor import exact
from bebop.engines import make_engine
from bebop.errors import EngineDied, EngineError, EngineRefused
from bebop.mtp import checkpoint_checksums, checksum
from bebop.policies import random_checkpoint
from bebop.records import DraftCounts, Sampling

pytestmark = pytest.mark.e2e

VOCABULARY = 8
PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 1, 2, 3)]
HEADS = "model.mtp_layers."
LIMITS = {"max_num_seqs": 64, "max_model_len": 256, "kv_cache_gib": 0.25}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two random policies of one shape."""
    root = tmp_path_factory.mktemp("policies")
    return [random_checkpoint(root / str(seed), vocab=VOCABULARY, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(policies):
    with make_engine(RolloutSection(num_speculative_tokens=3, **LIMITS), policies[0], seed=0) as engine:
        yield engine


@pytest.fixture
def fresh(engine, policies):
    """The engine with the first policy's weights, whatever an earlier test left in it."""
    engine.update_weights(load_file(policies[0] / "model.safetensors"), version=0)
    return engine


def exact_logprobs(policy, rollout, temperature):
    """Log-probability of each token of a rollout, by transformers in float64."""
    model = exact.load_policy(policy)
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    positions = torch.arange(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[positions, ids[0, len(rollout.prompt_ids) :]].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_under_speculation_are_the_policys_at_the_sampling_temperature(fresh, policies, temperature):
    sampling = Sampling(temperature=temperature, max_tokens=40, ignore_eos=True)
    for rollout in fresh.generate(PROMPTS * 4, sampling):
        assert len(rollout.logprobs) == len(rollout.token_ids) == 40
        wanted = exact_logprobs(policies[0], rollout, temperature)
        assert np.abs(np.array(rollout.logprobs) - wanted).max() < 1e-5
        assert rollout.counts.num_drafts > 0


def test_logprobs_and_greedy_tokens_are_equal_without_speculation(fresh, policies):
    greedy = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    with make_engine(RolloutSection(speculation="none", **LIMITS), policies[0]) as plain:
        wanted = plain.generate(PROMPTS, greedy)
        sampled = plain.generate(PROMPTS, Sampling(temperature=0.7, max_tokens=40, ignore_eos=True))
        with pytest.raises(EngineRefused, match="heads: got 16 tensors, of which the engine has 0"):
            plain.update_weights(heads_of(policies[0]), version=1)
        assert plain.counts() == DraftCounts()
    for drafted, undrafted in zip(fresh.generate(PROMPTS, greedy), wanted, strict=True):
        assert drafted.token_ids == undrafted.token_ids
        assert np.abs(np.array(drafted.logprobs) - np.array(undrafted.logprobs)).max() < 1e-5
        assert undrafted.counts is None
    for rollout in sampled:
        wanted = exact_logprobs(policies[0], rollout, 0.7)
        assert np.abs(np.array(rollout.logprobs) - wanted).max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # vLLM's own drafter, and bebop's
def test_padding_ids_are_neither_sampled_nor_scored(tmp_path, kind):
    policy = random_checkpoint(tmp_path / kind, model_type=kind, padding=64)
    with make_engine(RolloutSection(num_speculative_tokens=3, **LIMITS), policy) as engine:
        rollouts = engine.generate([(5, 6, 7)] * 16, Sampling(max_tokens=40, ignore_eos=True))
        assert engine.counts().num_drafts > 0
    tokens = [token for rollout in rollouts for token in rollout.token_ids]
    assert len(tokens) == 640 and max(tokens) < num_token_ids(policy)
    for rollout in rollouts:
        assert np.abs(np.array(rollout.logprobs) - exact_logprobs(policy, rollout, 1.0)).max() < 1e-5


def test_stop_token_cuts_tokens_logprobs_and_versions(fresh):
    stop, limit = 5, 12
    rollouts = fresh.generate([PROMPTS[0]] * 200, Sampling(max_tokens=limit, stop_token_ids=(stop,), ignore_eos=True))
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        length = len(rollout.token_ids)
        assert len(rollout.logprobs) == len(rollout.versions) == length
        if rollout.finish_reason == "stop":
            assert rollout.token_ids.index(stop) == length - 1
        else:
            assert length == limit
            assert stop not in rollout.token_ids
    # tokens accepted behind the stop were dropped from some response: that is the case meant
    emitted = [1 + r.counts.num_drafts + sum(r.counts.accepted_per_depth) for r in rollouts]
    assert any(e > len(r.token_ids) for e, r in zip(emitted, rollouts, strict=True) if r.finish_reason == "stop")


def test_a_seed_gives_the_same_response_again(fresh):
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    first, again = (fresh.generate([PROMPTS[0]] * 3, sampling, seeds=[7, 8, 7]) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert first[0].token_ids == first[2].token_ids != first[1].token_ids


def test_counts_of_requests_add_up_to_the_engines(fresh):
    before = fresh.counts()
    rollouts = fresh.generate(PROMPTS * 8, Sampling(max_tokens=30, ignore_eos=True))
    per_request = sum((r.counts for r in rollouts), DraftCounts())
    after = fresh.counts()
    assert before.num_drafts + per_request.num_drafts == after.num_drafts
    wanted = [b + c for b, c in zip(before.accepted_per_depth, per_request.accepted_per_depth, strict=True)]
    assert list(after.accepted_per_depth) == wanted
    assert after.acceptance_length > 1.0


def test_requests_awaited_from_another_loop_run_side_by_side(fresh):
    async def both():
        sampling = Sampling(max_tokens=10, ignore_eos=True)
        return await asyncio.gather(*(fresh.agenerate(prompt, sampling, f"id-{i}") for i, prompt in enumerate(PROMPTS)))

    rollouts = asyncio.run(both())
    assert [r.request_id for r in rollouts] == ["id-0", "id-1", "id-2"]
    assert [r.prompt_ids for r in rollouts] == PROMPTS


def heads_of(policy):
    return {name: t for name, t in load_file(policy / "model.safetensors").items() if name.startswith(HEADS)}


def test_engine_checksums_equal_the_checkpoints_after_start_and_updates(fresh, policies):
    assert fresh.checksums() == checkpoint_checksums(policies[0])
    backbone = {n: t for n, t in load_file(policies[1] / "model.safetensors").items() if not n.startswith(HEADS)}
    held = fresh.update_weights(backbone, version=3)
    assert held.heads == checkpoint_checksums(policies[0]).heads
    assert held.backbone == checksum(backbone) == checkpoint_checksums(policies[1]).backbone
    held = fresh.update_weights(heads_of(policies[1]), version=4)
    assert held == fresh.checksums() == checkpoint_checksums(policies[1])
    assert fresh.version == 4


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{HEADS}0.nothing", torch.zeros(1), "heads: got 1 tensors, of which the engine has 0"),
        ("lm_head.weight", torch.zeros(4, 64), r"lm_head.weight: got shape \[4, 64\], expected \[8, 64\]"),
        ("model.nothing", torch.zeros(1), "model.nothing: the engine has no tensor"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(fresh, name, tensor, message):
    before = fresh.checksums()
    with pytest.raises(EngineRefused, match=message):
        fresh.update_weights({name: tensor}, version=9)
    assert (fresh.checksums(), fresh.version) == (before, 0)


def test_running_requests_continue_with_new_weights_and_version_their_tokens(fresh, policies):
    sampling = Sampling(temperature=0.7, max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fresh.generate, PROMPTS * 8, sampling)
        time.sleep(0.4)
        fresh.update_weights(load_file(policies[1] / "model.safetensors"), version=1)
        rollouts = running.result(timeout=120)
    cut = [rollout.versions.index(1) for rollout in rollouts if set(rollout.versions) == {0, 1}]
    assert cut, "the update came too early or too late to catch a request"
    for rollout in rollouts:
        assert list(rollout.versions) == sorted(rollout.versions)
        assert len(rollout.versions) == len(rollout.token_ids) == len(rollout.logprobs) == 200
        by_policy = [exact_logprobs(policy, rollout, 0.7) for policy in policies]
        wanted = [by_policy[version][i] for i, version in enumerate(rollout.versions)]
        assert np.abs(np.array(rollout.logprobs) - wanted).max() < 1e-4


def test_abort_returns_what_there_is_and_keep_continues_it(fresh):
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    for mode in ("abort", "keep"):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(fresh.generate, PROMPTS * 8, sampling)
            time.sleep(0.4)
            fresh.pause(mode)
            if mode == "keep":
                time.sleep(0.3)
                assert not running.done()
                fresh.resume()
            rollouts = running.result(timeout=120)
        if mode == "abort":
            fresh.resume()
            assert all(0 < len(r.token_ids) < 200 and r.finish_reason == "abort" for r in rollouts)
            assert all(len(r.logprobs) == len(r.versions) == len(r.token_ids) for r in rollouts)
        else:
            assert all(len(r.token_ids) == 200 and r.finish_reason == "length" for r in rollouts)


def test_block_verification_is_refused_before_the_engine_starts(policies):
    with pytest.raises(EngineRefused, match=r"rollout\.rule: got block"):
        make_engine(RolloutSection(rule="block", **LIMITS), policies[0])


def test_killed_engine_fails_its_request_and_leaves_no_process(policies):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = make_engine(RolloutSection(**LIMITS), policies[0])
    caught = []

    def generate():
        try:
            engine.generate(PROMPTS * 20, Sampling(max_tokens=250, ignore_eos=True))
        except EngineDied as error:
            caught.append((time.monotonic(), error))

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.5)
    (pid,) = engine.process_ids
    killed = time.monotonic()
    os.kill(pid, 9)
    thread.join(timeout=60)
    assert caught and caught[0][0] - killed < 10
    assert f"process {pid} was killed by signal 9" in str(caught[0][1])
    with pytest.raises(EngineDied):
        engine.generate(PROMPTS, Sampling(max_tokens=2))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.checksums()
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [c for c in left if "resource_tracker" not in " ".join(c.cmdline())]


def test_a_killed_owner_takes_its_engine_along(policies, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from bebop.config import RolloutSection\n"
        "from bebop.engines import make_engine\n"
        "if __name__ == '__main__':\n"
        "    engine = make_engine(RolloutSection(kv_cache_gib=0.25, max_model_len=64), Path(sys.argv[1]))\n"
        "    print(engine.process_ids[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    owner = subprocess.run([sys.executable, script, policies[0]], stdout=subprocess.PIPE, text=True, timeout=180)
    assert owner.returncode == -9
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(owner.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(owner.stdout))


def test_an_engine_that_cannot_start_says_why(policies):
    with pytest.raises(EngineRefused, match=r"did not start: .*max_model_len"):
        make_engine(RolloutSection(max_model_len=100_000), policies[0])
