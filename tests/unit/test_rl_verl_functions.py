"""verl's own functions, as a run configures them, on inputs whose right answers are known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")


def test_group_advantages_are_zero_without_spread_and_normalised_with_it():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from bebop.rl.trainer import advantage

    rewards = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0]).unsqueeze(1)
    groups = np.array(["a"] * 4 + ["b"] * 4, dtype=object)
    advantages, _ = get_adv_estimator_fn(advantage.NAME)(rewards, torch.ones(8, 1), groups)
    assert advantages[:4].flatten().tolist() == [0.0] * 4
    assert advantages[4:].flatten().tolist() == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_importance_weights_are_truncated_at_the_cap_and_finite():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    ratio = torch.tensor([[math.log(10), math.log(0.1)], [1000.0, -1000.0]])
    weights, _ = compute_rollout_correction_weights(
        ratio, torch.ones(2, 2), rollout_is="token", rollout_is_threshold=2.0
    )
    assert weights[0].tolist() == pytest.approx([2.0, 0.1], abs=1e-5)
    assert torch.isfinite(weights).all() and weights.max() <= 2.0
    whole, _ = compute_rollout_correction_weights(
        ratio, torch.ones(2, 2), rollout_is="sequence", rollout_is_threshold=2.0
    )
    assert whole[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)  # 10 times .1


def test_entropy_is_taken_at_the_sampling_temperature():
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    def at(temperature: float) -> float:
        logits = torch.tensor([[2.0, 1.0, 0.0]])
        scaled = _scale_logits_by_temperature(
            logits, torch.tensor([[temperature]]), is_unit_temperature=temperature == 1
        )
        return entropy_from_logits(scaled).item()

    assert at(1.0) == pytest.approx(0.8324, abs=1e-4)
    assert at(0.5) == pytest.approx(0.4411, abs=1e-4)


def test_sampled_ids_are_trained_as_they_are(tiny_random: Path):
    """A text whose tokens would be others if it were encoded again must not be."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from bebop.data import load_tokenizer

    tokenizer = load_tokenizer(tiny_random)
    whole = tokenizer.encode("Answer", add_special_tokens=False)
    spelled = tokenizer.convert_tokens_to_ids(list("Answer"))
    assert tokenizer.encode(tokenizer.decode(spelled), add_special_tokens=False) == whole != spelled
    builder = create_continuous_token_builder(tokenizer)
    merged = builder.merge_assistant_tokens([7, 8], spelled)
    assert merged.token_ids == [7, 8, *spelled]
    mask, logprobs = builder.align_response_metadata(merged, [], [], assistant_logprobs=[-0.5] * len(spelled))
    assert len(mask) == len(logprobs) == len(spelled)


def test_prompts_are_encoded_as_every_stage_encodes_them(tiny_random: Path):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from bebop.data import encode_prompt, load_tokenizer
    from bebop.records import Prompt
    from bebop.rl.prompts import rows

    tokenizer = load_tokenizer(tiny_random)
    prompt = Prompt("chain_sum/0/0", "chain_sum", "Calculate the following: 4 + 7 =")
    builder = create_continuous_token_builder(tokenizer)
    assert builder.build_initial_tokens(rows([prompt])[0]["prompt"]) == encode_prompt(tokenizer, prompt)


def test_counts_of_a_response_in_segments_are_summed():
    from verl.workers.rollout.replica import TokenOutput

    from bebop.rl.rollout.agent import joined_fields

    def segment(tokens: int, version: int, accepted: list[int] | None) -> TokenOutput:
        fields: dict = {"global_steps": version}
        if accepted is not None:
            fields |= {"spec_num_draft_tokens": 6, "spec_num_verify_steps": 2}
            fields |= {"spec_num_accepted_tokens": sum(accepted), "spec_accepted_per_depth": accepted}
        return TokenOutput(token_ids=[1] * tokens, log_probs=[-1.0] * tokens, extra_fields=fields)

    joined = joined_fields([segment(2, 0, None), segment(4, 1, [2, 1, 0]), segment(3, 1, [1, 1, 1])])
    assert joined["spec_num_verify_steps"] == 4 and joined["spec_num_draft_tokens"] == 12
    assert joined["spec_num_accepted_tokens"] == 6 and joined["spec_accepted_per_depth"] == [3, 2, 1]
    assert joined["segments"] == [[2, 0], [4, 1], [3, 1]]  # what sampled the first two tokens stays version 0
    assert joined_fields([segment(2, 0, None)])["spec_num_verify_steps"] == 0
    before_its_first_draft = joined_fields([segment(1, 0, []), segment(3, 1, [1, 1, 1])])
    assert before_its_first_draft["spec_accepted_per_depth"] == [1, 1, 1]


