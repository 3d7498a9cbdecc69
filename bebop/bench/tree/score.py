"""Scored acceptance of draft trees: at the same positions of the policy's own text, every variant's tree is grown and
its expected acceptance taken in closed form (`bebop.spec.expected_accepted`).

The engine's counters compare variants badly: two variants answer a prompt with different texts from the first token
that differs. Here all variants are scored at the same positions, so their differences are paired by position. A
difference of a few percent shows after hundreds of positions, and with counters only after tens of thousands of rounds.

Policy, head, drafter and target pass are the torch engine's own: what is scored is what it serves. A text is read once;
each of its anchors is a request that knows the text up to the token after the anchor.

Legend: A anchors of one text, L its tokens, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bebop.config import RolloutSection
from bebop.engines.torch_engine.batch import make_caches, target_pass
from bebop.engines.torch_engine.drafter import Anchors, Drafter, Settings, Tree
from bebop.engines.torch_engine.kv_cache import Window
from bebop.engines.torch_engine.model import Policy
from bebop.spec import Streams, expected_accepted
from bebop.store.environment import device_name

ANCHORS = 8  # of one target pass


class TreeScorer:
    """A policy and the trees that `rollouts` ask for, alike in all but their method and leads.

    Texts have at most rollout.max_model_len token ids.
    """

    def __init__(self, policy_dir: Path, dtype: torch.dtype, rollouts: Sequence[RolloutSection]) -> None:
        one, device = rollouts[0], torch.device(device_name())
        positions = one.max_model_len + one.draft_depth + 1
        self.policy = Policy(policy_dir, heads=True, num_positions=positions, dtype=dtype, device=device)
        self.drafters = [Drafter(rollout, self.policy) for rollout in rollouts]
        self.cache, self.head_cache = make_caches(self.policy, self.drafters[0], one.max_model_len, ANCHORS)
        self.filters = {"top_k": one.top_k, "top_p": one.top_p} if one.top_k or one.top_p < 1 else {}

    @torch.inference_mode()
    def score(self, text: Sequence[int], anchors: Sequence[int], temperature: float) -> Tensor:
        """float64 [number of rollouts, A]: expected tokens, 1 + accepted, of the round after text[t + 1], for each
        anchor t in [0, len(text) - 1)."""
        ids = torch.tensor(text, device=self.policy.device)
        states = self._read(ids)
        found = torch.empty(len(self.drafters), len(anchors), dtype=torch.float64)
        for first in range(0, len(anchors), ANCHORS):
            at = torch.tensor(anchors[first : first + ANCHORS], device=ids.device)
            columns = torch.arange(len(ids) - 1, device=ids.device)
            requests = Anchors(at + 2, states[at], columns <= at.unsqueeze(1), len(columns))
            # the position, taken as the round's number, makes the probes of a text's anchors independent
            draws = Streams(torch.full_like(at, int(ids.sum())), at)
            settings = Settings(torch.full(at.shape, temperature, device=ids.device), self.filters)
            for number, drafter in enumerate(self.drafters):
                tree = drafter.draft(requests, settings, draws, self.head_cache)
                expected = self._expected(tree, requests, ids[at + 1], settings)
                found[number, first : first + len(at)] = 1.0 + expected.sum(1).cpu()
        return found

    def _read(self, ids: Tensor) -> Tensor:
        """Fill every slot of both caches with the text; the head's states of depth 1, [L-1, S]."""
        positions = torch.arange(len(ids) - 1, device=ids.device).unsqueeze(0)
        hidden = self.policy.hidden(ids[None, :-1], positions, Window(self.cache, 0, 0, causal=True))
        window = Window(self.head_cache, 0, 0, causal=True)
        states = self.policy.draft_state(self.policy.first_state(hidden), ids[None, 1:], positions, window)
        for cache in (self.cache, self.head_cache):
            for slot in range(1, ANCHORS):
                cache.move(0, slot, len(ids) - 1)
        return states[0]

    def _expected(self, tree: Tree, requests: Anchors, last: Tensor, settings: Settings) -> Tensor:
        logits, _ = target_pass(self.policy, self.cache, tree, requests, last)
        batch = torch.arange(len(last), device=last.device)
        return expected_accepted(tree.trees, lambda row: settings.sampling(logits[batch, row]))
