"""Extends vLLM's worker: updates the weights of the running model and its drafter, by checkpoint names.

Every tensor goes through the `load_weights` with which vLLM reads checkpoints, so vLLM itself handles names, fusing,
padding and shards, for every family. The drafter gets the heads one by one, so that tensors it skips are noticed.
Called through `collective_rpc`; tensors are sent as a safetensors file, or as verl's stream (bebop.rl.rollout).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bebop.engines.weights import Digests, Layout, check_finite, fingerprint
from bebop.errors import BadInput, HeadsDiffer
from bebop.mtp.checkpoint import refuse_not_finite

ONE_EXPERT = re.compile(r".*\bexperts\.\d+\.")


class WorkerExtension:
    """Added to vLLM's worker by `worker_extension_cls`."""

    _bebop_layout: Layout | None = None
    _bebop_held: int | None = None  # fingerprint of the drafter's own parameters after the last update

    def bebop_update(self, path: str) -> dict[str, str]:
        """Load the tensors of a safetensors file. Returns the digest of each as it arrived."""
        from safetensors.torch import load_file

        loading = self.bebop_loading(sampled=False)
        loading.add(load_file(path).items())
        loading.finish()
        return {name: found.hex() for name, found in loading.digests.found.items()}

    def bebop_loading(self, *, sampled: bool | None = None) -> Loading:
        """Start an update of this worker's weights; call `finish` after the last tensor. sampled: see `Digests`."""
        if self._bebop_layout is None:
            self._bebop_layout = Layout(Path(self.model_runner.vllm_config.model_config.model))
        return Loading(self, Digests(self._bebop_layout, sampled=sampled))

    def bebop_state(self) -> dict[str, Any]:
        """What the engine's process really runs: status of each fix, whether temperatures survive as floats, and the
        fault of a weight that is not finite, of model or drafter."""
        from bebop.engines.vllm_engine import fixes

        runner, fault = self.model_runner, None
        try:
            for module in filter(None, (runner.get_model(), runner.get_draft_model())):
                refuse_not_finite(runner.vllm_config.model_config.model, module.named_parameters())
        except BadInput as error:
            fault = str(error)
        return {
            "fixes": fixes.apply_all(),
            "expand_keeps_floats": fixes.expand_keeps_floats(),
            "weights": fault or "finite",
        }


class Loading:
    """One update of a worker's model and drafter: tensors in any order, in any number of parts."""

    def __init__(self, worker: Any, digests: Digests) -> None:
        self.worker, self.digests = worker, digests
        runner = worker.model_runner
        self.model: nn.Module = runner.get_model()
        self.drafter: nn.Module | None = runner.get_draft_model()
        self.sent = self.loaded = 0  # head tensors
        self.by_rank = bool(runner.vllm_config.parallel_config.enable_expert_parallel)
        _require_plain(self.model)
        if worker._bebop_held is None:
            worker._bebop_held = self._held()

    @torch.no_grad()
    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by checkpoint name. Raises ValueError for a NaN or an infinity, and vLLM's own errors."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        layout, backbone = self.digests.layout, []
        with disable_mtp_completeness_check():  # DeepSeek's drafter rejects a part without all its tensors
            for name, tensor in tensors:
                check_finite(name, tensor)
                self.digests.note(name, tensor)
                if name in layout.copies:
                    continue
                if layout.is_head(name):
                    self.sent += 1
                    self.loaded += self._load_head(name, tensor)
                else:
                    backbone.append((name, tensor))
            if backbone:
                self.model.load_weights(iter(backbone))
                if self.drafter is not None:  # its embedding and output matrix, if they are not the model's own
                    self.drafter.load_weights(iter(backbone))

    def finish(self) -> None:
        """Let vLLM update the tensors that it derives from weights. Raises HeadsDiffer if head tensors were skipped, or
        changed without an update."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        if self.loaded < self.sent:
            raise HeadsDiffer(
                f"heads: {self.loaded} of {self.sent} sent tensors were loaded; the engine's drafter is "
                f"{type(self.drafter).__name__ if self.drafter is not None else 'missing'}"
            )
        config = self.worker.model_runner.vllm_config
        process_weights_after_loading(self.model, config.model_config, self.worker.device)
        if self.drafter is not None:
            draft_config = config.speculative_config.draft_model_config or config.model_config
            process_weights_after_loading(self.drafter, draft_config, self.worker.device)
        held = self._held()
        if not self.sent and held != self.worker._bebop_held:
            raise HeadsDiffer("heads: the drafter's own parameters changed in an update without head tensors")
        self.worker._bebop_held = held

    def _load_head(self, name: str, tensor: Tensor) -> bool:
        if self.drafter is None:
            return False
        loaded = self.drafter.load_weights(iter([(name, tensor)]))
        return bool(loaded) or (self.by_rank and ONE_EXPERT.match(name) is not None)  # another rank's expert

    def _held(self) -> int:
        """Fingerprint of the parameters that only the drafter has, on this rank."""
        if self.drafter is None:
            return 0
        shared = {parameter.data_ptr() for parameter in self.model.parameters()}
        return fingerprint(p for p in self.drafter.parameters() if p.data_ptr() not in shared)


def _require_plain(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise BadInput(
                f"{name}: vLLM has packed it, so it cannot be updated; set BEBOP_KEEP_PLAIN_WEIGHTS=1, and do not set "
                "BEBOP_ENGINE_FIXES=0"
            )
