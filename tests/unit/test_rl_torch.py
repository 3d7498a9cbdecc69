"""GRPO over bebop's own engine: its config, its requests and answers in verl's terms, its gate; no process starts."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bebop.config import GrpoConfig, RolloutSection, check
from bebop.errors import ConfigError, RolloutFailed
from bebop.records import DraftCounts, Rollout, Sampling
from bebop.rl.verl.config import Policy, compose


@pytest.fixture(scope="module", autouse=True)
def verl_on_a_cpu():
    """verl reads its platform once, when it is first imported."""
    for name, value in {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}.items():
        os.environ.setdefault(name, value)
    from bebop.rl.verl import plugin

    plugin.register()


def grpo_config(**rollout: object) -> GrpoConfig:
    values: dict = {
        "model": {"name": "tiny"},
        "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 64, "max_response_tokens": 64},
        "rollout": {"engine": "torch", "max_model_len": 128, **rollout},
        "trainer": {},
        "grpo": {"steps": 3, "prompts_per_step": 4, "group_size": 2},
    }
    return check("grpo", values)


def test_rollout_section_reaches_the_server_and_record_names_tree(tiny_random, tmp_path):
    from omegaconf import OmegaConf

    config = grpo_config(tree="rheo", tree_width=3, tree_depth=5, tree_budget=11, tree_leads=1)
    verl = compose(config, Policy.read(tiny_random), tmp_path)
    rollout = verl.actor_rollout_ref.rollout
    assert rollout.name == "torch" and not rollout.free_cache_engine
    assert RolloutSection.model_validate(OmegaConf.to_container(rollout.custom)["bebop"]) == config.rollout
    assert "speculative_config" not in rollout.engine_kwargs.vllm
    assert verl.actor_rollout_ref.model.mtp.enable_rollout
    assert verl.bebop.num_speculative_tokens == 5
    assert verl.bebop.rule == "rheo tree of 11 nodes, 3 wide, 1 leads"
    chain = compose(grpo_config(rule="block"), Policy.read(tiny_random), tmp_path)
    assert (chain.bebop.num_speculative_tokens, chain.bebop.rule) == (3, "block")


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (
            {"engine": "vllm", "tree": "rheo"},
            r"tree: got rheo with rollout.engine=vllm.*set rollout.engine=torch",
        ),
        ({"tree": "topk", "speculation": "none"}, r"rollout.tree: got topk with rollout.speculation=none"),
        ({"tree": "rheo", "tree_leads": 4}, r"rollout.tree_leads: got 4, .* rollout.tree_width - 1 = 3"),
    ],
)
def test_a_tree_that_would_be_ignored_is_refused(rollout, words):
    with pytest.raises(ConfigError, match=words):
        grpo_config(**rollout)


def test_only_trees_may_be_deeper_than_the_trained_heads(tiny_random, tmp_path):
    import dataclasses

    trained = dataclasses.replace(Policy.read(tiny_random), mtp_depth=3)
    compose(grpo_config(tree="rheo", tree_depth=8, num_speculative_tokens=4), trained, tmp_path)
    with pytest.raises(ConfigError, match="num_speculative_tokens: got 4"):
        compose(grpo_config(num_speculative_tokens=4), trained, tmp_path)


def test_sampling_parameters_are_taken_over_or_refused_by_name():
    from bebop.rl.rollout.torch_server import sampling_of

    given = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    sampling = sampling_of(given, room=9)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.logprobs) == (0.7, 0, 9, True)
    assert sampling_of({**given, "max_tokens": 5}, room=9).max_tokens == 5
    assert sampling_of({**given, "max_new_tokens": 50}, room=9).max_tokens == 9
    assert sampling_of({**given, "logprobs": 0}, room=9).logprobs is False
    for wrong in ({"repetition_penalty": 1.1}, {"min_p": 0.1}):
        with pytest.raises(RolloutFailed, match=next(iter(wrong))):
            sampling_of({**given, **wrong}, room=9)


def test_a_prompt_gets_the_room_that_is_left():
    from bebop.rl.rollout.torch_server import room

    config = SimpleNamespace(max_model_len=128, prompt_length=64, response_length=64)
    assert [room(config, n) for n in (10, 64, 100)] == [64, 64, 28]
    with pytest.raises(RolloutFailed, match=r"128 tokens leaves no room in rollout.max_model_len=128"):
        room(config, 128)


def rollout(reason: str, tokens: int, version: int) -> Rollout:
    counts = DraftCounts(2, 32, (2, 1, 0)) if tokens else None
    return Rollout("r", (1,), (5,) * tokens, (-0.5,) * tokens, reason, (version,) * tokens, counts)


def test_aborted_responses_keep_their_counts_and_version():
    from bebop.rl.rollout.torch_server import token_output

    cut = token_output(rollout("abort", 3, version=4), version=5)
    assert cut.stop_reason == "aborted" and cut.token_ids == [5, 5, 5] and cut.log_probs == [-0.5] * 3
    assert cut.extra_fields["global_steps"] == 4
    assert cut.extra_fields["spec_accepted_per_depth"] == [2, 1, 0]
    assert (cut.extra_fields["spec_num_accepted_tokens"], cut.extra_fields["spec_num_verify_steps"]) == (3, 2)
    assert token_output(rollout("abort", 0, version=4), version=5).extra_fields == {"global_steps": 5}
    assert token_output(rollout("stop", 3, version=4), version=4).stop_reason == "completed"


class Engine:
    """An engine that answers when it is told to, or aborts."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.done = threading.Event()
        self.aborted = False

    async def agenerate(self, prompt_ids, sampling, request_id):
        self.asked.append(request_id)
        await asyncio.to_thread(self.done.wait)
        return rollout("abort" if self.aborted else "stop", 1, self.version)

    def pause(self, mode):
        assert mode == "abort"
        self.aborted = True
        self.done.set()

    def resume(self):
        self.aborted = False


