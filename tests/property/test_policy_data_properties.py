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


@given(factors=st.lists(st.integers(-999, 999), min_size=1, max_size=3))
def test_product_steps_end_in_the_product(factors):
    expression = " * ".join(map(str, factors))
    text = worked_solution("products", {"metadata": {"expression": expression}})
    assert int(extract_answer(text)) == eval(expression)


@given(a=st.integers(-99, 99).filter(bool), b=st.integers(-99, 99).filter(bool), x=st.integers(1, 99))
def test_equation_steps_end_in_the_solution(a, b, x):
    slope = {1: "x", -1: "-x"}.get(a, f"{a}*x")
    left = f"{slope} {'+' if b > 0 else '-'} {abs(b)}" if a > 0 else f"{b} - {slope[1:]}"
    text = worked_solution("simple_equations", {"metadata": {"equation": f"{left} = {a * x + b}", "variable": "x"}})
    assert int(extract_answer(text)) == x
