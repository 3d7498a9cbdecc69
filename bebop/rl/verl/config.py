"""A GrpoConfig as verl's config: verl's `ppo_trainer` composed by hydra, our values on it, the user's verl keys last.

The composing needs neither verl's nor vLLM's import, so that a mistyped verl key is answered before any model loads.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bebop.config import GrpoConfig, check_depth
from bebop.config.draft_schedule import vllm_ranges
from bebop.data.tasks import has_verifier
from bebop.engines.vllm_engine.rules import rule_methods
from bebop.errors import ConfigError
from bebop.registry import nearest
from bebop.verifiers import TASKS_FUNCTION

LOGITS_BUDGET = 2**27  # largest number of logits in one training micro-batch, a fp32 tensor of 512 MiB
BOXED_REWARD = Path(__file__).parents[1] / "rollout" / "reward.py"
LOOPBACK = "127.0.0.1"
NOT_OURS = {  # verl's key -> the one value under which weights and heads reach the engine; what to do otherwise
    "actor_rollout_ref.actor.strategy": ("fsdp2", "weights leave verl's FSDP2 engine only"),
    "actor_rollout_ref.rollout.quantization": (None, "the rollout would sample another policy than the one trained"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": ("naive", "other ways of the weights carry no heads"),
    "actor_rollout_ref.rollout.data_parallel_size": (1, "more GPUs already make more replicas"),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (1, "set tensor_model_parallel_size"),
    "trainer.nnodes": (1, "runs on several machines are not supported"),
}
# On on-policy samples, by the type that policies are loaded in. On a GPU vLLM's attention multiplies float32 as TF32,
# and of many bfloat16 tokens a few are far off: not measured on one yet, so there they only tell another policy.
PROBS_DIFF_LIMIT = {"float32": 1e-5, "bfloat16": 0.1}
PROBS_DIFF_LIMIT_GPU = {"float32": 1e-2, "bfloat16": 0.5}
POLL_INTERVAL_S = 0.05  # verl's replay buffer looks for finished groups this often; its default is 2 s


@dataclass(frozen=True)
class Policy:
    """What the composing needs to know of the policy directory. family: of its heads; None: unknown to bebop."""

    path: Path
    family: str | None
    vocab_size: int
    largest: int  # elements of its largest tensor
    linear_attention: bool  # in some of its layers
    mtp_layers: int
    mtp_depth: int | None  # depth that its heads were trained for; None: not recorded

    @classmethod
    def read(cls, path: Path) -> Policy:
        # these import transformers
        from bebop.mtp.checkpoint import num_mtp_layers, tensor_facts
        from bebop.mtp.families import decoder_config, known_family, mixes_linear_attention

        config_file = path / "config.json"
        if not config_file.exists():
            raise ConfigError(f"{path}: no config.json there; expected a Hugging Face directory with the policy")
        config = json.loads(config_file.read_text())
        provenance_file = path / "bebop.json"
        provenance = json.loads(provenance_file.read_text()) if provenance_file.exists() else {}
        family = known_family(config)
        return cls(
            path=path,
            family=family.name if family else None,
            vocab_size=decoder_config(config)["vocab_size"],
            largest=max(prod(shape) for shape, _ in tensor_facts(path).values()),
            linear_attention=mixes_linear_attention(config),
            mtp_layers=num_mtp_layers(path),
            mtp_depth=provenance.get("mtp_depth"),
        )


def compose(
    config: GrpoConfig, policy: Policy, run_dir: Path, *, num_gpus: int = 0, resume_from: Path | None = None
) -> DictConfig:
    """verl's config for this run; num_gpus 0 means the CPU. Raises ConfigError with one line."""
    check(config, policy, num_gpus=num_gpus)
    ours = overrides(config, policy, run_dir, num_gpus=num_gpus, resume_from=resume_from)
    words = [f"++{key}={literal(value)}" for key, value in ours.items()]
    composed = _compose([])
    known = list(_keys(composed)) + list(ours)
    for override in config.grpo.verl_overrides:
        _check_key(override, known)
    try:
        composed = _compose(words + list(config.grpo.verl_overrides))
    except Exception as error:  # hydra's own hierarchy; each means that the override cannot be applied
        raise ConfigError(f"grpo.verl_overrides: {_first_line(error)}") from None
    refuse_adapters(composed)
    _box_rewards(composed)
    for key, (allowed, advice) in NOT_OURS.items():
        if (value := OmegaConf.select(composed, key)) not in (allowed, None):
            raise ConfigError(f"grpo.verl_overrides: {key}={value}, expected {allowed}: {advice}")
    return composed


