"""A GrpoConfig as verl's config. In order, the later over the earlier:

1. verl's own defaults (`ppo_trainer`, composed by hydra);
2. the fixed keys of base.yaml, command.yaml and, without GPUs, cpu.yaml;
3. the values that `computed` takes from bebop's config and the policy;
4. the user's verl keys (`grpo.verl_overrides`).

`complete` then checks the result. A user's own run of `verl.trainer.main_ppo` with base.yaml passes through it too.
Nothing here imports verl or vLLM, so that a mistyped key is reported before any model loads.
"""

from __future__ import annotations

import glob
import importlib.util
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from bebop.config import GrpoConfig, check_depth
from bebop.config.draft_schedule import vllm_ranges
from bebop.data.tasks import has_verifier
from bebop.engines.vllm_engine.rules import rule_methods
from bebop.errors import BadInput, ConfigError, first_line
from bebop.registry import nearest
from bebop.store.files import read_json
from bebop.verifiers import TASKS_FUNCTION

LOGITS_BUDGET = 2**27  # largest number of logits in one training micro-batch, a fp32 tensor of 512 MiB
BOXED_REWARD = "pkg://bebop.rl.rollout.reward"
HERE = Path(__file__).parent
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
SPECULATIVE = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
NOT_OURS = {  # verl's key -> the only value with which weights and heads reach the engine, and why
    f"{ACTOR}.strategy": ("fsdp2", "bebop reads weights from verl's FSDP2 engine"),
    f"{ROLLOUT}.quantization": (None, "the rollout would sample another policy than the one trained"),
    f"{ROLLOUT}.checkpoint_engine.backend": ("naive", "the other backends send no heads"),
    f"{ROLLOUT}.data_parallel_size": (1, "more GPUs already make more replicas"),
    f"{ROLLOUT}.pipeline_model_parallel_size": (1, "set tensor_model_parallel_size"),
    "trainer.nnodes": (1, "runs on several machines are not supported"),
}
LORA = {  # verl's key -> the value that means no adapter; heads are not trained beside adapters
    f"{MODEL}.lora_rank": "0",
    f"{MODEL}.lora_adapter_path": "null",
    f"{MODEL}.lora.rank": "0",
    f"{MODEL}.lora.adapter_path": "null",
}
# Largest |p_trainer - p_rollout| of on-policy samples, by the engine's data type. The values for GPUs are guesses that
# only catch another policy: they have not been measured. vLLM's attention multiplies float32 as TF32 there, and among
# many bfloat16 tokens a few are far off. On a CPU, float32 rounding reaches 1e-5 over the 30 layers of SmolLM2.
PROBS_DIFF_LIMIT = {"float32": 1e-4, "bfloat16": 0.1}
PROBS_DIFF_LIMIT_GPU = {"float32": 1e-2, "bfloat16": 0.5}


@dataclass(frozen=True)
class Policy:
    """Facts of the policy directory."""

    path: Path
    vocab_size: int
    num_ids: int  # of its tokenizer; the model's other ids are padding
    largest: int  # number of elements of its largest tensor
    linear_attention: bool  # some layers have it
    mtp_layers: int
    mtp_depth: int | None  # depth that its heads were trained for; None if not recorded

    @classmethod
    def read(cls, path: Path) -> Policy:
        from bebop.mtp.families import mixes_linear_attention  # these import transformers
        from bebop.mtp.reading import read_policy

        try:
            reading = read_policy(path)
        except BadInput as error:
            raise ConfigError(str(error)) from None
        return cls(
            path=path,
            vocab_size=reading.vocab_size,
            num_ids=reading.num_ids,
            largest=max(map(prod, reading.shapes.values())),
            linear_attention=mixes_linear_attention(reading.config),
            mtp_layers=reading.mtp_layers,
            mtp_depth=read_json(path / "bebop.json").get("mtp_depth"),
        )


def compose(
    config: GrpoConfig, policy: Policy, run_dir: Path, *, num_gpus: int = 0, resume_from: Path | None = None
) -> DictConfig:
    """verl's config for this run; num_gpus 0 means the CPU. Raises ConfigError with one line."""
    check(config, policy, num_gpus=num_gpus)
    composed = _verl_defaults()
    OmegaConf.set_struct(composed, False)
    for name in ["base", "command"] + ([] if num_gpus else ["cpu"]):
        composed.merge_with(OmegaConf.load(HERE / f"{name}.yaml"))
    for key, value in computed(config, policy, run_dir, num_gpus=num_gpus, resume_from=resume_from).items():
        OmegaConf.update(composed, key, value, merge=True)
    if config.rollout.engine != "vllm" or config.rollout.speculation != "mtp":
        for name in ("speculative_config", "per_request_spec_decode_metrics"):
            del composed.actor_rollout_ref.rollout.engine_kwargs.vllm[name]
    _apply(composed, config.grpo.verl_overrides)
    composed = complete(composed)
    _refuse_fused_kernels(composed, policy)
    return composed


