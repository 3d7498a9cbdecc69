"""Draft lengths that change with the batch, on the real engine: the distribution stays, the lengths are followed."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from bebop.config import RolloutSection
from bebop.doctor import exact
from bebop.engines import make_engine
from bebop.errors import EngineRefused
from bebop.policies import random_checkpoint
from bebop.records import Sampling

pytestmark = pytest.mark.e2e

VOCABULARY = 6
PROMPT = (1, 2, 3)
SCHEDULE = {"1-4": 3, "5-8": 1, "9+": 0}
LIMITS = {"max_num_seqs": 16, "max_model_len": 64, "kv_cache_gib": 0.25}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=VOCABULARY, seed=3)


@pytest.fixture(scope="module")
def engine(policy):
    with make_engine(RolloutSection(draft_schedule=SCHEDULE, **LIMITS), policy, seed=0) as engine:
        yield engine


def waves(engine, number, seed):
    """Responses of `number` waves of 1 to 8 requests of mixed lengths, one wave after the other."""
    draw = random.Random(seed)
    rollouts = []
    for _ in range(number):
        sampling = Sampling(temperature=0.7, max_tokens=draw.choice([3, 4, 6, 9]), ignore_eos=True, logprobs=False)
        rollouts += engine.generate([PROMPT] * draw.randint(1, 8), sampling)
    return rollouts


def test_crossing_thresholds_keeps_the_exact_distribution(engine, policy):
    engine.take_steps()
    with ThreadPoolExecutor(3) as pool:  # three streams of waves: the batch grows and shrinks all the time
        rollouts = [r for part in pool.map(lambda seed: waves(engine, 330, seed), range(3)) for r in part]
    crossings = [
        (before.drafts > 0, after.drafts > 0)
        for before, after in itertools.pairwise(engine.take_steps())
        if after.running > 1
    ]
    assert min(crossings.count((True, False)), crossings.count((False, True))) > 100
    counts = exact.tally((r.token_ids[: exact.LENGTH] for r in rollouts), VOCABULARY)
    p_value, _, _ = exact.chi_square(counts, exact.joint(policy, PROMPT, 0.7))
    assert counts.sum() > 4000
    assert p_value > 1e-3


@pytest.mark.parametrize(("batch", "k"), [(4, 3), (5, 1), (8, 1), (9, 0), (16, 0)])
def test_each_batch_drafts_as_its_range_says(engine, batch, k):
    before = engine.counts()
    engine.take_steps()
    rollouts = engine.generate([PROMPT] * batch, Sampling(max_tokens=24, ignore_eos=True))
    full = [step for step in engine.take_steps() if step.running == batch and not step.prompt_tokens]
    assert full
    if k == 0:
        assert all(step.drafts == 0 for step in full[1:])
        assert all(len(r.token_ids) == 24 for r in rollouts)
    else:
        # the last drafts of a batch that thins out may be longer, never shorter than the response has room for
        lengths = [r.counts.num_draft_tokens / r.counts.num_drafts for r in rollouts if r.counts.num_drafts]
        assert min(lengths) >= min(k, 1)
        assert any(step.drafts == batch for step in full)
        if k == 3:
            drafted = engine.counts().num_draft_tokens - before.num_draft_tokens
            assert drafted > 2 * (engine.counts().num_drafts - before.num_drafts)


def test_running_engine_changes_schedule_and_refuses_longer_drafts(engine, policy):
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    engine.set_draft_schedule({"1+": 0})
    before = engine.counts()
    engine.generate([PROMPT] * 3, sampling)
    assert engine.counts() == before
    engine.set_draft_schedule({"1+": 2})
    engine.generate([PROMPT] * 16, sampling)
    drafts = engine.counts().num_drafts - before.num_drafts
    assert drafts > 0
    assert engine.counts().num_draft_tokens - before.num_draft_tokens <= 2 * drafts
    with pytest.raises(EngineRefused, match="got 4 draft tokens"):
        engine.set_draft_schedule({"1+": 4})
    engine.set_draft_schedule(SCHEDULE)