def _box_rewards(composed: DictConfig) -> None:
    """A reward function that was given under verl's own keys runs in the box too."""
    given = composed.reward.custom_reward_function
    if str(given.path) != str(BOXED_REWARD):
        given.reward_kwargs.function = f"{Path(given.path).resolve()}:{given.name}"
        given.path, given.name = str(BOXED_REWARD), "compute_score"


def check(config: GrpoConfig, policy: Policy, *, num_gpus: int) -> None:
    """Raise ConfigError on what verl or vLLM would do wrong without saying so."""
    rollout, data = config.rollout, config.data
    if policy.linear_attention and not num_gpus and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={config.model.dtype}: {policy.path} has linear-attention layers, which vLLM 0.31 runs in "
            "bfloat16 alone on a CPU; set model.dtype=bfloat16"
        )
    for task in data.tasks:
        if not has_verifier(task.name):
            raise ConfigError(f"data.tasks name={task.name}: has no verifier, so no reward; choose another task for RL")
    if rollout.speculation == "mtp":
        if not policy.mtp_layers:
            raise ConfigError(
                f"rollout.speculation=mtp: the policy in {policy.path} has no MTP head; set rollout.speculation=none"
            )
        if policy.mtp_depth:
            check_depth(rollout, policy.mtp_depth, "sft.depth")
        if rollout.rule == "block" and rollout.engine == "vllm":
            raise ConfigError(
                "rollout.rule=block: vLLM's V1 runner, which verl needs, drafts greedily; set rollout.rule=rejection"
            )
    rows = config.grpo.prompts_per_step * config.grpo.group_size
    if num_gpus and rows % num_gpus:
        raise ConfigError(f"grpo.prompts_per_step * grpo.group_size = {rows} is not a multiple of the {num_gpus} GPUs")


def refuse_adapters(composed: DictConfig) -> None:
    """Raise ConfigError on a LoRA policy: its weights reach engines as adapters, which no head was trained beside."""
    for key, off in (
        ("lora_rank", "0"),
        ("lora_adapter_path", "null"),
        ("lora.rank", "0"),
        ("lora.adapter_path", "null"),
    ):
        value = OmegaConf.select(composed, f"actor_rollout_ref.model.{key}")
        if value:
            raise ConfigError(
                f"actor_rollout_ref.model.{key}={value}: grpo trains whole policies, not LoRA adapters; expected {off}"
            )


