"""One family through heads and GRPO: a small random policy as transformers writes it, fresh heads, three RL steps.

`family.py NAME ...` writes a row per family to runs/families/NAME.json, `family.py` alone prints them as a table.
What a row must show is checked here, and its name is in the exit code's message where it does not.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("BEBOP_RUNS", "runs")) / "families"
STEPS = 3
LIMITS = {"float32": 1e-5, "bfloat16": 0.1}  # of probs_diff_max
HYBRID = {"dtype": "bfloat16", "linear_layers": True}  # vLLM's kernels of linear attention are bfloat16's on a CPU
DENSE = ("llama", "mistral", "qwen3", "qwen3_moe")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tied": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 tied": {"model_type": "qwen3", "tied": True},
    "qwen3 wide heads": {"model_type": "qwen3", "head_dim": 64},
    "qwen3 wide heads tied": {"model_type": "qwen3", "head_dim": 64, "tied": True},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "qwen3_moe tied": {"model_type": "qwen3_moe", "tied": True},
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tied": True},
    "mistral": {"model_type": "mistral"},
    "mistral tied": {"model_type": "mistral", "tied": True},
    "mimo": {"model_type": "mimo"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5 tied": {"model_type": "qwen3_5_text", "tied": True},
    "qwen3_5 hybrid": {"model_type": "qwen3_5_text", **HYBRID},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
    "qwen3_5_moe hybrid": {"model_type": "qwen3_5_moe_text", **HYBRID},
    "qwen3_next": {"model_type": "qwen3_next"},
    "qwen3_next hybrid": {"model_type": "qwen3_next", **HYBRID},
    "deepseek_v3": {"model_type": "deepseek_v3"},
    "glm4_moe": {"model_type": "glm4_moe"},
}


def main(names: list[str]) -> int:
    if not names:
        return table()
    if len(names) > 1:  # each in a process of its own, which takes its memory along
        return max(subprocess.call([sys.executable, __file__, name]) for name in names)
    (name,) = names
    folder = ROOT / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started, row = time.monotonic(), {"family": name}
    try:
        story(folder, FAMILIES[name], row)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        traceback.print_exc()
    row["elapsed_s"] = round(time.monotonic() - started)
    (folder / "row.json").write_text(json.dumps(row, indent=1))
    print(json.dumps(row))
    return 1 if "failed" in row else 0


def story(folder: Path, options: dict[str, Any], row: dict[str, Any]) -> None:
    dtype = options.get("dtype", "float32")
    policy = random_policy(folder / "policy", **options)
    trained = train_heads(policy, folder / "sft", dtype, row)
    saved = train_policy(trained, folder / "grpo", dtype, STEPS, row)
    loads(saved, dtype)
    row["goes_on"] = False
    train_policy(saved, folder / "again", dtype, 1, {})
    row["goes_on"] = True


def random_policy(
    dest: Path, *, model_type: str, linear_layers: bool = False, dtype: str = "float32", **more: Any
) -> Path:
    """A policy without heads, as transformers' `save_pretrained` writes it, with the tiny policy's tokenizer."""
    from transformers import AutoConfig

    from bebop.data.tokenizer import token_ids, write_tiny_tokenizer
    from bebop.policies import random_checkpoint
    from bebop.policies.random_family import write_random_family

    if model_type == "mimo":  # not transformers' own; as published, heads included
        return random_checkpoint(dest, model_type=model_type, dtype=dtype)
    if model_type != "qwen2":  # whose random checkpoint would be in MiMo's layout
        own_width = model_type not in DENSE  # of their heads; vLLM's attention on a CPU takes 32 and more
        more = {"linear_layers": linear_layers, "num_heads": 4 if own_width else 2} | more
        return random_checkpoint(dest, model_type=model_type, dtype=dtype, mtp=False, **more)
    size = write_tiny_tokenizer(dest)
    end_id, pad_id = token_ids(dest)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=more.get("tied", False),
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype=dtype,
    )
    write_random_family(dest, config, seed=0, mtp=False)
    return dest


def train_heads(policy: Path, run_dir: Path, dtype: str, row: dict[str, Any]) -> Path:
    """Fresh heads on 64 sequences: their acceptance length must be above 1 by its error."""
    from bebop.config import check
    from bebop.sft import run

    values = {
        "model": {"name": "hf", "path": str(policy), "dtype": dtype},
        "data": {"tasks": [{"name": "chain_sum"}], "num_prompts": 64, "num_heldout": 64}
        | {"max_prompt_tokens": 96, "max_response_tokens": 48},
        "loss": {},
        "sft": {"steps": 40, "eval_every": 40, "save_every": 40, "batch_tokens": 2048, "lr": 3e-3},
        "rollout": {"max_model_len": 160, "max_num_seqs": 32, "kv_cache_gib": 0.25},
        "logger": {"wandb": "disabled"},
    }
    result = run(check("sft", values), run_dir)
    row["AL"], row["AL_se"] = result.summary["acceptance_length"], result.summary["acceptance_length_se"]
    row["AL_before"] = result.summary["acceptance_length_before"]
    if not row["AL"] - 2 * row["AL_se"] > 1:
        raise AssertionError(f"heads trained on 64 sequences accept {row['AL']:.3f} +- {row['AL_se']:.3f}")
    return result.checkpoint


def train_policy(policy: Path, run_dir: Path, dtype: str, steps: int, row: dict[str, Any]) -> Path:
    """GRPO with speculation: finite, the trainer's heads served at every step, probabilities equal."""
    from bebop.config import check
    from bebop.monitor import read_steps
    from bebop.rl import checkpoints, run

    # a random policy solves nothing; any text earns some of this one, so that groups have a spread
    reward = Path(__file__).with_name("reward.py").resolve()
    values = {
        "model": {"name": "hf", "path": str(policy), "dtype": dtype},
        "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 96, "max_response_tokens": 32},
        "rollout": {"max_model_len": 160, "max_num_seqs": 16, "kv_cache_gib": 0.25},
        "trainer": {"mode": "sync"},
        "grpo": {
            **{"steps": steps, "save_every": steps, "prompts_per_step": 4, "group_size": 4},
            **{"lr": 1e-3, "adam_eps": 1e-3},
            "verl_overrides": [f"reward.custom_reward_function.path='{reward}'"],
        },
        "logger": {"wandb": "disabled"},
    }
    run(check("grpo", values), run_dir)
    records = read_steps(run_dir)
    row["steps"] = len(records)
    row["AL_rollouts"] = records[-1].acceptance_length
    row["probs_diff_max"] = max(record.probs_diff_max for record in records)
    row["heads_equal"] = all(record.heads_checksum_engine == record.heads_checksum_trainer for record in records)
    if not (len(records) == steps and row["heads_equal"] and row["probs_diff_max"] <= LIMITS[dtype]):
        raise AssertionError(f"GRPO: {row}")
    if not all(math.isfinite(record.entropy_nats) and record.counts.num_drafts for record in records):
        raise AssertionError("GRPO: a step without entropy or drafts")
    return checkpoints.policy_dir(run_dir.resolve(), steps)


