"""A model with more embeddings than its tokenizer has ids: the padding is sampled, supervised and scored nowhere."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from bebop.backbone import load_backbone
from bebop.backbone.loading import mask_padding
from bebop.config import RolloutSection
from bebop.data.tokenizer import load_tokenizer, num_token_ids
from bebop.engines import make_engine
from bebop.errors import BadInput
from bebop.policies import random_checkpoint
from bebop.records import Sampling

PADDING = 64
KINDS = ["qwen2", "llama", "mistral"]


@pytest.fixture(scope="module", params=KINDS)
def policy(request, tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("padded") / "p", model_type=request.param, padding=PADDING)


def test_added_tokens_are_ids_of_the_tokenizer(tmp_path):
    path = random_checkpoint(tmp_path / "p")
    before = num_token_ids(path)
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save_pretrained(path)
    assert num_token_ids(path) == before + 2


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    path = random_checkpoint(tmp_path / "p")
    for file in path.glob("token*"):
        file.unlink()
    with pytest.raises(BadInput, match="no tokenizer can be read there") as caught:
        load_backbone(path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_the_backbone_scores_the_tokenizers_ids_only(policy):
    backbone, ids = load_backbone(policy, dtype=torch.float32), torch.arange(5, 25).unsqueeze(0)
    num_ids = num_token_ids(policy)
    plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert backbone.config.vocab_size == num_ids + PADDING and len(backbone.lm_head_weight) == num_ids
    wanted = plain(ids).logits[..., :num_ids].log_softmax(-1)
    got = backbone.model(ids).logits.log_softmax(-1)
    assert (got[..., :num_ids] - wanted).abs().max() < 1e-6
    assert (got[..., num_ids:].exp() == 0).all()
    hidden = backbone.hidden(ids[0], torch.arange(20), torch.tensor([0, 20]))
    assert ((hidden @ backbone.lm_head_weight.T).log_softmax(-1) - wanted[0]).abs().max() < 1e-5
    with pytest.raises(BadInput, match=rf"expected ids in \[0, {num_ids}\)"):
        backbone.hidden(torch.tensor([num_ids]), torch.tensor([0]), torch.tensor([0, 1]))


@pytest.mark.parametrize("speculation", ["mtp", "none"])
def test_torch_engine_samples_no_padding_and_gives_the_trainers_logprobs(policy, speculation):
    num_ids = num_token_ids(policy)
    section = RolloutSection(engine="torch", speculation=speculation, max_num_seqs=16, max_model_len=96)
    sampling = Sampling(temperature=1.0, max_tokens=40, ignore_eos=True)
    with make_engine(section, policy) as engine:
        rollouts = engine.generate([(5, 6, 7)] * 16, sampling)
    tokens = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids] for rollout in rollouts])
    assert tokens[:, 3:].numel() == 640 and int((tokens >= num_ids).sum()) == 0
    trainer = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    mask_padding(trainer, num_ids)
    logprobs = trainer(tokens).logits[:, 2:-1].log_softmax(-1)
    of_tokens = logprobs.gather(-1, tokens[:, 3:].unsqueeze(-1)).squeeze(-1)
    sampled = torch.tensor([rollout.logprobs for rollout in rollouts])
    assert (of_tokens.exp() - sampled.exp()).abs().max() < 1e-5


def test_the_trainers_gradient_and_entropy_have_no_padding(policy):
    num_ids, ids = num_token_ids(policy), torch.arange(5, 25).unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    wanted = torch.distributions.Categorical(logits=model(ids).logits[..., :num_ids] / 0.7).entropy()
    mask_padding(model, num_ids)
    logits = model(ids).logits / 0.7
    probs = logits.softmax(-1)
    entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)  # as verl computes it
    assert (entropy - wanted).abs().max() < 1e-5
    (entropy.mean() + logits.log_softmax(-1)[..., 7].mean()).backward()
    gradient = model.get_output_embeddings().weight.grad
    assert gradient.isfinite().all() and gradient[:num_ids].abs().max() > 0 and not gradient[num_ids:].any()
