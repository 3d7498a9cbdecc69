"""Properties of the tiny policy's text: every string survives its tokenizer, every worked solution is right."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.data.tasks import extract_answer, worked_solution
from bebop.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_random):
    return load_tokenizer(tiny_random)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_up_to_unicode_normal_form(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
    assert all(0 <= i < len(tokenizer) for i in ids)


@given(terms=st.lists(st.integers(-9999, 9999), min_size=1, max_size=6), data=st.data())
def test_chain_sum_steps_end_in_the_sum(terms, data):
    operators = data.draw(st.lists(st.sampled_from("+-"), min_size=len(terms) - 1, max_size=len(terms) - 1))
    expression = str(terms[0]) + "".join(f" {op} {t}" for op, t in zip(operators, terms[1:], strict=True))
    text = worked_solution("chain_sum", {"metadata": {"expression": expression}})
    assert int(extract_answer(text)) == eval(expression)
