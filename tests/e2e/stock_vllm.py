"""Run vLLM without bebop's plug-in on the policy in the current directory: its drafts, then greedy text.

A script that test_qwen3_stock_vllm.py starts. usage: stock_vllm.py ROUNDS.json DRAFTS.pt TEXTS.json; see
record_engine_drafts.py.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from record_engine_drafts import main as record


def main(rounds_file: str, drafts: str, texts: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    record(".", rounds_file, drafts, "1.0")
    gc.collect()
    cleanup_dist_env_and_memory()
    llm = LLM(
        model=".",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    )
    prompts = [{"prompt_token_ids": prompt} for each in json.loads(Path(rounds_file).read_text()) for prompt in each]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    Path(texts).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    assert not [name for name in sys.modules if name == "bebop" or name.startswith("bebop.")]


if __name__ == "__main__":
    main(*sys.argv[1:])
