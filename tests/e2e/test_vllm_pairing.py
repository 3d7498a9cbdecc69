"""Each request's draft is verified with its own probabilities, however vLLM's batch is put together and cut apart."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bebop.config import RolloutSection
from bebop.doctor import exact
from bebop.engines import make_engine
from bebop.engines.vllm_engine import engine as vllm_engine
from bebop.policies import random_checkpoint
from bebop.records import Sampling

pytestmark = pytest.mark.e2e

VOCABULARY = 8
BLOCK = 32  # positions of a KV block
BLOCK_BYTES = 3 * BLOCK * 2 * 64 * 4  # of the decoder's two layers and the head's, keys and values, float32
NUM_BLOCKS = 16
LIMITS = {"max_num_seqs": 16, "max_model_len": 4 * BLOCK, "kv_cache_gib": NUM_BLOCKS * BLOCK_BYTES / 2**30}


@dataclass(frozen=True)
class Case:
    """A request with its seed, as it is sent alone and in every batch."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int


# distinct prompts; lengths that end at different steps, so that rows of the batch are filled from behind
CASES = [
    Case((1, 2, 3), 11, 30),
    Case((4, 5), 12, 12),
    Case((6, 7, 1, 2, 3), 13, 45),
    Case((7, 7, 7, 1), 14, 20),
    Case((2, 6), 15, 38),
    Case((3, 6, 5, 4, 2, 1, 1), 16, 26),
]
LONG = [replace(case, max_tokens=110) for case in CASES]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=VOCABULARY, seed=1)


@pytest.fixture(scope="module")
def engine(policy):
    """An engine that is watched, with a cache for all of CASES at once and not for all of LONG."""
    stock = vllm_engine.engine_arguments

    def watched(*args, **kwargs):
        return stock(*args, **kwargs) | {"worker_extension_cls": "observed_drafts.Observer", "block_size": BLOCK}

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)  # the engine's process starts with this path
        patch.setattr(vllm_engine, "engine_arguments", watched)
        engine = make_engine(RolloutSection(num_speculative_tokens=3, **LIMITS), policy, seed=0)
    with engine:
        yield engine


def sample(engine, cases, *, mispair=False, apart_s=0.0):
    """Responses to `cases`, sent in their order, and what the worker saw of their drafts."""

    async def one(number, case):
        await asyncio.sleep(number * apart_s)
        sampling = Sampling(max_tokens=case.max_tokens, seed=case.seed, ignore_eos=True)
        return await engine.agenerate(case.prompt, sampling, f"{number}")

    async def all_of_them():
        return await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))

    engine._run(engine._llm.collective_rpc("start_observing", args=(mispair,)))
    rollouts = asyncio.run(all_of_them())
    (observed,) = engine._run(engine._llm.collective_rpc("observed"))
    return rollouts, observed


def outcome(rollout):
    return rollout.token_ids, rollout.counts


def excess_surprise(policy, rollouts):
    """How far the surprise -log p(token) of all tokens lies above the policy's entropy, in standard errors."""
    model = exact.load_policy(policy)
    excess = variance = 0.0
    for rollout in rollouts:
        start, ids = len(rollout.prompt_ids), torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            surprise = -torch.log_softmax(model(ids).logits[0, start - 1 : -1], -1)
        entropy = (surprise.neg().exp() * surprise).sum(-1)
        excess += float((surprise.gather(1, ids[0, start:, None])[:, 0] - entropy).sum())
        variance += float(((surprise.neg().exp() * surprise**2).sum(-1) - entropy**2).sum())
    return excess / variance**0.5


@pytest.fixture(scope="module")
def alone(engine):
    """Case -> its response where it is the only request."""
    return {case: sample(engine, [case])[0][0] for case in CASES + LONG}


@pytest.mark.parametrize("order", [1, -1], ids=["as_listed", "reversed"])
def test_seeded_request_is_the_same_in_any_batch(engine, alone, order):
    cases = CASES[::order]
    rollouts, observed = sample(engine, cases)
    for case, rollout in zip(cases, rollouts, strict=True):
        assert outcome(rollout) == outcome(alone[case])
    assert observed["verified"] == sum(rollout.counts.num_drafts for rollout in rollouts)
    assert observed["moved"] > 0, "no row of the batch was filled from behind"
    assert (observed["mispaired"], observed["resumed"]) == (0, [])


def test_preemption_between_draft_and_verification_keeps_the_distribution(engine, alone, policy):
    """A preempted request loses the draft that it had, and the random numbers of that draft with it: its tokens are
    those it gets alone up to there, and other samples of the same distribution after."""
    rollouts, observed = sample(engine, LONG)
    assert observed["resumed"], "the cache held every request: none was preempted"
    same = {case: case.max_tokens for case in LONG}
    for request, num_tokens in reversed(observed["resumed"]):
        same[LONG[int(request.split("-")[0])]] = num_tokens
    assert min(same.values()) > 20
    for case, rollout in zip(LONG, rollouts, strict=True):
        assert rollout.token_ids[: same[case]] == alone[case].token_ids[: same[case]]
        assert len(rollout.token_ids) == case.max_tokens
        if same[case] == case.max_tokens:
            assert rollout.counts == alone[case].counts
    assert observed["verified"] > 200
    assert observed["mispaired"] == 0
    assert abs(excess_surprise(policy, rollouts)) < 4


def test_one_token_prompts_leave_other_draft_probabilities_unchanged(engine, alone):
    """vLLM 0.31.0 pads such a prompt with drafts of -1: as it came, it then forgets q of the whole batch."""
    running = LONG[:3]
    joining = [Case((1,), 20 + i, 6) for i in range(9)]
    rollouts, observed = sample(engine, running + joining, apart_s=0.02)
    assert observed["padded"] > 0
    assert (observed["mispaired"], observed["resumed"]) == (0, [])
    for case, rollout in zip(running, rollouts[:3], strict=True):
        assert outcome(rollout) == outcome(alone[case])
    assert all(len(rollout.token_ids) == 6 for rollout in rollouts[3:])


def test_these_checks_notice_drafts_that_are_paired_with_another_request(engine, alone, policy):
    rollouts, observed = sample(engine, LONG, mispair=True)
    assert observed["mispaired"] > 0.9 * observed["verified"]
    assert all(outcome(rollout) != outcome(alone[case]) for case, rollout in zip(LONG, rollouts, strict=True))
    assert excess_surprise(policy, rollouts) > 4
