"""A worker that notes which request each draft was made for, and which request it is verified with.

An engine's `worker_extension_cls` for tests/e2e/test_vllm_pairing.py, beside which the engine's process finds it.
"""

from __future__ import annotations

from typing import Any

import torch

from bebop.engines.vllm_engine.worker import WorkerExtension


class Observer(WorkerExtension):
    """bebop's worker extension, with a record of drafts and a fault to switch on."""

    def start_observing(self, mispair: bool) -> None:
        """Begin a new record. mispair: give each request's draft the probabilities of the request before it."""
        if not hasattr(self, "_stock"):
            runner = self.model_runner
            self._stock = (runner.execute_model, runner.propose_draft_token_ids, runner.rejection_sampler.forward)
            runner.execute_model, runner.propose_draft_token_ids = self._execute, self._propose
            runner.rejection_sampler.forward = self._verify
        self._mispair = mispair
        self._drafts: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}  # request -> row, tokens [K], q [K, V]
        self._record: dict[str, Any] = {"verified": 0, "moved": 0, "mispaired": 0, "padded": 0, "resumed": []}

    def observed(self) -> dict[str, Any]:
        """The record: how many drafts were verified; how many of them in another row of the batch than they were made
        in (moved), or with other tokens or probabilities than they were made with (mispaired); how many requests vLLM
        padded; and of each resumption after a preemption the request and the number of tokens that it had."""
        return self._record

    def _execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        for request, num_tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if request in cached.resumed_req_ids:
                self._record["resumed"].append([request, num_tokens])
                self._drafts.pop(request, None)
        return self._stock[0](scheduler_output, *args, **kwargs)

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        drafts = self._stock[1](*args, **kwargs)
        runner = self.model_runner
        for row, request in enumerate(runner.input_batch.req_ids):
            self._drafts[request] = (row, drafts[row].clone(), runner._draft_probs[row].clone())
        if self._mispair:
            runner._draft_prob_req_ids = runner._draft_prob_req_ids[1:] + runner._draft_prob_req_ids[:1]
        return drafts

    def _verify(self, metadata: Any, draft_probs: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        start = 0
        for row, request in enumerate(self.model_runner.input_batch.req_ids):
            count = metadata.num_draft_tokens[row]
            if count:
                part = slice(start, start + count)
                self._compare(
                    row, request, metadata.draft_token_ids[part], None if draft_probs is None else draft_probs[part]
                )
            start += count
        return self._stock[2](metadata, draft_probs, *args, **kwargs)

    def _compare(self, row: int, request: str, tokens: torch.Tensor, q: torch.Tensor | None) -> None:
        if (tokens < 0).all():
            self._record["padded"] += 1
            return
        had, drafted, drafted_with = self._drafts[request]
        same = q is not None and torch.equal(q, drafted_with[: len(tokens)])
        self._record["verified"] += 1
        self._record["moved"] += had != row
        self._record["mispaired"] += not (same and torch.equal(tokens.long(), drafted[: len(tokens)].long()))