class Queue:
    """Prompts that take a number of steps to be answered, in verl's own replay buffer; the queue alone is in memory."""

    def __init__(self, max_staleness: int, batch: int):
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

        self.step, self.batch, self.max_staleness = 0, batch, max_staleness
        self.rest: dict[str, int] = {}
        self.buffer = ReplayBufferAsync(
            trainer_mode="colocate_async",
            trainer_config={},
            max_off_policy_threshold=max_staleness + 1,
            max_off_policy_strategy="wait",
            sampler_kwargs={},
            poll_interval=0.0,
        )
        self.buffer._sync_metadata_from_transfer_queue = self.work
        self.since: dict[str, int] = {}

    def add(self, name: str, steps: int) -> None:
        self.rest[name] = steps
        self.since[name] = self.step

    def work(self) -> None:
        """A look at the queue; a step's worth of work is done between two looks."""
        for keys in (self.buffer.running_keys, self.buffer.finished_keys):
            keys.clear()
        for name in self.rest:
            self.rest[name] -= 1
            (self.buffer.finished_keys if self.rest[name] <= 0 else self.buffer.running_keys)["train"].add(name)
        self.buffer.prompt_global_steps["train"] = dict(self.since)

    def train(self) -> list[str]:
        keys, _ = self.buffer.wait_for_sampleable(self.step, "train", self.batch)
        chosen, _, _ = self.buffer._select_prompt_uids("train", keys, self.batch)
        for name in chosen:
            assert self.step - self.since[name] <= self.max_staleness
            del self.rest[name], self.since[name]
        return chosen


def test_long_prompt_is_trained_and_never_requeued():
    queue = Queue(max_staleness=2, batch=2)
    queue.step = 1
    queue.add("long", 9)
    for i in range(3):  # with the long one, two batches ahead, as a staleness of 2 allows
        queue.add(f"ahead{i}", 1)
    trained: list[str] = []
    for step in range(1, 21):
        queue.step = step
        for i in range(2):
            queue.add(f"{step}-{i}", 1)
        trained += queue.train()
    assert trained.index("long") < 2 * 4
    assert len(trained) == len(set(trained)) == 40


def test_another_verl_is_refused():
    from bebop.rl.verl.patches import PatchRefused, apply_all

    with pytest.raises(PatchRefused, match=r"verl 0\.9\.2 is installed.*0\.9\.1"):
        apply_all("0.9.2")


def test_cpu_is_a_verl_platform_and_patches_are_applied():
    import importlib.metadata

    from verl.utils import distributed
    from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, get_resource_name

    assert (get_device_name(), get_device_id(), get_resource_name()) == ("cpu", "cpu", "GPU")
    assert importlib.metadata.version("vllm").endswith("+cpu")
    # without gloo_once this would be "cpu:gloo,cpu:gloo", which torch refuses
    backend = f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend(backend))
    assert hasattr(distributed.initialize_global_process_group_ray, "_bebop_patch")


def test_ray_that_did_not_start_is_started_again(monkeypatch):
    import ray

    from bebop.rl.verl.patches import start_ray_again

    tries, failures = [], 2

    def init(**settings):
        tries.append(settings)
        if len(tries) <= failures:
            raise Exception("The current node timed out during startup.")
        return "started"

    monkeypatch.setattr(ray, "init", init)
    start_ray_again()
    assert ray.init(num_cpus=2) == "started" and tries == [{"num_cpus": 2}] * 3

    tries.clear()
    failures = 3
    with pytest.raises(Exception, match="timed out during startup"):
        ray.init()
