"""Serve a policy of family `decoder`, then bring another's weights through vLLM's own `load_weights`, one by one.

A script that test_decoder_models.py starts, since vLLM leaves its process changed.

usage: update_decoder_models.py BEFORE AFTER HOLLOW OUT.json. HOLLOW lacks a tensor of its head. OUT: greedy texts after
the updates, what `load_weights` returned, the parameters that differ from those of a server started on AFTER, and how
HOLLOW ended.
"""

from __future__ import annotations

import gc
import json
import pickle
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


def update(worker, path: str) -> list[list[str]]:
    """Every tensor is a bucket of its own, and all come in a random order, to target and drafter alike."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    runner = worker.model_runner
    tensors = list(load_file(path).items())
    random.Random(0).shuffle(tensors)
    target, drafter = runner.get_model(), runner.get_draft_model()
    loaded = [[name, *sorted(target.load_weights([(name, t)])), "|"] for name, t in tensors]
    for row, (name, tensor) in zip(loaded, tensors, strict=True):
        row += sorted(drafter.load_weights([(name, tensor)]))
    # as bebop's worker does: vLLM on a CPU multiplies by packed copies of experts
    for model in (target, drafter):
        process_weights_after_loading(model, runner.model_config, torch.device("cpu"))
    assert pickle.loads(pickle.dumps(type(target))) is type(target)
    return loaded


def parameters(worker) -> dict[str, torch.Tensor]:
    models = {"target": worker.model_runner.get_model(), "drafter": worker.model_runner.get_draft_model()}
    return {f"{where} {name}": p.clone() for where, model in models.items() for name, p in model.named_parameters()}


def main(before: str, after: str, hollow: str, out: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    def serve(policy: str) -> LLM:
        return LLM(
            model=policy,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
            speculative_config={"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
        )

    llm = serve(before)
    (loaded,) = llm.collective_rpc(update, args=(str(Path(after) / "model.safetensors"),))
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    (updated,) = llm.collective_rpc(parameters)
    result = {"texts": [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], "loaded": loaded}
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    llm = serve(after)
    (started,) = llm.collective_rpc(parameters)
    result["differ"] = [name for name in started if not torch.equal(started[name], updated[name])]
    result["num_parameters"] = len(started)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    try:
        serve(hollow)
        result["hollow"] = "served"
    except Exception as error:
        result["hollow"] = f"{type(error).__name__}: {error}"
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