def complete(config: DictConfig) -> DictConfig:
    """Check verl's config, and fill in what depends on the user's keys; a second call changes nothing.

    Raises ConfigError on a key under which the engine would draft with other heads than the trainer's.
    """
    if "bebop" not in config:
        raise ConfigError(
            "verl's config has no section bebop; add 'hydra.searchpath=[pkg://bebop.rl]' +verl=base, or on a CPU "
            "'+verl=[base,cpu]'"
        )
    for key, off in LORA.items():
        if value := OmegaConf.select(config, key):
            raise ConfigError(f"{key}={value}: grpo trains whole policies, not LoRA adapters; expected {off}")
    for key, (allowed, advice) in NOT_OURS.items():
        if (value := OmegaConf.select(config, key)) not in (allowed, None):
            raise ConfigError(f"{key}={value}, expected {allowed}: {advice}")
    reward = config.reward.custom_reward_function
    with open_dict(config):
        if reward.path and reward.path != BOXED_REWARD:  # a reward function given as verl's own keys
            reward.reward_kwargs.function = f"{Path(reward.path).resolve()}:{reward.name}"
            reward.path, reward.name = BOXED_REWARD, "compute_score"
        if config.bebop.probs_diff_limit is None:
            limits = PROBS_DIFF_LIMIT if config.trainer.device == "cpu" else PROBS_DIFF_LIMIT_GPU
            config.bebop.probs_diff_limit = limits.get(config.actor_rollout_ref.rollout.dtype, limits["bfloat16"])
    return config


def check(config: GrpoConfig, policy: Policy, *, num_gpus: int) -> None:
    """Raise ConfigError on a config that verl or vLLM would run wrongly without an error."""
    rollout, data = config.rollout, config.data
    if policy.linear_attention and not num_gpus and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={config.model.dtype}: {policy.path} has linear-attention layers, which vLLM 0.31 runs "
            "only in bfloat16 on a CPU; set model.dtype=bfloat16"
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


def _refuse_fused_kernels(composed: DictConfig, policy: Policy) -> None:
    """Raise ConfigError on verl's fused lm_head where some of its rows are padding: it gives them probability."""
    if policy.num_ids < policy.vocab_size and OmegaConf.select(composed, "actor_rollout_ref.model.use_fused_kernels"):
        raise ConfigError(
            f"actor_rollout_ref.model.use_fused_kernels=True: the model has {policy.vocab_size} embeddings and its "
            f"tokenizer {policy.num_ids} ids, and verl's fused kernels would give the padding probability; expected "
            "False"
        )