def test_requests_between_abort_and_resume_wait_for_new_weights():
    from bebop.rl.rollout.torch_server import TorchServer

    async def story() -> None:
        config = SimpleNamespace(max_model_len=128, prompt_length=64, response_length=64, custom={})
        model = SimpleNamespace(path=Path())
        server = TorchServer(config=config, model_config=model, replica_rank=0, cuda_visible_devices="0")
        server.engine = engine = Engine()
        first = asyncio.ensure_future(server.generate([1], {}, "first"))
        await asyncio.sleep(0)
        await server.abort_all_requests()
        second = asyncio.ensure_future(server.generate([1], {}, "second", image_data=None))
        await server.sleep()
        assert (await first).stop_reason == "aborted" and engine.asked == ["first"] and not second.done()
        engine.version = 1
        await server.resume_generation()
        answer = await second
        assert answer.extra_fields["global_steps"] == 1 and answer.stop_reason == "completed"
        with pytest.raises(RolloutFailed, match="image_data"):
            await server.generate([1], {}, "third", image_data=[1])

    asyncio.run(story())


def test_replicas_of_one_run_sample_from_streams_of_their_own(tmp_path):
    from bebop.policies import random_checkpoint
    from bebop.rl.rollout.torch_server import TorchServer, replica_seed

    section = RolloutSection(engine="torch", max_num_seqs=8, max_model_len=32, kv_cache_gib=0.1)
    config = SimpleNamespace(custom={"bebop": section.model_dump()}, seed=3, dtype="float32")
    model = SimpleNamespace(path=random_checkpoint(tmp_path, vocab=8))

    def sampled(rank: int) -> list[tuple[int, ...]]:
        server = TorchServer(config=config, model_config=model, replica_rank=rank, cuda_visible_devices="")
        server._start()
        with server.engine as engine:
            rollouts = engine.generate([(1, 2, 3)] * 4, Sampling(max_tokens=20, ignore_eos=True))
        return [rollout.token_ids for rollout in rollouts]

    first, second = sampled(0), sampled(1)
    assert len({*first, *second}) == 8
    assert sampled(1) == second
    # nor do replicas of runs with seeds side by side
    assert len({replica_seed(seed, rank) for seed in range(8) for rank in range(8)}) == 64


def test_a_replica_tells_its_server_which_one_it_is(monkeypatch):
    from bebop.rl.rollout import torch_server

    async def at_once(value: object = None) -> object:
        return value

    class Server:
        given: dict

        def options(self, **_: object) -> Server:
            return self

        def remote(self, **given: object) -> SimpleNamespace:
            self.given = given
            return SimpleNamespace(launch_server=SimpleNamespace(remote=at_once))

    place = SimpleNamespace(remote=lambda _: at_once(("0" * 56, "0")))
    replica = torch_server.TorchReplica.__new__(torch_server.TorchReplica)
    replica.workers, replica.replica_rank = [SimpleNamespace(__ray_call__=place)], 1
    replica.config, replica.model_config, replica.server_class = "config", "model", Server()
    monkeypatch.setattr(torch_server.TorchReplica, "max_concurrency", 4, raising=False)
    asyncio.run(replica.launch_servers())
    assert replica.server_class.given["replica_rank"] == 1


def test_weights_go_over_whole():
    from bebop.rl.rollout.torch_rollout import TorchRollout

    class Remote:
        got: dict

        async def remote(self, path: str, version: int) -> None:
            from safetensors.torch import load_file

            self.got = {"version": version, **load_file(path)}

    there = TorchRollout.__new__(TorchRollout)
    there._server = SimpleNamespace(update_weights=Remote())
    pairs = {"model.embed_tokens.weight": torch.arange(6.0).reshape(2, 3), "model.norm.weight": torch.ones(3)}
    asyncio.run(there.update_weights(iter(pairs.items()), global_steps=7, base_sync_done=True))
    got = there._server.update_weights.got
    assert got.pop("version") == 7
    assert got.keys() == pairs.keys() and all(torch.equal(got[name], pairs[name]) for name in pairs)
