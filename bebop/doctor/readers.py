"""Whether every reader takes a policy directory for the same policy: their log-probabilities of one text, in pairs.

| reader         | what it reads                                                                        |
|----------------|--------------------------------------------------------------------------------------|
| transformers   | the directory that model.path names, by its own class, without any of bebop's code   |
| backbone       | the prepared policy, as head training and scoring read it                            |
| <engine>       | the prepared policy, as the rollout engine serves it, for each engine that runs it   |

Rules refuse what is known to be read differently (bebop.mtp.reading); this finds what no rule foresaw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bebop.backbone import load_backbone
from bebop.config import RolloutSection
from bebop.data.tokenizer import load_tokenizer, num_token_ids
from bebop.doctor.checks import Row
from bebop.engines import ENGINES, make_engine
from bebop.errors import BadInput, EngineError
from bebop.mtp.reading import quiet

TEXT = 'What is 12 + 34 - 5? Think step by step: 12 + 34 = 46, 46 - 5 = 41.\nAnswer: [41] ("forty-one", naïvely). '
LENGTH = 192  # tokens: long enough for rotary positions to part


def text_ids(policy_dir: Path) -> list[int]:
    """The text in a policy's own tokens, then ids from all over its vocabulary."""
    tokenizer = load_tokenizer(policy_dir)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)[: LENGTH // 2]
    num_ids, generator = num_token_ids(policy_dir), torch.Generator().manual_seed(0)
    return ids + torch.randint(num_ids, (LENGTH - len(ids),), generator=generator).tolist()


@torch.no_grad()
def by_transformers(directory: Path, ids: list[int]) -> Tensor:
    """Log-probability of each token after the first, [T - 1], over the tokenizer's ids."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return _of_tokens(model(torch.tensor([ids])).logits[0, :, : num_token_ids(directory)], ids)


@torch.no_grad()
def by_backbone(directory: Path, ids: list[int]) -> Tensor:
    """As `by_transformers`, from the hidden states and the output matrix that heads are trained on."""
    backbone, tokens = load_backbone(directory, dtype=torch.float32), torch.tensor(ids)
    hidden = backbone.hidden(tokens, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
    return _of_tokens(hidden @ backbone.lm_head_weight.T, ids)


def by_engine(name: str, directory: Path, ids: list[int]) -> Tensor:
    """As `by_transformers`, by a rollout engine without speculation. Raises EngineError where it does not run it."""
    section = RolloutSection(
        engine=name, speculation="none", max_num_seqs=1, max_model_len=LENGTH + 8, kv_cache_gib=0.25
    )
    with make_engine(section, directory) as engine:
        return torch.tensor(engine.prompt_logprobs([ids])[0])


def check_readers(source: Path, policy_dir: Path, limit: float, engines: Iterable[str] | None = None) -> Iterator[Row]:
    """Rows for every pair of readers; one for an engine that does not run the policy. limit: of the difference, in
    nats, that any token may show. source: what transformers reads, policy_dir: what all others do;
    engines: names of some; None: all that are registered."""
    ids = text_ids(policy_dir)
    found = {"transformers": by_transformers(source, ids), "backbone": by_backbone(policy_dir, ids)}
    for name in ENGINES if engines is None else engines:
        try:
            found[name] = by_engine(name, policy_dir, ids)
        except (EngineError, BadInput) as error:
            yield Row(f"reader {name}", str(error), "runs the policy", None)
    yield from compare(found, limit)


def compare(found: Mapping[str, Tensor], limit: float) -> Iterator[Row]:
    """One row for each pair of readers. found: reader -> log-probabilities of the same tokens."""
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        difference = float((first - second).abs().max())
        at = int((first - second).abs().argmax()) + 1
        yield Row(
            f"{one} and {other}",
            f"log-probabilities differ by at most {difference:.1e}, at token {at} of {len(first) + 1}",
            f"at most {limit:.0e}",
            difference <= limit,
        )


def _of_tokens(logits: Tensor, ids: list[int]) -> Tensor:
    logprobs = logits[:-1].float().log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