def computed(
    config: GrpoConfig, policy: Policy, run_dir: Path, *, num_gpus: int, resume_from: Path | None
) -> dict[str, Any]:
    """verl key -> value, where the value follows from bebop's config or the policy."""
    grpo, data, rollout, trainer = config.grpo, config.data, config.rollout, config.trainer
    float32 = config.model.dtype == "float32"
    full = {name: "fp32" for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    # no tensor may be larger than a bucket of the weight sync
    bucket_mb = max(1024 if num_gpus else 16, 4 * policy.largest // 2**20 + 1)
    keys: dict[str, Any] = {
        "bebop.run_dir": str(run_dir),
        "bebop.rule": rollout.acceptance_rule,
        "bebop.mixed_lengths": rollout.draft_schedule is not None,
        "bebop.probs_diff_limit": grpo.probs_diff_limit,
        "bebop.watchdog_s": grpo.watchdog_s,
        "bebop.reward_failures_limit": grpo.reward_failures_limit,
        "bebop.keep_checkpoints": grpo.keep_checkpoints,
        "bebop.wandb": config.logger.wandb,
        "data.train_files": glob.escape(str(run_dir / "prompts.parquet")),  # the reader takes it for a pattern
        "data.seed": config.seed,
        "data.train_batch_size": grpo.prompts_per_step,
        "data.max_prompt_length": data.max_prompt_tokens,
        "data.max_response_length": data.max_response_tokens,
        f"{MODEL}.path": str(policy.path),
        f"{MODEL}.mtp.num_speculative_tokens": rollout.draft_depth,
        f"{MODEL}.mtp.enable": rollout.speculation == "mtp",
        f"{ACTOR}.optim.lr": grpo.lr,
        # Adam's first step moves every weight by the whole rate, whatever the gradient's noise
        f"{ACTOR}.optim.lr_warmup_steps": min(3, grpo.steps // 10),
        f"{ACTOR}.optim.override_optimizer_config": {"eps": grpo.adam_eps},
        f"{ACTOR}.use_kl_loss": grpo.kl_coef > 0,
        f"{ACTOR}.kl_loss_coef": grpo.kl_coef,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro_batch(
            grpo.prompts_per_step * grpo.group_size // max(num_gpus, 1), data, policy.vocab_size
        ),
        # else verl trains in bfloat16, whose log-probabilities are 0.01 off the rollout's
        f"{ACTOR}.fsdp_config.mixed_precision": full if float32 else None,
        f"{ROLLOUT}.name": rollout.engine,
        f"{ROLLOUT}.n": grpo.group_size,
        f"{ROLLOUT}.temperature": rollout.temperature,
        f"{ROLLOUT}.dtype": config.model.dtype,
        f"{ROLLOUT}.max_model_len": rollout.max_model_len,
        f"{ROLLOUT}.max_num_seqs": rollout.max_num_seqs,
        f"{ROLLOUT}.gpu_memory_utilization": rollout.gpu_memory_utilization,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": bucket_mb,
        "algorithm.rollout_correction.rollout_is": (
            None if trainer.importance_correction == "none" else trainer.importance_correction
        ),
        "algorithm.rollout_correction.rollout_is_threshold": trainer.importance_cap,
        "reward.custom_reward_function.reward_kwargs": {
            "function": grpo.reward_function or TASKS_FUNCTION,
            "sealed": grpo.reward_sealed,
            "timeout_s": grpo.reward_timeout_s,
        },
        "trainer.v1.trainer_mode": f"bebop_{trainer.mode}",
        "trainer.v1.colocate_async.num_warmup_batches": trainer.max_staleness,
        "trainer.v1.sampler.max_off_policy_threshold": trainer.max_staleness + 1,  # versions that a sample may span
        "trainer.n_gpus_per_node": max(num_gpus, 1),
        "trainer.total_training_steps": grpo.steps,
        "trainer.save_freq": grpo.save_every,
        "trainer.project_name": config.logger.project,
        "trainer.experiment_name": config.logger.name or run_dir.name,
        "trainer.resume_mode": "resume_path" if resume_from else "disable",
        "trainer.resume_from_path": str(resume_from) if resume_from else None,
    }
    if num_gpus:
        keys[f"{ROLLOUT}.agent.num_workers"] = min(8, grpo.prompts_per_step)
        if not float32 and importlib.util.find_spec("flash_attn") is not None:  # its kernels take 16 bits
            keys[f"{MODEL}.use_remove_padding"] = True
            keys[f"{MODEL}.override_config.attn_implementation"] = "flash_attention_2"
    else:
        keys[f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
    if policy.linear_attention:  # vLLM 0.31 caches prefixes of such layers at block bounds only
        keys[f"{ROLLOUT}.enable_prefix_caching"] = False
    if rollout.engine == "torch":
        keys[f"{ROLLOUT}.custom"] = {"bebop": rollout.model_dump(mode="json")}
        keys[f"{ROLLOUT}.free_cache_engine"] = False  # the engine keeps its memory between steps
    elif rollout.speculation == "mtp":
        keys[f"{SPECULATIVE}.draft_sample_method"] = rule_methods(rollout)[0]
        if rollout.draft_schedule:
            ranges = vllm_ranges(rollout.draft_schedule, rollout.max_num_seqs)
            keys[f"{SPECULATIVE}.num_speculative_tokens_per_batch_size"] = ranges
    return keys


def micro_batch(rows: int, data: Any, vocab_size: int) -> int:
    """Largest divisor of `rows`, at most 32, whose padded logits stay within LOGITS_BUDGET."""
    limit = min(32, LOGITS_BUDGET // (vocab_size * (data.max_prompt_tokens + data.max_response_tokens)))
    return next(size for size in range(max(1, min(rows, limit)), 0, -1) if rows % size == 0)


def save(composed: DictConfig, path: Path) -> Path:
    """Write the composed config with its interpolations."""
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(composed, path)
    return path


def _verl_defaults() -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed: run ./launch.sh setup")
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return hydra_compose("ppo_trainer")


def _apply(composed: DictConfig, words: list[str]) -> None:
    """Set the user's keys, written in hydra's grammar: key=value, +key=value, ++key=value or ~key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    known = list(_keys(composed))
    for word in words:
        _check_key(word, known)
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
            if override.is_delete():
                folder, _, name = override.key_or_group.rpartition(".")
                (OmegaConf.select(composed, folder) if folder else composed).pop(name)
            else:
                OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
        except Exception as error:  # hydra's and OmegaConf's own kinds; each means that the word cannot be applied
            raise ConfigError(f"grpo.verl_overrides: {first_line(error)}") from None


def _check_key(override: str, known: list[str]) -> None:
    key = override.split("=", 1)[0].strip()
    if "=" not in override and not key.startswith("~"):
        raise ConfigError(f"grpo.verl_overrides: got {override!r}, expected <key>=<value>")
    if key.startswith("+"):  # verl's own recipes add keys this way
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
