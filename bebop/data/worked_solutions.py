"""Worked solutions: the steps to an answer, column by column, then the line `Answer: <number>`.

Every step is short enough for a tiny model to learn: a column adds or subtracts single digits, with the carry or borrow
of the previous column. `Hand` makes mistakes: a fraction of the columns is off by one, and the error is carried on; a
fraction of the solutions has no `Answer:`, so that the verifier gives no reward. A policy trained on such text is often
wrong when it samples, and RL can improve it: first the form of the answer, then the mistakes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from bebop.errors import BadInput

WORDS = ("First", "Now", "Then", "Next", "So")
MARKED, UNMARKED = "Answer:", "So"


class Hand:
    """Writes solutions: chooses words, gets a fraction `slip_rate` of the columns wrong by one, and leaves `Answer:`
    out of a fraction `unmarked_share` of the solutions.

    Without a seed it takes the first word, makes no mistakes and marks every answer.
    """

    def __init__(self, slip_rate: float = 0.0, unmarked_share: float = 0.0, seed: int | str | None = None) -> None:
        for name, value in (("slip_rate", slip_rate), ("unmarked_share", unmarked_share)):
            if not 0 <= value <= 1:
                raise BadInput(f"{name}={value}: expected a share, 0 to 1")
        self.slip_rate, self.unmarked_share = slip_rate, unmarked_share
        self._random = None if seed is None else random.Random(seed)

    def column(self, value: int) -> int:
        """The result of a column, sometimes off by one."""
        if self._random is None or self._random.random() >= self.slip_rate:
            return value
        return max(0, value + self._random.choice((-1, 1)))

    def word(self) -> str:
        return self._random.choice(WORDS) if self._random else WORDS[0]

    def end(self) -> str:
        """The text before the answer."""
        unmarked = self._random is not None and self._random.random() < self.unmarked_share
        return UNMARKED if unmarked else MARKED


def chain_sum(entry: Mapping[str, Any], hand: Hand) -> str:
    """`12 + 93 - 8`: a running total, one term at a time."""
    first, *others = re.findall(r"(?:([+-]) )?(-?\d+)", entry["metadata"]["expression"])
    total, lines = int(first[1]), []
    for operator, digits in others:
        total = _accumulate(total, operator, int(digits), hand, lines)
    return _finish(lines, hand, total)


WRITERS: dict[str, Callable[[Mapping[str, Any], Hand], str]] = {"chain_sum": chain_sum}


def _finish(lines: list[str], hand: Hand, answer: int) -> str:
    return "\n".join([*lines, f"{hand.end()} {answer}"])


def _accumulate(total: int, operator: str, term: int, hand: Hand, lines: list[str]) -> int:
    """Write the lines of `total operator term` and return its (maybe slipped) value."""
    head = f"{total} {operator} {term}"
    signed = term if operator == "+" else -term
    a, b = abs(total), abs(signed)
    if (total < 0) == (signed < 0):
        sign, columns = (-1 if total < 0 else 1), _add
    else:
        larger_first = a >= b
        sign = 1 if (total >= 0) == larger_first else -1
        a, b = (a, b) if larger_first else (b, a)
        columns = _subtract
    plain = f"{a} {'+' if columns is _add else '-'} {b}"
    plain = f"-({plain})" if sign < 0 else plain
    lines.append(f"{hand.word()} " + (head if plain == head else f"{head} = {plain}"))
    result = sign * columns(a, b, hand, lines)
    lines.append(f"= {result}")
    return result


def _digits(number: int, width: int) -> list[int]:
    """Digits, the ones first, padded with zeros to `width`."""
    return [int(digit) for digit in reversed(str(number).rjust(width, "0"))]


def _add(a: int, b: int, hand: Hand, lines: list[str]) -> int:
    width = max(len(str(a)), len(str(b)))
    carry, result = 0, 0
    for place, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        value = hand.column(x + y + carry)
        lines.append(f"{x} + {y}" + (f" + {carry}" if carry else "") + f" = {value}")
        carry, digit = divmod(value, 10)
        result += digit * 10**place
    return result + carry * 10**width


def _subtract(a: int, b: int, hand: Hand, lines: list[str]) -> int:
    """a - b for a >= b. A column that borrows is written with the borrowed ten."""
    width = len(str(a))
    borrow, result = 0, 0
    for place, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        taken = borrow
        borrow = int(x - y - taken < 0)
        value = min(9, hand.column(x + 10 * borrow - y - taken))
        lines.append(f"{x + 10 * borrow} - {y}" + (f" - {taken}" if taken else "") + f" = {value}")
        result += value * 10**place
    return result