def loads(policy: Path, dtype: str) -> None:
    """vLLM and transformers both load the checkpoint, and in float32 they agree on the greedy text."""
    import torch
    from transformers import AutoModelForCausalLM

    import bebop.mtp.mimo  # noqa: F401  # lets transformers know MiMo as published
    from bebop.config import RolloutSection
    from bebop.engines import make_engine
    from bebop.records import Sampling

    prompt, rollout = [7, 8, 9], RolloutSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=0.25)
    with make_engine(rollout, policy, seed=0, dtype=dtype) as engine:
        (answer,) = engine.generate([prompt], Sampling(temperature=0.0, max_tokens=16, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, dtype))
    with torch.no_grad():  # without a cache, which transformers refuses for a hybrid family without a linear layer
        logits = model(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
    greedy = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    if dtype == "float32" and greedy != list(answer.token_ids):
        raise AssertionError(f"vLLM goes on with {list(answer.token_ids)}, transformers with {greedy}")


def table() -> int:
    print("| family | AL of fresh heads, 64 sequences | AL, 3rd step | `probs_diff_max` | heads equal | continues |")
    print("|---|---|---|---|---|---|")
    failed = 0
    for name, options in FAMILIES.items():
        file = ROOT / name.replace(" ", "-") / "row.json"
        row = json.loads(file.read_text()) if file.exists() else {"failed": "not run"}
        failed += "failed" in row
        label = f"{name}, {options.get('dtype', 'float32')}"
        if "failed" in row:
            print(f"| {label} | {row['failed']} | | | | |")
            continue
        yes = {True: "yes", False: "no"}
        print(
            f"| {label} | {row['AL_before']:.3f} → {row['AL']:.3f} ± {row['AL_se']:.3f} | {row['AL_rollouts']:.2f} "
            f"| {row['probs_diff_max']:.1e} | {yes[row['heads_equal']]} | {yes[row['goes_on']]} |"
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
