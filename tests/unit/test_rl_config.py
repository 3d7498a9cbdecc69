"""A GrpoConfig becomes verl's own config, and what verl would misread is one line before anything loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from bebop.config import GrpoConfig, check
from bebop.errors import ConfigError
from bebop.policies import random_checkpoint
from bebop.rl.stage import reason, told
from bebop.rl.verl.config import Policy, compose, micro_batch, save


@pytest.fixture(scope="module")
def policy(tiny_random: Path) -> Policy:
    return Policy.read(tiny_random)


def grpo_config(**sections: dict) -> GrpoConfig:
    values: dict = {
        "model": {"name": "tiny"},
        "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 64, "max_response_tokens": 64},
        "rollout": {"max_model_len": 128},
        "trainer": {},
        "grpo": {"steps": 3, "prompts_per_step": 4, "group_size": 2},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return check("grpo", values)


def test_every_section_reaches_verl_under_its_own_keys(policy: Policy, tmp_path: Path):
    verl = compose(grpo_config(grpo={"lr": 3e-4, "kl_coef": 0.1}, rollout={"temperature": 0.7}), policy, tmp_path)
    actor, rollout = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout
    assert (actor.optim.lr, actor.use_kl_loss, actor.kl_loss_coef) == (3e-4, True, 0.1)
    assert (rollout.n, rollout.temperature, rollout.load_format) == (2, 0.7, "auto")
    assert verl.data.train_batch_size == actor.ppo_mini_batch_size == 4
    assert verl.trainer.total_training_steps == 3
    assert verl.algorithm.adv_estimator == "bebop_grpo"
    assert verl.trainer.device == "cpu"


def test_speculation_is_always_explicit(policy: Policy, tmp_path: Path):
    def drafting(rule: str) -> str:
        verl = compose(grpo_config(rollout={"rule": rule}), policy, tmp_path)
        assert verl.actor_rollout_ref.model.mtp.enable_rollout
        return verl.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.draft_sample_method

    assert drafting("rejection") == "probabilistic"
    assert drafting("target_only") == "greedy"
    plain = compose(grpo_config(rollout={"speculation": "none"}), policy, tmp_path)
    assert not plain.actor_rollout_ref.model.mtp.enable
    assert "speculative_config" not in plain.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_a_draft_schedule_reaches_verls_engine(policy: Policy, tmp_path: Path):
    schedule = {"1-2": 3, "4+": 0}
    verl = compose(grpo_config(rollout={"draft_schedule": schedule, "max_num_seqs": 8}), policy, tmp_path)
    told = verl.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config
    assert told.num_speculative_tokens_per_batch_size == [[1, 2, 3], [4, 8, 0]]
    assert verl.bebop.mixed_lengths and verl.bebop.rule == "rejection, k by batch 1-2:3 4+:0"
    fixed = compose(grpo_config(), policy, tmp_path)
    assert not fixed.bebop.mixed_lengths
    assert (
        "num_speculative_tokens_per_batch_size"
        not in fixed.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config
    )


@pytest.mark.parametrize(("correction", "level"), [("token", "token"), ("sequence", "sequence")])
def test_importance_correction_and_its_cap_reach_verl(policy: Policy, tmp_path: Path, correction: str, level: str):
    trainer = {"importance_correction": correction, "importance_cap": 3.0}
    verl = compose(grpo_config(trainer=trainer), policy, tmp_path).algorithm.rollout_correction
    assert (verl.rollout_is, verl.rollout_is_threshold, verl.bypass_mode) == (level, 3.0, False)


def test_samples_are_waited_for_never_dropped(policy: Policy, tmp_path: Path):
    verl = compose(grpo_config(trainer={"max_staleness": 2}), policy, tmp_path).trainer.v1
    assert verl.trainer_mode == "bebop_colocate_async"
    assert (verl.sampler.max_off_policy_threshold, verl.sampler.max_off_policy_strategy) == (3, "wait")
    assert verl.colocate_async.num_warmup_batches == 2
    sync = compose(grpo_config(trainer={"mode": "sync", "importance_correction": "none"}), policy, tmp_path)
    assert sync.trainer.v1.trainer_mode == "bebop_sync"
    assert sync.algorithm.rollout_correction.rollout_is is None


def test_async_without_a_correction_is_refused():
    with pytest.raises(ConfigError, match=r"importance_correction: got none.*token or sequence"):
        grpo_config(trainer={"importance_correction": "none"})


def test_verl_keys_go_on_top_of_ours(policy: Policy, tmp_path: Path):
    given = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.optim.lr=0.5"]
    actor = compose(grpo_config(grpo={"verl_overrides": given}), policy, tmp_path).actor_rollout_ref.actor
    assert (actor.clip_ratio_high, actor.optim.lr) == (0.28, 0.5)


def test_verl_keys_are_added_and_deleted_in_hydras_grammar(policy: Policy, tmp_path: Path):
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    given = [f"+{key}.seed=7", f"++{key}.names=[a,'b c']", "~trainer.resume_from_path", f"+{key}.more={{x:1.5,y:null}}"]
    verl = compose(grpo_config(grpo={"verl_overrides": given}), policy, tmp_path)
    told = verl.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert (told.seed, told.names, told.more) == (7, ["a", "b c"], {"x": 1.5, "y": None})
    assert "resume_from_path" not in verl.trainer
    with pytest.raises(ConfigError, match=r"grpo\.verl_overrides: .*") as caught:
        compose(grpo_config(grpo={"verl_overrides": ["trainer.nnodes=[1"]}), policy, tmp_path)
    assert "\n" not in str(caught.value)


def test_users_verl_config_is_checked_and_completed(tmp_path: Path):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from bebop.rl.verl.config import complete

    (verl,) = importlib.util.find_spec("verl").submodule_search_locations

    def users(*words: str):
        with initialize_config_dir(f"{verl}/trainer/config", version_base=None):
            return hydra_compose("ppo_trainer", ["hydra.searchpath=[pkg://bebop.rl]", *words])

    own = users("+verl=[base,cpu]", "reward.custom_reward_function.path=/mine.py", "bebop.watchdog_s=9")
    done = complete(own)
    assert done.trainer.v1.trainer_mode == "bebop_colocate_async" and done.bebop.watchdog_s == 9
    assert done.actor_rollout_ref.model.mtp.enable_rollout and done.trainer.device == "cpu"
    assert done.reward.custom_reward_function.reward_kwargs.function == "/mine.py:compute_score"
    assert (done.bebop.probs_diff_limit, done.bebop.num_speculative_tokens) == (1e-4, 3)
    assert complete(done) == done
    with pytest.raises(ConfigError, match=r"no section bebop; add .*\+verl=base"):
        complete(users())
    with pytest.raises(ConfigError, match=r"lora_rank=8: .* not LoRA"):
        complete(users("+verl=base", "actor_rollout_ref.model.lora_rank=8"))


def test_unknown_verl_key_is_answered_with_the_nearest(policy: Policy, tmp_path: Path):
    wrong = grpo_config(grpo={"verl_overrides": ["actor_rollout_ref.actor.optim.lrr=1"]})
    with pytest.raises(ConfigError) as caught:
        compose(wrong, policy, tmp_path)
    assert str(caught.value) == (
        "verl has no key actor_rollout_ref.actor.optim.lrr; did you mean actor_rollout_ref.actor.optim.lr?"
    )


@pytest.mark.parametrize("key", ["lora_rank=8", "lora_adapter_path=/some/adapter", "lora.rank=8"])
def test_a_lora_policy_is_refused_by_its_key(policy: Policy, tmp_path: Path, key: str):
    word = f"actor_rollout_ref.model.{key}"
    with pytest.raises(ConfigError, match=f"^{word}: grpo trains whole policies"):
        compose(grpo_config(grpo={"verl_overrides": [word]}), policy, tmp_path)


def test_probability_limit_follows_the_type_of_the_policy(policy: Policy, tmp_path: Path):
    def limit(dtype: str, given: float | None = None) -> float:
        config = grpo_config(model={"dtype": dtype}, grpo={"probs_diff_limit": given})
        return compose(config, policy, tmp_path).bebop.probs_diff_limit

    assert (limit("float32"), limit("bfloat16"), limit("bfloat16", 0.5)) == (1e-4, 0.1, 0.5)


def test_checking_a_config_imports_neither_verl_nor_vllm():
    code = (
        "import sys, bebop.rl, bebop.rl.verl.config\n"
        "heavy = {'verl', 'vllm', 'ray', 'wandb', 'deepspeed', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature: got 0.0"),
        ({"rollout": {"rule": "block"}}, "rollout.rule"),
        ({"data": {"max_response_tokens": 100}}, "rollout.max_model_len=128"),
    ],
)
def test_what_would_sample_another_policy_is_refused(policy: Policy, tmp_path: Path, section: dict, words: str):
    with pytest.raises(ConfigError) as caught:
        compose(grpo_config(**section), policy, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["qwen3_next", "glm4_moe", "llama"])
def test_any_family_with_heads_is_composed(model_type: str, tmp_path: Path):
    path = random_checkpoint(tmp_path / "policy", model_type=model_type, num_heads=4, linear_layers=False)
    verl = compose(grpo_config(), Policy.read(path), tmp_path)
    assert verl.actor_rollout_ref.model.mtp.enable_rollout
    assert verl.actor_rollout_ref.rollout.enable_prefix_caching


def test_linear_attention_on_cpu_needs_bfloat16_and_no_prefix_cache(tmp_path: Path):
    path = random_checkpoint(tmp_path / "policy", model_type="qwen3_5_text", num_heads=4, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"model\.dtype=float32.*set model\.dtype=bfloat16") as caught:
        compose(grpo_config(), Policy.read(path), tmp_path)
    assert "\n" not in str(caught.value)
    verl = compose(grpo_config(model={"dtype": "bfloat16"}), Policy.read(path), tmp_path)
    assert not verl.actor_rollout_ref.rollout.enable_prefix_caching


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp", r"actor\.strategy=fsdp, expected fsdp2"),
        ("actor_rollout_ref.rollout.quantization=fp8", r"quantization=fp8, expected None"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", r"data_parallel_size=2, expected 1"),
        ("trainer.nnodes=2", r"nnodes=2, expected 1"),
    ],
)
def test_policy_without_heads_is_refused_before_loading(policy: Policy, tmp_path: Path, given: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        compose(grpo_config(grpo={"verl_overrides": [given]}), policy, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "flash", "limit"), [("float32", False, 1e-2), ("bfloat16", True, 0.5)])
def test_a_gpu_has_limits_and_an_attention_of_its_own(policy: Policy, tmp_path: Path, monkeypatch, dtype, flash, limit):
    found = importlib.util.find_spec
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "flash_attn" else found(name))
    config = grpo_config(model={"dtype": dtype})
    composed = compose(config, policy, tmp_path, num_gpus=1)
    attention = composed.actor_rollout_ref.model.override_config.attn_implementation
    assert attention == ("flash_attention_2" if flash else "sdpa")
    assert composed.bebop.probs_diff_limit == limit
    assert compose(config, policy, tmp_path).bebop.probs_diff_limit == {"float32": 1e-4, "bfloat16": 0.1}[dtype]


def test_draft_deeper_than_the_head_names_both_numbers(policy: Policy, tmp_path: Path):
    import dataclasses

    trained = dataclasses.replace(policy, mtp_depth=3)
    with pytest.raises(ConfigError) as caught:
        compose(grpo_config(rollout={"num_speculative_tokens": 4}), trained, tmp_path)
    assert "num_speculative_tokens: got 4" in str(caught.value) and "=3" in str(caught.value)


def test_policy_without_heads_cannot_speculate(policy: Policy, tmp_path: Path):
    import dataclasses

    with pytest.raises(ConfigError, match="no MTP head"):
        compose(grpo_config(), dataclasses.replace(policy, mtp_layers=0), tmp_path)


@pytest.mark.parametrize("folder", ["plain", "it's", "a=1,b", "with space", "back\\slash", "quote'\\' end\\"])
def test_any_folder_name_passes_through_hydra(policy: Policy, tmp_path: Path, folder: str):
    from omegaconf import OmegaConf

    run_dir = tmp_path / folder
    verl = compose(grpo_config(), policy, run_dir)
    read = OmegaConf.load(save(verl, tmp_path / "verl.yaml"))
    assert read.bebop.run_dir == str(run_dir)


def test_micro_batches_divide_the_batch_and_bound_the_logits(policy: Policy):
    data = grpo_config().data
    assert micro_batch(128, data, 300) == 32
    assert micro_batch(12, data, 300) == 12
    assert micro_batch(128, data, 150_000) == 4
    assert micro_batch(7, data, 10**9) == 1


def test_workers_error_line_is_its_own_not_rays():
    """As Ray words it: whose error, where, what."""
    message = (
        "\x1b[36mray::WorkerDict.init_model()\x1b[39m (pid=1, ip=192.0.2.2, actor_id=ab, repr=<object at 0x7f>)\n"
        '  File "worker.py", line 36, in init_model\n    super().init_model()\n           ^^^^\n'
        "OSError: no file named model.safetensors found in directory here."
    )
    assert told(message) == "OSError: no file named model.safetensors found in directory here."
    assert told("") == "an error without a message"
    assert told("3 group(s) of responses failed: ValueError: x\nTraceback ...") == (
        "3 group(s) of responses failed: ValueError: x"
    )


def test_a_reward_function_under_verls_keys_runs_in_the_box(policy: Policy, tmp_path: Path):
    own = tmp_path / "my rewards.py"
    given = [f"reward.custom_reward_function.path='{own}'", "reward.custom_reward_function.name=mine"]
    boxed = compose(grpo_config(grpo={"verl_overrides": given}), policy, tmp_path).reward.custom_reward_function
    assert boxed.reward_kwargs.function == f"{own}:mine" and boxed.reward_kwargs.sealed
    assert (boxed.path, boxed.name) == ("pkg://bebop.rl.rollout.reward", "compute_score")
    config = grpo_config(grpo={"reward_function": "my_rewards:judge", "reward_sealed": False, "reward_timeout_s": 30})
    kwargs = compose(config, policy, tmp_path).reward.custom_reward_function.reward_kwargs
    assert (kwargs.function, kwargs.sealed, kwargs.timeout_s) == ("my_rewards:judge", False, 30)


def test_error_of_a_dead_engine_is_read_from_its_log(tmp_path: Path):
    log = tmp_path / "grpo.log"
    log.write_text(
        "(PolicyServer pid=1) (EngineCore pid=2) ERROR 12-01 [core.py:1] RuntimeError: Unexpected head dim size, 32\n"
        "(PolicyServer pid=1) (MainProcess pid=1) ERROR 12-01 [async_llm.py:1] vllm.EngineDeadError: EngineCore ...\n"
        "ray.exceptions.RayTaskError(EngineDeadError): ray::PolicyServer.generate()\n"
    )
    dead = "1 group(s) of responses failed: vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue"
    assert reason(dead, log) == "vLLM's engine died: RuntimeError: Unexpected head dim size, 32"
    assert reason("ValueError: x", log) == "ValueError: x"
    assert reason(dead, tmp_path / "none.log") == dead
