"""The tokenizer of the tiny policy, and how a prompt becomes token ids.

Byte-level BPE in Qwen2's layout: `model_type: qwen2` makes transformers load every tokenizer of the policy through
`Qwen2Tokenizer`, whose pre-tokenizer splits text into words and *single digits*, so that every digit is one token. The
vocabulary is the 256 bytes, then the merges for the fixed words of our tasks, then the special tokens. It is built only
from `WORDS`, so the ids are the same everywhere and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bebop.errors import BadInput, first_line
from bebop.records import Prompt

# Fixed words of the tasks' questions and of our worked solutions: one token each after a space, a few pieces at the
# start of a line.
WORDS = (
    "State the final answer to the following arithmetic problem:",
    "Solve the following multiplication: Give only the result as your final answer.",
    "Find the value of in the equation: Solve for: Determine the value of that satisfies:",
    "Answer: First Now Then Next So + - * / = ( ) -( .\n",
)
END, PAD, USER, ASSISTANT = "<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>"
SPECIAL = (END, PAD, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "<|endoftext|>{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_tokenizer(directory: Path) -> int:
    """Write the tiny tokenizer's files into `directory` and return the size of its vocabulary."""
    vocab, merges = _tiny_vocabulary()
    _write(directory, vocab, merges, SPECIAL, pad=PAD)
    return len(vocab) + len(SPECIAL)


def write_integer_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer of exactly `size` ids, for models that are run only on token ids; id 0 ends a text.

    Raises ValueError if `size` is below 4 or above 257.
    """
    letters = [char for _, char in sorted(_byte_characters().items())]
    letters = letters[ord("a") :] + letters[: ord("a")]
    if not 4 <= size <= len(letters) + 1:
        raise BadInput(f"vocab={size}: an integer vocabulary has 4 to {len(letters) + 1} ids")
    vocab = {END: 0} | {letter: i + 1 for i, letter in enumerate(letters[: size - 1])}
    _write(directory, vocab, [], (END,), pad=END)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of the policy in `path`, as every stage loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in `path`. Raises BadInput, one line, where none can be read."""
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:  # transformers and tokenizers raise whatever their readers run into
        raise BadInput(f"{path}: no tokenizer can be read there: {first_line(error)}") from None
    files = sorted(set(tokenizer.vocab_files_names.values()))
    if not any((Path(path) / file).is_file() for file in files):  # transformers then makes an empty one
        raise BadInput(f"{path}: no tokenizer can be read there: expected one of {', '.join(files)}")
    return tokenizer


def num_ids_of(tokenizer: Any) -> int:
    """How many ids a tokenizer has: the highest and all below it, added tokens included.

    A model may have more embeddings, for rounder sizes; these padding ids are never sampled, supervised or scored.
    """
    return max(tokenizer.get_vocab().values()) + 1


def num_token_ids(path: Path) -> int:
    """`num_ids_of` the tokenizer of a policy directory. Raises BadInput where none can be read."""
    return num_ids_of(read_tokenizer(path))


class TemplateRaised(BadInput):
    """A chat template rejected these messages, or failed on them."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, prompt: bool, tools: Any = None) -> list[int]:
    """Token ids of messages in the tokenizer's chat template. prompt: with the generation prompt after them.

    Raises BadInput if the tokenizer has no chat template, TemplateRaised if the template raises.
    """
    if not tokenizer.chat_template:
        raise BadInput(
            f"tokenizer of {tokenizer.name_or_path}: it has no chat template; add chat_template.jinja to the policy"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        return list(text)
    except Exception as error:  # a template is a program and may raise anything
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TemplateRaised(f"the chat template raises: {why[:100]}") from error


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of one prompt: the chat template around one user turn, with the generation prompt.

    Raises BadInput if the tokenizer has no chat template, or if the template raises.
    """
    try:
        return render(tokenizer, [{"role": "user", "content": prompt.text}], prompt=True)
    except TemplateRaised as error:
        raise TemplateRaised(
            f"tokenizer of {tokenizer.name_or_path}: {error}, on the prompt {prompt.prompt_id}; check its chat template"
        ) from error


@lru_cache
def _tiny_vocabulary() -> tuple[dict[str, int], list[str]]:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    characters = _byte_characters()
    vocab = {char: byte for byte, char in characters.items()}
    merges: list[str] = []
    split = Qwen2Tokenizer()._tokenizer.pre_tokenizer.pre_tokenize_str
    for text in WORDS:
        for word, _ in split(text):
            _spell(word, vocab, merges)
            _spell("Ġ" + word.removeprefix("Ġ"), vocab, merges)
    return vocab, merges


def _spell(word: str, vocab: dict[str, int], merges: list[str]) -> None:
    """Add the merges that make `word` one token, after those already there."""
    parts = list(word)
    for merge in merges:
        parts = _apply(parts, *merge.split(" "))
    while len(parts) > 1:
        merges.append(f"{parts[0]} {parts[1]}")
        vocab.setdefault(parts[0] + parts[1], len(vocab))
        parts = _apply(parts, parts[0], parts[1])


def _apply(parts: list[str], left: str, right: str) -> list[str]:
    merged, i = [], 0
    while i < len(parts):
        pair = parts[i : i + 2] == [left, right]
        merged.append(left + right if pair else parts[i])
        i += 2 if pair else 1
    return merged


def _byte_characters() -> dict[int, str]:
    """Byte -> the printable character for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _write(directory: Path, vocab: dict[str, int], merges: list[str], special: tuple[str, ...], pad: str) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token=END,
        eos_token=END,
        pad_token=pad,
        additional_special_tokens=[token for token in special if token not in (END, pad)],
        chat_template=CHAT_TEMPLATE if len(special) > 1 else None,
        model_max_length=4096,
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)


def token_ids(directory: Path) -> tuple[int, int]:
    """(end, pad) ids of the tokenizer in `directory`."""
    config = json.loads((directory / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in config["added_tokens"]}
    return ids[END], ids.get(PAD, ids[END])
