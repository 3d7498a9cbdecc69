"""Tasks with a verifiable reward: reasoning-gym's data sets, and its verifiers on the answer that ends a response."""

from __future__ import annotations

import dataclasses
import difflib
import json
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from bebop.data import open_prompts
from bebop.data.worked_solutions import WRITERS, Hand
from bebop.errors import BadInput
from bebop.records import Prompt

ANSWER = "Answer:"
_loading = threading.Lock()


# Number of items to request from the data sets that build all of their items, or search for them, when they are made.
LISTED = {"acre": 2**11, "gsm_symbolic": 2**20, "list_functions": 2**20, "word_ladder": 2**12}


def num_items(name: str) -> int:
    """Number of items to request. In tasks of `LISTED` item i may depend on this number, in no other task."""
    return LISTED.get(name, 2**31)


@lru_cache(maxsize=64)
def _dataset(name: str, params: str) -> Any:
    if name == open_prompts.NAME:
        if json.loads(params):
            raise BadInput(f"data.tasks {name}: takes no params, got {params}")
        return open_prompts.OpenPrompts()
    # The package whole before its registry: verifiers run in threads, and a thread that imports the registry alone
    # while another is still importing the package finds it half filled.
    with _loading:
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        like = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {like[0]}?" if like else f"those with worked solutions are {', '.join(WRITERS)}"
        raise BadInput(f"data.tasks name={name!r}: reasoning-gym has no such data set; {hint}")
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(params).items()}
    for key in ("seed", "size"):
        if key in values:
            raise BadInput(f"data.tasks {name}: params.{key} is bebop's own (seed, num_prompts); leave it out")
    try:
        return create_dataset(name, seed=0, size=num_items(name), **values)
    except (TypeError, AssertionError, ValueError) as error:
        raise BadInput(f"data.tasks {name} params={values}: reasoning-gym refuses them: {error}") from None


def dataset(name: str, params: Mapping[str, Any]) -> Any:
    """reasoning-gym's data set; item i of it depends on i alone. Raises ValueError on an unknown name or parameter."""
    return _dataset(name, json.dumps(params, sort_keys=True))


def has_verifier(name: str) -> bool:
    """Whether responses to the task can be rewarded; open prompts can only train and score heads."""
    return name != open_prompts.NAME


def worked_solution(task: str, entry: Mapping[str, Any], hand: Hand | None = None) -> str | None:
    """Steps, then the answer line, as `hand` writes them (data.worked_solutions); None for a task without a writer."""
    writer = WRITERS.get(task)
    return writer(entry, hand or Hand()) if writer else None


def extract_answer(response: str) -> str | None:
    """What stands behind the last `Answer:` of a response, to the end of its line; None where there is none."""
    _, found, rest = response.rpartition(ANSWER)
    if not found:
        return None
    line = rest.strip().split("\n", 1)[0]
    return line.split("<|", 1)[0].strip() or None


def score(prompt: Prompt, response: str) -> float:
    """Reward in [0, 1]: reasoning-gym's verifier on the extracted answer; 0 for a response without an answer line."""
    if not has_verifier(prompt.task):
        raise BadInput(f"data.tasks name={prompt.task}: has no verifier, so no reward; choose another task")
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    entry = dict(prompt.entry)
    value = dataset(prompt.task, entry.pop("params", {})).score_answer(answer, entry)
    return min(1.0, max(0.0, float(value)))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """`score` with the arguments of a verl reward function; ground_truth is the prompt as `pack` writes it."""
    return score(unpack(ground_truth), solution_str)


def _prepare(ground_truth: str | None) -> None:
    """Import the verifiers, or make the data set that a prompt comes from: see `bebop.verifiers.helper`."""
    if ground_truth is None:
        import reasoning_gym  # noqa: F401
    else:
        prompt = unpack(ground_truth)
        dataset(prompt.task, prompt.entry.get("params", {}))


compute_score.prepare = _prepare  # type: ignore[attr-defined]


def pack(prompt: Prompt) -> str:
    """A prompt without its worked solution, as JSON: all that its verifier needs."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(prompt, solution=None, entry=dict(prompt.entry))))


def unpack(text: str) -> Prompt:
    """The inverse of `pack`."""
    return Prompt(**json.loads(text))
