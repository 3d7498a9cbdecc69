"""Run vLLM in this process on a policy directory and save every draft that it proposes.

A script that test_draft_matches_engine.py starts, since vLLM leaves its process changed.

usage: record_engine_drafts.py POLICY_DIR ROUNDS.json OUT.pt TEMPERATURE... ROUNDS is a list of lists of prompts; a
round runs after the one before, and finds its prefixes in the cache. Each record: the temperature, the request's
whole text, the anchor's position t, the token at t+1, the draft [K], the engine's q [K, V].
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import torch


def main(policy: str, rounds_file: str, out: str, *temperatures: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    records: list[dict] = []
    current: list[str] = []
    stock_step, stock_propose = GPUModelRunner.propose_draft_token_ids, SpecDecodeBaseProposer.propose

    def step(self, *args, **kwargs):
        current[:] = self.input_batch.req_ids
        return stock_step(self, *args, **kwargs)

    def propose(self, **kwargs):
        index = kwargs["token_indices_to_sample"]
        if index is None:
            index = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
        anchors = kwargs["target_positions"][index.long()].tolist()
        next_tokens = kwargs["next_token_ids"].tolist()
        drafts = stock_propose(self, **kwargs)
        for i, request in enumerate(current):
            record = {"request": request, "anchor": anchors[i], "next": next_tokens[i]}
            record["temperature"] = params.temperature
            q = None if self._last_draft_probs is None else self._last_draft_probs[i].clone()  # None where greedy
            records.append(record | {"drafts": drafts[i].tolist(), "q": q})
        return drafts

    GPUModelRunner.propose_draft_token_ids, SpecDecodeBaseProposer.propose = step, propose
    llm = LLM(
        model=policy,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,  # each round's prompts in one step
        kv_cache_memory_bytes=64 << 20,
        seed=1,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        },
    )
    outputs = []
    for temperature, prompts in product(temperatures, json.loads(Path(rounds_file).read_text())):
        params = SamplingParams(temperature=float(temperature), max_tokens=24, ignore_eos=True, detokenize=False)
        outputs += llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    texts = {o.request_id: [*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs}
    for record in records:
        name = record.pop("request")
        record["text"] = next(text for key, text in texts.items() if name == key or name.startswith(f"{key}-"))
    torch.save(records, out)
    GPUModelRunner.propose_draft_token_ids, SpecDecodeBaseProposer.propose = stock_step, stock_propose


if __name__ == "__main__":
    main(*sys.argv[1:])
