"""Open prompts: requests without a single right answer, for heads that must also draft ordinary text.

Every form below is combined with every subject; item i is the i-th pair in a fixed shuffled order. There is no
verifier, so these prompts only train and score heads; GRPO refuses them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from bebop.errors import BadInput

NAME = "open_prompts"

FORMS = (
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a polite e-mail that asks a colleague about {}.",
    "Give step-by-step advice to someone who is new to {}.",
    "Write a short dialogue between two friends about {}.",
    "Summarise the history of {} in one paragraph.",
    "Write a product description that has to do with {}.",
    "What questions would you ask an expert on {}?",
    "Write a short poem about {}.",
    "Describe {} without using any adjectives.",
    "Compare {} today with fifty years ago.",
    "Write three quiz questions about {}, with their answers.",
    "Argue for more public money for {}, then argue against it.",
    "What do beginners get wrong about {}?",
)
SUBJECTS = (
    "baking bread", "bicycles", "lighthouses", "the water cycle", "chess", "learning a language", "bees", "volcanoes",
    "public libraries", "night trains", "vegetable gardens", "photography", "sleep", "rivers", "maps", "recycling",
    "jazz", "solar power", "city parks", "cooking rice", "antibiotics", "sailing", "the moon", "earthquakes",
    "letter writing", "swimming", "coffee", "coral reefs", "robots", "dinosaurs", "knitting", "electric cars",
    "mountain hiking", "bridges", "the post office", "first aid", "mushrooms", "spreadsheets", "theatre", "insurance",
    "rain", "remote work", "museums", "running a small shop", "drinking water", "cats", "exams", "markets",
)  # fmt: skip


class OpenPrompts:
    """Item i is {"question", "answer": None}. After the last pair, i starts again at the first, as in reasoning-gym."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        if params:
            raise BadInput(f"data.tasks {NAME}: takes no params, got {dict(params)}")
        self._pairs = [(form, subject) for form in FORMS for subject in SUBJECTS]
        random.Random(NAME).shuffle(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        form, subject = self._pairs[index % len(self._pairs)]
        return {"question": form.format(subject), "answer": None}