def overrides(
    config: GrpoConfig, policy: Policy, run_dir: Path, *, num_gpus: int, resume_from: Path | None
) -> dict[str, Any]:
    """verl key -> value, by section of our config."""
    on_cpu = num_gpus == 0
    half = config.model.dtype != "float32"  # the one kind that flash_attn's kernels take
    flash = not on_cpu and half and importlib.util.find_spec("flash_attn") is not None
    grpo, data, rollout, trainer = config.grpo, config.data, config.rollout, config.trainer
    micro = micro_batch(grpo.prompts_per_step * grpo.group_size // max(num_gpus, 1), data, policy.vocab_size)
    full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    bytes_of_largest = 4 * policy.largest
    keys: dict[str, Any] = {
        # data: prompts in their written order, each once
        "data.train_files": str(run_dir / "prompts.parquet"),
        "data.val_files": str(run_dir / "prompts.parquet"),
        "data.val_max_samples": 1,
        "data.shuffle": False,
        "data.seed": config.seed,
        "data.dataloader_num_workers": 0,
        "data.train_batch_size": grpo.prompts_per_step,
        "data.max_prompt_length": data.max_prompt_tokens,
        "data.max_response_length": data.max_response_tokens,
        "data.truncation": "error",
        # policy
        "actor_rollout_ref.model.path": str(policy.path),
        "actor_rollout_ref.model.use_remove_padding": flash,
        "actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2" if flash else "sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing": not on_cpu,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": grpo.lr,
        # Adam's first step moves every weight by the whole rate, whatever the gradient's noise
        "actor_rollout_ref.actor.optim.lr_warmup_steps": min(3, grpo.steps // 10),
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.optim.override_optimizer_config": {"eps": grpo.adam_eps},
        "actor_rollout_ref.actor.ppo_mini_batch_size": grpo.prompts_per_step,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.actor.use_kl_loss": grpo.kl_coef > 0,
        "actor_rollout_ref.actor.kl_loss_coef": grpo.kl_coef,
        "actor_rollout_ref.actor.data_loader_seed": config.seed,
        "actor_rollout_ref.actor.use_torch_compile": not on_cpu,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": not on_cpu,
        "actor_rollout_ref.actor.fsdp_config.seed": config.seed,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        # rollouts
        "actor_rollout_ref.rollout.name": rollout.engine,
        "actor_rollout_ref.rollout.n": grpo.group_size,
        "actor_rollout_ref.rollout.temperature": rollout.temperature,
        "actor_rollout_ref.rollout.seed": config.seed,
        "actor_rollout_ref.rollout.dtype": config.model.dtype,
        "actor_rollout_ref.rollout.max_model_len": rollout.max_model_len,
        "actor_rollout_ref.rollout.max_num_seqs": rollout.max_num_seqs,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.rollout.load_format": "auto",  # verl's default, dummy, leaves the drafter random for ever
        "actor_rollout_ref.rollout.gpu_memory_utilization": rollout.gpu_memory_utilization,
        "actor_rollout_ref.rollout.agent.num_workers": 1  # in the trainer's process
        if on_cpu
        else min(8, grpo.prompts_per_step),
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "bebop.rl.rollout.agent.AgentLoopManager",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": max(
            16 if on_cpu else 1024, bytes_of_largest // 2**20 + 1
        ),
        # algorithm
        "algorithm.adv_estimator": "bebop_grpo",  # see bebop.rl.trainer.advantage
        "algorithm.rollout_correction.rollout_is": (
            None if trainer.importance_correction == "none" else trainer.importance_correction
        ),
        "algorithm.rollout_correction.rollout_is_threshold": trainer.importance_cap,
        "reward.num_workers": 0 if on_cpu else 8,  # 0: in the agent loop's own process
        "reward.custom_reward_function.path": str(BOXED_REWARD),
        "reward.custom_reward_function.name": "compute_score",
        "reward.custom_reward_function.reward_kwargs": {
            "function": grpo.reward_function or TASKS_FUNCTION,
            "sealed": grpo.reward_sealed,
            "timeout_s": grpo.reward_timeout_s,
        },
        # loop
        "trainer.v1.trainer_mode": f"bebop_{trainer.mode}",
        "trainer.v1.colocate_async.num_warmup_batches": trainer.max_staleness,
        # verl counts the versions a sample may span; waiting, not dropping, trains every prompt once
        "trainer.v1.sampler.max_off_policy_threshold": trainer.max_staleness + 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
        "trainer.device": "cpu" if on_cpu else "cuda",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": max(num_gpus, 1),
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": grpo.steps,
        "trainer.save_freq": grpo.save_every,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": ["console"],
        "trainer.project_name": config.logger.project,
        "trainer.experiment_name": config.logger.name or run_dir.name,
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.resume_mode": "resume_path" if resume_from else "disable",
        "trainer.resume_from_path": str(resume_from) if resume_from else None,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # ours, read by bebop.rl.trainer.trainer alone
        "bebop.run_dir": str(run_dir),
        "bebop.policy_dir": str(policy.path),
        "bebop.speculation": rollout.speculation,
        "bebop.num_speculative_tokens": rollout.draft_depth,
        "bebop.rule": rollout.acceptance_rule,
        "bebop.mixed_lengths": rollout.draft_schedule is not None,
        "bebop.poll_interval_s": POLL_INTERVAL_S,
        "bebop.probs_diff_limit": grpo.probs_diff_limit
        or (PROBS_DIFF_LIMIT if on_cpu else PROBS_DIFF_LIMIT_GPU)[config.model.dtype],
        "bebop.watchdog_s": grpo.watchdog_s,
        "bebop.reward_failures_limit": grpo.reward_failures_limit,
        "bebop.keep_checkpoints": grpo.keep_checkpoints,
        "bebop.wandb": config.logger.wandb,
    }
    if config.model.dtype == "float32":  # else the trainer computes in bf16 and the rollout's log-probs are 1e-2 off
        keys["actor_rollout_ref.actor.fsdp_config.mixed_precision"] = full
        keys["actor_rollout_ref.ref.fsdp_config.mixed_precision"] = full
    if rollout.speculation == "mtp":
        keys |= {
            "actor_rollout_ref.model.mtp.enable": True,
            "actor_rollout_ref.model.mtp.enable_rollout": True,
            "actor_rollout_ref.model.mtp.method": "mtp",
            "actor_rollout_ref.model.mtp.num_speculative_tokens": rollout.draft_depth,
        }
    if rollout.engine == "torch":
        keys |= {
            "actor_rollout_ref.rollout.custom": {"bebop": rollout.model_dump(mode="json")},
            "actor_rollout_ref.rollout.free_cache_engine": False,  # the engine keeps its memory between steps
        }
    elif rollout.speculation == "mtp":
        keys |= {
            # always explicit: vLLM's default drafts greedily
            "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.draft_sample_method": (
                rule_methods(rollout)[0]
            ),
            "actor_rollout_ref.rollout.engine_kwargs.vllm.per_request_spec_decode_metrics": "summary",
        }
        if rollout.draft_schedule:
            keys[
                "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.num_speculative_tokens_per_batch_size"
            ] = vllm_ranges(rollout.draft_schedule, rollout.max_num_seqs)
    if on_cpu:
        keys |= {
            "actor_rollout_ref.rollout.enforce_eager": True,
            "actor_rollout_ref.rollout.free_cache_engine": False,
            "actor_rollout_ref.rollout.enable_sleep_mode": False,
            "ray_kwargs.ray_init.num_gpus": 1,  # logical
            "ray_kwargs.ray_init.num_cpus": 16,  # logical: actors are counted, not measured
            "ray_kwargs.ray_init.object_store_memory": 512 * 2**20,
        }
        if rollout.engine == "vllm":
            keys |= {
                "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30),
                "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "uni",
            }
    if policy.linear_attention:  # vLLM 0.31 caches prefixes of such layers at block bounds alone
        keys["actor_rollout_ref.rollout.enable_prefix_caching"] = False
    keys["ray_kwargs.ray_init.include_dashboard"] = False
    # One machine: Ray, TransferQueue, verl's servers and the process groups follow the node's address. None of them
    # asks who connects, so nothing may listen on another interface. See also bebop.rl.environment and patches.py.
    keys["ray_kwargs.ray_init._node_ip_address"] = LOOPBACK
    return keys


def micro_batch(rows: int, data: Any, vocab_size: int) -> int:
    """Largest divisor of `rows` whose padded logits stay within LOGITS_BUDGET, at most 32."""
    limit = min(32, LOGITS_BUDGET // (vocab_size * (data.max_prompt_tokens + data.max_response_tokens)))
    return next(size for size in range(max(1, min(rows, limit)), 0, -1) if rows % size == 0)


def literal(value: Any) -> str:
    """A value in the grammar of hydra's overrides; strings always quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    text = re.sub(r"(\\*)'", r"\1\1\\'", str(value))
    text = re.sub(r"(\\+)$", r"\1\1", text)
    return f"'{text}'"


def save(composed: DictConfig, path: Path) -> Path:
    """Write the composed config with its interpolations."""
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(composed, path)
    return path


def _compose(words: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed: run ./launch.sh setup")
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return hydra_compose("ppo_trainer", overrides=words)


def _check_key(override: str, known: list[str]) -> None:
    key = override.split("=", 1)[0].strip()
    if "=" not in override and not key.startswith("~"):
        raise ConfigError(f"grpo.verl_overrides: {override!r} came, expected <key>=<value>")
    if key.startswith("+"):  # verl's own recipes add keys to its free mappings this way
        return
    name = key.lstrip("~")
    if name not in known:
        like = nearest(name, [key for key in known if key.count(".") == name.count(".")])
        raise ConfigError(f"verl has no key {name}" + (f"; did you mean {like}?" if like else ""))


def _keys(node: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    if isinstance(node, DictConfig):
        for key in node:
            name = f"{prefix}{key}"
            names.append(name)
            if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node._get_node(key)):
                names += _keys(node._get_node(key), f"{name}.")
    return names


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
