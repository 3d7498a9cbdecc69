"""What breaks in the torch engine ends those whom it concerns, and every caller hears of it."""

import asyncio
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from bebop.config import RolloutSection
from bebop.engines import make_engine
from bebop.errors import EngineDied, EngineError, EngineRefused
from bebop.policies import random_checkpoint
from bebop.records import Sampling

LIMITS = {"engine": "torch", "max_num_seqs": 8, "max_model_len": 128, "kv_cache_gib": 0.2}
TREE = {"tree_width": 3, "tree_depth": 3, "tree_budget": 7}
KINDS = {"chain": {}, "target_only": {"rule": "target_only"}, "rheo": {"tree": "rheo", **TREE}}
PROMPT, LONG = (1, 2, 3), (1, 2, 3) * 20
UP = "model.mtp_layers.0.mlp.up_proj.weight"
HEAD_BROKEN = "the draft head's state is not finite"
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=8, seed=1)


@pytest.fixture
def start(policy):
    """Engines, closed at the end of the test."""
    running = []

    def one(**kind):
        running.append(make_engine(RolloutSection(**LIMITS | kind), policy, seed=0))
        return running[-1]

    yield one
    for engine in running:
        engine.close()


def submit(engine, prompts, **sampling):
    """Requests that are admitted together, named 0, 1, ...; their futures."""
    settings = Sampling(**{"max_tokens": 30, "ignore_eos": True} | sampling)
    requests = [engine._request(prompt, replace(settings, seed=i), f"{i}") for i, prompt in enumerate(prompts)]
    engine._submit(requests)
    return [request.future for request in requests]


def admit(engine):
    """Have a paused engine take in what waits."""
    engine._ask(lambda: list(engine._rounds.admit(engine._admitted(), engine.version)))


def outcome(future):
    """ "length" and the like, or the error."""
    error = future.exception(timeout=30)
    return error if error is not None else future.result().finish_reason


def break_prefill(monkeypatch, engine, when):
    hidden = engine._policy.hidden

    def broken(tokens, *rest):
        if when(tokens):
            raise RuntimeError("boom")
        return hidden(tokens, *rest)

    monkeypatch.setattr(engine._policy, "hidden", broken)


# -- admission ----------------------------------------------------------------------------------------------------


def test_an_engine_that_breaks_in_admission_answers_every_request(start, monkeypatch):
    engine = start()
    break_prefill(monkeypatch, engine, lambda tokens: True)
    # texts of other lengths are admitted group by group: the first group raises, the second was never reached
    found = [outcome(future) for future in submit(engine, [LONG, PROMPT])]
    assert [(type(error), str(error)) for error in found] == [(EngineDied, "the torch engine died: boom")] * 2


def test_finished_requests_are_answered_before_a_later_error(start, monkeypatch):
    engine = start()
    break_prefill(monkeypatch, engine, lambda tokens: tokens.shape[1] < 10)
    long, short = submit(engine, [LONG, PROMPT], max_tokens=1)
    assert outcome(long) == "length"
    assert isinstance(outcome(short), EngineDied)


# -- states of the head -------------------------------------------------------------------------------------------


def spoil(monkeypatch, engine, when):
    """NaN in the head's output for the requests `when` names, given the pass's tokens and window."""
    draft_state = engine._policy.draft_state

    def spoilt(state, tokens, positions, window):
        out = draft_state(state, tokens, positions, window)
        for slot in when(tokens, window):
            out[slot] = torch.nan
        return out

    monkeypatch.setattr(engine._policy, "draft_state", spoilt)


@each_kind
def test_broken_head_state_after_a_prompt_fails_only_its_request(start, monkeypatch, kind):
    undisturbed = [future.result(30).token_ids for future in submit(start(**kind), [PROMPT] * 3)]
    engine = start(**kind)
    spoil(monkeypatch, engine, lambda tokens, window: [1] if window.causal and len(tokens) == 3 else [])
    first, bad, last = submit(engine, [PROMPT] * 3)
    assert str(outcome(bad)) == f"request 1: {HEAD_BROKEN}"
    assert [first.result(30).token_ids, last.result(30).token_ids] == undisturbed[::2]


