"""Prompts, tasks with verifiable rewards, tokenization; packing and the labels of every draft depth."""

from bebop.data.tokenizer import encode_prompt, load_tokenizer

__all__ = ["encode_prompt", "load_tokenizer"]
