"""A policy's tokenizer and chat template: the same ids in the trainer, the engine and the reward worker.

Three kinds, each built here and put beside models as people publish them: byte-level BPE with ChatML; Llama 3's,
without an unknown token and without <|im_end|>; sentencepiece's, BPE with byte fallback or Unigram.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bebop.config import Model
from bebop.data.tokenizer import encode_prompt, load_tokenizer
from bebop.policies import prepare_policy, random_checkpoint
from bebop.records import Prompt

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")
CORPUS = [
    "State the answer to 12 + 345 = 357.\n",
    "Now  it's the first step; don't stop.\n",
    "user system assistant\n",
] * 4
TEXTS = (
    "What is 12 + 3456?",
    " it's  two  spaces\n\n\tand a tab; don't\r\n",
    "héllo e\u0301 ✓ 日本 🙂 3.14",
    "user\n[INST] <s> <|im_start|> <|eot_id|> </s>",
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def byte_level(split: str, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def qwen() -> tuple[Tokenizer, dict]:
    tokenizer = byte_level(QWEN2_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, config | {"chat_template": CHATML, "unk_token": None, "bos_token": None}


def llama3() -> tuple[Tokenizer, dict]:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(LLAMA3_SPLIT, special)
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B", special_tokens=[begin]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[-1]}
    return tokenizer, config | {"chat_template": LLAMA3_CHAT}


def sentencepiece() -> tuple[Tokenizer, dict]:
    """Llama 2's and Mistral's: BPE with byte fallback, spaces as ▁, one in front of the text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for word in ("▁the", "▁is", "▁answer", "▁step", "12"):
        parts = list(word)
        for part in parts:
            vocab.setdefault(part, len(vocab))
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = ["".join(parts[:2]), *parts[2:]]
            vocab.setdefault(parts[0], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(pieces[:3])
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, config | {"add_bos_token": True, "legacy": False, "chat_template": INST_CHAT}


def unigram() -> tuple[Tokenizer, dict]:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    words = ["▁the", "▁is", "▁answer", "▁step", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,+=?[]/'"]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((w, -2.0 - i / 10) for i, w in enumerate(words))], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer, config | {"unk_token": "<unk>", "chat_template": INST_CHAT}


KINDS = [
    (qwen, "qwen2", {}),
    (qwen, "qwen3", {"head_dim": 16}),
    (llama3, "llama", {}),
    (llama3, "qwen2", {}),
    (sentencepiece, "llama", {}),
    (sentencepiece, "mistral", {"sliding_window": None}),
    (unigram, "llama", {"tie_word_embeddings": True}),
]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def policy(request, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A directory as published, and the policy made of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make, model_type, values = request.param
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    tokenizer, config = make()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {"vocab_size": tokenizer.get_vocab_size() + 8, "intermediate_size": 32}
    source = tmp_path / "published"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape, **size, **values)).save_pretrained(
        source
    )
    tokenizer.save(str(source / "tokenizer.json"))
    template = config.pop("chat_template")
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "chat_template.jinja").write_text(template)
    return source, prepare_policy(Model(name="hf", path=source), 0)


def loaded(directory: Path) -> dict[str, object]:
    """The tokenizer of `directory` by the code of each process of a run."""
    from transformers import AutoTokenizer
    from verl.utils import hf_tokenizer
    from vllm.tokenizers.registry import get_tokenizer

    return {
        "bebop": load_tokenizer(directory),
        "trainer": hf_tokenizer(str(directory), trust_remote_code=False),
        "reward worker": hf_tokenizer(str(directory), trust_remote_code=True),
        "transformers": AutoTokenizer.from_pretrained(directory, trust_remote_code=True),
        "engine": get_tokenizer(str(directory)),
        "engine, trusting": get_tokenizer(str(directory), trust_remote_code=True),
    }


def test_every_process_of_a_run_reads_the_same_ids(policy):
    source, made = policy
    published = load_tokenizer(source)
    prompt = Prompt(prompt_id="p", task="t", text=TEXTS[0])
    chat = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": "it is 3468"}]
    expected = {
        "text": [published.encode(text) for text in TEXTS],
        "bare": [published.encode(text, add_special_tokens=False) for text in TEXTS],
        "chat": published.apply_chat_template(chat, tokenize=True, return_dict=False),
        "prompt": encode_prompt(published, prompt),
    }
    spelled = [published.decode(ids, skip_special_tokens=True) for ids in expected["text"]]
    marks = (published.eos_token_id, published.bos_token_id, published.unk_token_id, len(published))
    for name, tokenizer in loaded(made).items():
        got = {
            "text": [tokenizer.encode(text) for text in TEXTS],
            "bare": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
            "chat": tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False),
            "prompt": encode_prompt(tokenizer, prompt),
        }
        assert got == expected, name
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected["text"]] == spelled, name
        assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, len(tokenizer)) == marks, name


def test_verl_builds_the_prompt_that_bebop_builds(policy):
    """verl picks a builder by the model type; one whose marks the tokenizer lacks must not be used."""
    from verl.utils import hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from bebop.rl.rollout.agent import type_of_builder

    _, made = policy
    tokenizer = hf_tokenizer(str(made))
    model_type = json.loads((made / "config.json").read_text())["model_type"]
    chosen = type_of_builder(tokenizer, model_type)
    chats_as_qwen = "<|im_end|>" in tokenizer.get_vocab()
    assert chosen == (model_type if chats_as_qwen or not model_type.startswith("qwen") else None)
    built = create_continuous_token_builder(tokenizer, hf_model_type=chosen)
    assert built.build_initial_tokens([{"role": "user", "content": TEXTS[0]}]) == encode_prompt(
        tokenizer, Prompt(prompt_id="p", task="t", text=TEXTS[0])
    )


def test_bebops_own_tokenizer_loads_everywhere_alike(tmp_path):
    """The tiny policy has Qwen2's shapes, so transformers rebuilds its tokenizer as Qwen2's: it must be one."""
    from bebop.rl.rollout.agent import type_of_builder

    made = random_checkpoint(tmp_path / "tiny")
    by_process = {name: [t.encode(text) for text in TEXTS] for name, t in loaded(made).items()}
    whole = Tokenizer.from_file(str(made / "tokenizer.json"))
    expected = [whole.encode(text).ids for text in TEXTS]
    assert all(ids == expected for ids in by_process.values()), by_process.keys()
    assert type_of_builder(load_tokenizer(made), "qwen2") is None
    assert "auto_map" not in (made / "tokenizer_config.json").read_text()