@each_kind
def test_broken_state_inside_a_draft_fails_only_its_request(start, monkeypatch, kind):
    undisturbed = [future.result(30).token_ids for future in submit(start(**kind), [PROMPT] * 3)]
    engine = start(**kind)
    drafter, spoilt = engine._rounds.drafter, []
    deeper = drafter._deeper

    def once(states, tokens, depth, *rest):
        out = deeper(states, tokens, depth, *rest)
        if len(out) == 3 and not spoilt:
            spoilt.append(depth)
            out[1, -1, 5] = torch.inf
        return out

    monkeypatch.setattr(drafter, "_deeper", once)
    first, bad, last = submit(engine, [PROMPT] * 3)
    assert str(outcome(bad)) == f"request 1: {HEAD_BROKEN} after a draft token"
    assert [first.result(30).token_ids, last.result(30).token_ids] == undisturbed[::2]


@each_kind
def test_nan_embedding_fails_its_requests_and_the_engine_continues(start, policy, kind):
    engine = start(**kind)
    engine._policy.embedding[7] = torch.nan
    found = [outcome(future) for future in submit(engine, [PROMPT] * 6, max_tokens=60)]
    assert any(isinstance(one, EngineError) for one in found)
    for place, one in enumerate(found):
        assert one == "length" or str(one).startswith(f"request {place}: ")
    engine._policy.embedding[7] = load_file(policy / "model.safetensors")["model.embed_tokens.weight"][7]
    assert [outcome(future) for future in submit(engine, [PROMPT, LONG])] == ["length"] * 2


@each_kind
def test_bad_update_fails_running_requests_until_the_next_update(start, policy, kind):
    engine = start(**kind)
    good = load_file(policy / "model.safetensors")[UP]
    engine.pause("keep")
    running = submit(engine, [PROMPT, LONG])
    admit(engine)
    engine.update_weights({UP: torch.full_like(good, 3e38)}, version=1)
    # answered by the update itself: nothing samples yet
    assert [str(outcome(future)) for future in running] == [f"request {i}: {HEAD_BROKEN}" for i in range(2)]
    engine.resume()
    assert str(outcome(submit(engine, [PROMPT])[0])) == f"request 0: {HEAD_BROKEN}"
    engine.update_weights({UP: good}, version=2)
    assert outcome(submit(engine, [PROMPT])[0]) == "length"


def test_an_update_that_breaks_the_backbone_names_the_target(start, policy):
    engine = start()
    name = "model.layers.0.mlp.up_proj.weight"
    engine.pause("keep")
    running = submit(engine, [PROMPT])
    admit(engine)
    engine.update_weights({name: torch.full_like(load_file(policy / "model.safetensors")[name], 3e38)}, version=1)
    assert "target row 0, after position" in str(outcome(running[0]))


# -- one request's parameters -------------------------------------------------------------------------------------


EXTREME = [{"top_k": 2**63}, {"temperature": 1e-46}, {"temperature": 2e-45}, {"temperature": 3e38}, {"top_p": 1e-45}]


@pytest.mark.parametrize("values", EXTREME, ids=str)
@each_kind
def test_extreme_parameters_are_served(start, kind, values):
    assert outcome(submit(start(**kind), [PROMPT], max_tokens=9, **values)[0]) == "length"


# -- cancelled while paused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("admitted", [True, False], ids=["admitted", "waiting"])
def test_a_request_cancelled_in_a_pause_frees_its_name(start, admitted):
    engine = start()
    sampling = Sampling(max_tokens=100, ignore_eos=True)

    async def story():
        engine.pause("keep")
        gone = asyncio.ensure_future(engine.agenerate(PROMPT, sampling, "a"))
        await asyncio.sleep(0)
        if admitted:
            admit(engine)
        gone.cancel()
        await asyncio.sleep(0)
        again = asyncio.ensure_future(engine.agenerate(LONG, Sampling(max_tokens=5, ignore_eos=True), "a"))
        await asyncio.sleep(0)
        # the name is the second's now
        with pytest.raises(EngineRefused, match="request_id: got 'a'"):
            await engine.agenerate(PROMPT, sampling, "a")
        await asyncio.to_thread(engine.resume)
        return await again

    rollout = asyncio.run(story())
    assert (rollout.prompt_ids, len(rollout.token_ids)) == (LONG, 5)
    assert engine._unsettled == {}
