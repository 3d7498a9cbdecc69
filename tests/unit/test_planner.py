"""The planner's arithmetic: what a step is worth, which steps count, and when drafting does not pay."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.bench.rollout import plot as plan_plot
from bebop.bench.rollout import probe as probe_module
from bebop.bench.rollout.planner import (
    MARGIN,
    acceptance,
    acceptance_lengths,
    choose,
    floor_s,
    full_steps,
    schedule,
    verdict,
)
from bebop.bench.rollout.probe import difference, memory_bytes_per_s, weight_bytes
from bebop.engines.protocol import Step
from bebop.policies import random_checkpoint
from bebop.records import DraftCounts, Sampling

RATES = (0.6, 0.3, 0.1)


def test_acceptance_length_is_one_plus_the_first_k_rates():
    assert acceptance_lengths(RATES) == pytest.approx((1.0, 1.6, 1.9, 2.0))


def test_drafts_of_every_length_tell_about_the_depths_they_reach():
    counts = {1: (100, (50,)), 2: (100, (70, 30)), 3: (200, (120, 70, 20))}
    assert acceptance(counts) == pytest.approx((240 / 400, 100 / 300, 20 / 200))
    with pytest.raises(ValueError, match="no draft of 2 tokens"):
        acceptance({1: (10, (5,)), 2: (0, (0, 0))})


def test_choice_maximises_speed_and_is_zero_without_gain():
    step_s = {1: (0.100, 0.110, 0.120, 0.150), 64: (0.5, 0.9, 1.2, 1.6), 8: (0.10, 0.15, 0.185, 0.22)}
    choices = choose(step_s, {1: 0.098, 8: 0.10, 64: 0.5}, RATES)
    assert [(choice.batch_size, choice.k) for choice in choices] == [(1, 2), (8, 1), (64, 0)]
    assert choices[0].tokens_per_s == pytest.approx([1 / 0.1, 1.6 / 0.11, 1.9 / 0.12, 2.0 / 0.15])
    assert choices[0].speedup == pytest.approx(1.9 / 0.12 * 0.098)
    assert choices[2].speedup == pytest.approx(1.0)


@pytest.mark.parametrize(("gain", "k"), [(MARGIN / 2, 0), (MARGIN * 2, 1)])
def test_a_gain_within_the_margin_is_left_alone(gain, k):
    (choice,) = choose({4: (1.0, 1.5 / (1 + gain))}, {4: 1.0}, (0.5,))
    assert choice.k == k


def test_gain_must_also_beat_the_plain_engine():
    (choice,) = choose({4: (1.04, 1.4)}, {4: 1.0}, (0.44,))  # 1.44 / 1.4 beats 1 / 1.04, not 1 / 1.0
    assert (choice.k, choice.pays) == (0, False)


def _of_speeds(speeds, plain=1.0):
    """Step times of a batch of 1 at which k = 0, 1, .. make these tokens/s, with RATES."""
    lengths = acceptance_lengths(RATES[: len(speeds) - 1])
    return {1: tuple(length / speed for length, speed in zip(lengths, speeds, strict=True))}, {1: 1 / plain}


def test_fastest_k_is_chosen_if_k_0_is_slowest():
    (choice,) = choose(*_of_speeds((0.87, 1.031, 1.005, 0.952)), RATES)
    assert (choice.k, choice.pays) == (1, False)
    assert "13%" in choice.reason
    assert schedule(*_of_speeds((0.87, 1.031, 1.005, 0.952)), RATES) == {1: 1}
    (choice,) = choose(*_of_speeds((0.9, 0.8, 0.7, 0.6)), RATES)
    assert (choice.k, choice.pays) == (0, False)
    (choice,) = choose(*_of_speeds((0.96, 1.04, 1.0, 0.9)), RATES)
    assert (choice.k, choice.pays) == (0, False), "k = 0 is as good as plain decoding, within the margin"


def test_verdict_says_whether_and_why_to_speculate():
    step_s, plain_s = _of_speeds((1.0, 1.2, 1.5, 1.4))
    (pays,) = choose(step_s, plain_s, RATES)
    (forced,) = choose(*_of_speeds((0.87, 1.031, 1.005, 0.952)), RATES)
    (none,) = choose(*_of_speeds((1.0, 0.9, 0.8, 0.7)), RATES)
    assert "1:2 2+:0" in verdict([pays, none], "1:2 2+:0")
    assert forced.reason in verdict([pays, forced], "1:2 2+:1")
    for nowhere in ([none], [forced, none]):
        assert "set rollout.speculation=none" in verdict(nowhere, "1+:0")


def test_step_times_between_measured_batch_sizes_are_interpolated():
    step_s, plain_s = {1: (1.0, 1.2), 8: (1.0, 1.9)}, {1: 1.0, 8: 1.0}
    found = schedule(step_s, plain_s, (0.5,))
    assert list(found) == list(range(1, 9))
    pays = [size for size in found if 1.5 / (1.2 + 0.1 * (size - 1)) >= 1 + MARGIN]
    assert pays == [1, 2, 3]
    assert [size for size, k in found.items() if k] == pays
    assert schedule({4: (1.0, 1.2)}, {4: 1.0}, (0.5,)) == {1: 1, 2: 1, 3: 1, 4: 1}


def steps(*entries):
    return [
        Step(ended_s=end, running=running, prompt_tokens=prompt, tokens=n, drafts=0)
        for end, running, prompt, n in entries
    ]


def test_only_steps_in_which_the_whole_batch_decodes_are_timed():
    # a prefill of two, then three steps of both, one of them with a new prompt, then one finishes
    window = full_steps(steps((0, 1, 9, 1), (1, 2, 9, 1), (3, 2, 0, 5), (4, 2, 0, 3), (9, 2, 7, 2), (10, 1, 0, 4)), 2)
    assert window.seconds == (2, 1)
    assert window.tokens == 8
    assert window.tokens_per_s == pytest.approx(8 / 3)
    assert window.step_s == 1.5
    with pytest.raises(ValueError, match="no step decoded 3 requests together, 2 at most"):
        full_steps(steps((0, 2, 0, 1), (1, 2, 0, 1)), 3)


def test_the_floor_counts_heads_and_lm_head_once_per_draft():
    weights = {"backbone": 100, "heads": 10, "lm_head": 30}
    floors = [floor_s(weights, 10.0, k, speculating=True) for k in range(4)]
    assert floors == [11.0, 14.0, 18.0, 22.0]
    assert floor_s(weights, 10.0, 0, speculating=False) == 10.0
    assert memory_bytes_per_s(2**20, 2) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_pass_bytes_leave_out_untied_embeddings(tmp_path, tied):
    half = torch.bfloat16
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4, dtype=half),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4, dtype=half),
        "model.mtp_layers.0.input_proj.weight": torch.zeros(4, 8, dtype=half),
    }
    if not tied:
        tensors["lm_head.weight"] = torch.zeros(10, 4, dtype=half)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert weight_bytes(tmp_path) == {"backbone": 32 + 80, "heads": 64, "lm_head": 80}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_expert_bytes_are_those_of_one_token(tmp_path, model_type):
    """Heads numbered on from the decoder's layers, or not; with copies of the policy's tables and a second MTP layer,
    which no engine reads."""
    policy = random_checkpoint(tmp_path, model_type=model_type, hidden_size=32, num_heads=4)
    tensors = load_file(policy / "model.safetensors")
    head = "mtp." if model_type == "qwen3_next" else "model.layers.2."
    expected = {"backbone": 0, "heads": 0}
    for name, tensor in tensors.items():
        if name == "model.embed_tokens.weight":
            continue
        share = 0.5 if ".experts." in name else 1  # 2 of 4
        expected["heads" if name.startswith(head) else "backbone"] += share * tensor.nbytes
    lm_head = tensors["lm_head.weight"].nbytes
    assert weight_bytes(policy) == {**expected, "lm_head": lm_head}
    assert expected["heads"] > 3 * 32 * 64 * 4
    if model_type == "qwen3_next":
        extra = {name.replace("layers.0.", "layers.1."): t for name, t in tensors.items() if ".layers.0." in name}
        extra = {name: tensor for name, tensor in extra.items() if name.startswith(head)}
    else:
        extra = {name.replace(head, "model.layers.3."): t for name, t in tensors.items() if name.startswith(head)}
        extra |= dict.fromkeys(
            (f"{head}embed_tokens.weight", f"{head}shared_head.head.weight"), tensors["lm_head.weight"]
        )
    save_file({name: tensor.clone() for name, tensor in (tensors | extra).items()}, policy / "model.safetensors")
    assert extra and weight_bytes(policy) == {**expected, "lm_head": lm_head}


def test_memory_is_timed_on_the_engines_device(monkeypatch):
    made = []
    ones = torch.ones
    monkeypatch.setattr(probe_module, "device_name", lambda: "cuda")
    monkeypatch.setattr(probe_module.torch, "ones", lambda n, device: made.append((n, device)) or ones(n))
    monkeypatch.setattr(probe_module.torch.cuda, "synchronize", lambda device: made.append(device))
    assert memory_bytes_per_s(2**16, 2) > 0
    assert made == [(2**16, "cuda"), *["cuda"] * 4], "each sum is waited for"


def test_counts_between_two_readings():
    after = DraftCounts(10, 30, (6, 3, 1))
    assert difference(after, DraftCounts()) == after
    assert difference(after, DraftCounts(4, 12, (2, 1, 0))) == DraftCounts(6, 18, (4, 2, 1))


def test_the_plot_marks_what_was_chosen(tmp_path):
    row = {"batch_size": 1, "k": 0, "speedup": 0.98, "chosen": False}
    table = [row, row | {"k": 1, "speedup": 1.4, "chosen": True}, row | {"k": "none", "speedup": 1.0}]
    table += [entry | {"batch_size": 8, "chosen": entry["k"] == 0} for entry in table]
    rings = [line for line in plan_plot.figure(table).axes[0].lines if line.get_markersize() == 12]
    assert sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in rings) == [(1, 1.4), (8, 0.98)]
    plan_plot.write(table, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_slow_pass_does_not_change_relative_step_times():
    from bebop.bench.rollout.planner import Window
    from bebop.bench.rollout.probe import relative_steps

    speed = (1.0, 3.0, 1.1, 1.0, 2.0)  # of the machine, by pass
    plain = [Window((0.1 * s, 0.1 * s, 0.4 * s), 3) for s in speed]
    drafting = [Window((0.15 * s,) * 4, 4) for s in speed]
    drafting[2] = Window((5.0,) * 4, 4)
    assert relative_steps(drafting, plain) == pytest.approx(1.5 * 0.11)


class SlowlyFilled:
    """An engine whose requests come in one by one on a busy machine: together only where responses are long."""

    def __init__(self, enough):
        self.enough, self.asked = enough, []

    def take_steps(self):
        if not self.asked or self.asked[-1] < self.enough:
            return steps((0, 1, 9, 1), (1, 1, 9, 1))
        return steps((0, 1, 9, 1), (1, 2, 9, 1), (3, 2, 0, 5))

    def generate(self, prompts, sampling):
        self.asked.append(sampling.max_tokens)


def test_probe_without_a_full_batch_repeats_with_longer_responses():
    engine = SlowlyFilled(enough=2 * probe_module.PROBE_TOKENS + 1)
    window = probe_module._timed(engine, [[1], [2]], Sampling())
    assert window.step_s == 2 and engine.asked == [20, 40, 60]
    with pytest.raises(ValueError, match="no step decoded 2 requests together"):
        probe_module._timed(SlowlyFilled(enough=10**6), [[1], [2]], Sampling())
