"""The baseline: speculators' own model class, trainer, optimizers and checkpoint export, on given batches.

speculators 0.9.0 trains native MTP heads (models/mtp/core.py) with hard-label cross-entropy on the text's tokens, one
term per depth with weights beta^k; each depth attends causally to the keys of the same depth. Its MTP model accepts
none of its other losses.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bebop.data.batches import IndexedBatch, TrainBatch
from bebop.errors import ConfigError

PACKAGE, VERSION = "speculators", "0.9.0"
OPTIMIZERS: tuple[Literal["muon", "adamw"], ...] = ("muon", "adamw")


@dataclass(frozen=True)
class Options:
    """What its command line offers for MTP; the defaults are its own."""

    lr: float = 1e-3
    optimizer: Literal["muon", "adamw"] = "muon"
    beta: float = 0.6  # weight of each depth by that of the one before

    @property
    def name(self) -> str:
        return f"{self.optimizer} lr {self.lr:g} beta {self.beta:g}"


def require() -> None:
    """Raise ConfigError unless the package is installed in the version that this comparison is written for."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        installed = "none"
    if installed != VERSION:
        raise ConfigError(
            f"{PACKAGE}: got version {installed}, expected {VERSION}; install it with "
            "`.venv/bin/uv pip install --no-deps -r requirements/bench-speculators.in`"
        )


def load(policy: Path, depth: int) -> Any:
    """Its model with the policy's native heads, embeddings and lm_head, frozen except for the heads."""
    from speculators.models.mtp import MTPDraftModel
    from transformers import AutoConfig

    for name in (PACKAGE, "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    config = AutoConfig.from_pretrained(policy).get_text_config()
    model = MTPDraftModel.from_training_args(
        config, num_speculative_steps=depth, verifier_name_or_path=str(policy)
    ).float()
    return model


def empty(config: Any, depth: int) -> Any:
    """Its model for a decoder of `config` (transformers'), with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    own = SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depth)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=config, speculators_config=own))
    for shared in (model.embed_tokens, model.lm_head):
        torch.nn.init.normal_(shared.weight.requires_grad_(False))
    return model


def sample(indexed: IndexedBatch, batch: TrainBatch) -> dict[str, Any]:
    """A packed batch in the form of its collate function; positions restart where a document does."""
    bounds = batch.cu_seqlens.diff()
    return {
        "input_ids": batch.input_ids[None],
        "hidden_states": batch.hidden[None],
        "loss_mask": indexed.packed.loss_mask[None].long(),
        "position_ids": batch.position_ids[None],
        "document_ids": torch.arange(len(bounds)).repeat_interleave(bounds.cpu())[None],
        "error_records": 0,
    }


def train(policy: Path, samples: Sequence[dict[str, Any]], depth: int, options: Options, seed: int, dest: Path) -> Path:
    """One optimizer step of its Trainer for each of `samples`, in order; writes the policy with the heads to `dest`.

    The rest has its command line's defaults: linear schedule, 1 % warm-up, gradient clip 1, its weight decays.
    """
    from speculators.cli.stitch import stitch
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    class HereTrainer(Trainer):
        """Its trainer assumes a GPU; without one it is given the CPU, and its GPU timer never starts."""

        def setup_trainer(self) -> None:
            super().setup_trainer()
            if not torch.cuda.is_available():
                self.local_rank, self.device_type = "cpu", "cpu"
                self.global_step = 1

    torch.manual_seed(seed)
    model = load(policy, depth)
    call, _ = model.get_trainer_kwargs(num_speculative_steps=depth, step_weight_beta=options.beta)
    with tempfile.TemporaryDirectory() as folder:
        trainer = HereTrainer(
            model,
            TrainerConfig(
                lr=options.lr,
                muon_lr=options.lr,
                optimizer=options.optimizer,
                num_epochs=1,
                save_path=folder,
                train_call_kwargs=call,
                hidden_states_dtype=torch.float32,
                log_freq=len(samples) + 2,
            ),
            DataLoader(list(samples), batch_size=None),
        )
        trainer.train_epoch(0)
        trained = Path(folder) / "trained"
        model.cpu().save_pretrained(trained)
        stitch(trained, policy, dest)
    return dest


def hidden(model: Any, one: dict[str, Any]) -> list[Tensor]:
    """Its heads' outputs per depth on one sample, [T', D] each, T' its common length of all depths."""
    outputs: list[Tensor] = []
    hook = model.mtp_layers[0].register_forward_hook(lambda _, __, output: outputs.append(output[0].detach()))
    try:
        with torch.no_grad():
            model(**{key: value for key, value in one.items() if key != "error_records"})
    finally:
        hook.remove()
    return outputs
