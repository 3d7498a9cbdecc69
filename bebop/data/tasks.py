"""TASKS: sources of prompts and scores of responses, by the name in `data.tasks`.

Every data set of reasoning-gym is a task under its own name. To add another:

    TASKS.register("echo", TaskSource(items=make_items, verify=lambda answer, item: answer == item["answer"]))

A response is scored by its answer: the text after the last `Answer:`, to the end of that line. In GRPO and eval the
verifier runs in a box, see `bebop.verifiers`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bebop.data import open_prompts
from bebop.data.worked_solutions import WRITERS, Hand
from bebop.errors import BadInput
from bebop.records import Prompt
from bebop.registry import Registry, load_plugins

ANSWER = "Answer:"
_loading = threading.Lock()
# Number of items to request from the data sets that build all of their items, or search for them, when they are made.
LISTED = {"acre": 2**11, "gsm_symbolic": 2**20, "list_functions": 2**20, "word_ladder": 2**12}


@dataclass(frozen=True)
class TaskSource:
    """One task.

    items: params (of data.tasks) -> an object whose item i, for i in [0, num_items), is a mapping with `question` and
    everything that the verifier needs, JSON-serialisable. It depends only on params and i.
    verify: (answer, item) -> reward in [0, 1]; None for prompts without a right answer: they only train and score
    heads.
    """

    items: Callable[[Mapping[str, Any]], Any]
    verify: Callable[[str, Mapping[str, Any]], float] | None
    num_items: int = 2**31


TASKS: Registry[TaskSource] = Registry("task", key="data.tasks")
TASKS.register(open_prompts.NAME, TaskSource(items=open_prompts.OpenPrompts, verify=None))


def source(name: str) -> TaskSource:
    """The registered task of that name, or reasoning-gym's. Raises BadInput for an unknown name."""
    return TASKS[name] if name in TASKS else _reasoning_gym(name)


def _reasoning_gym(name: str) -> TaskSource:
    def verify(answer: str, entry: Mapping[str, Any]) -> float:
        item = dict(entry)
        return float(_gym_items(name, json.dumps(item.pop("params", {}), sort_keys=True)).score_answer(answer, item))

    if name not in _gym():
        like = difflib.get_close_matches(name, _gym(), n=1)
        hint = f"did you mean {like[0]}?" if like else f"those with worked solutions are {', '.join(WRITERS)}"
        raise BadInput(f"data.tasks name={name!r}: neither a registered task nor a data set of reasoning-gym; {hint}")
    return TaskSource(
        lambda params: _gym_items(name, json.dumps(params, sort_keys=True)), verify, LISTED.get(name, 2**31)
    )


def _gym() -> Mapping[str, Any]:
    # The package whole before its registry: verifiers run in threads, and a thread that imports only the registry
    # while another is still importing the package finds it half filled.
    with _loading:
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    return DATASETS


@lru_cache(maxsize=64)
def _gym_items(name: str, params: str) -> Any:
    from reasoning_gym.factory import create_dataset

    values = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(params).items()}
    for key in ("seed", "size"):
        if key in values:
            raise BadInput(f"data.tasks {name}: params.{key} is bebop's own (seed, num_prompts); leave it out")
    try:
        return create_dataset(name, seed=0, size=LISTED.get(name, 2**31), **values)
    except (TypeError, AssertionError, ValueError) as error:
        raise BadInput(f"data.tasks {name} params={values}: reasoning-gym refuses them: {error}") from None


def dataset(name: str, params: Mapping[str, Any]) -> Any:
    """The items of a task. Raises BadInput for an unknown name or parameter."""
    return source(name).items(params)


def has_verifier(name: str) -> bool:
    """Whether responses to the task can be rewarded."""
    return source(name).verify is not None


def worked_solution(task: str, entry: Mapping[str, Any], hand: Hand | None = None) -> str | None:
    """Steps, then the answer line, as `hand` writes them (data.worked_solutions); None for a task without a writer."""
    writer = WRITERS.get(task)
    return writer(entry, hand or Hand()) if writer else None


def extract_answer(response: str) -> str | None:
    """The text after the last `Answer:` of a response, to the end of its line; None without one."""
    _, found, rest = response.rpartition(ANSWER)
    if not found:
        return None
    line = rest.strip().split("\n", 1)[0]
    return line.split("<|", 1)[0].strip() or None


def score(prompt: Prompt, response: str) -> float:
    """Reward in [0, 1]: the task's verifier on the extracted answer; 0 for a response without an answer line."""
    verify = source(prompt.task).verify
    if verify is None:
        raise BadInput(f"data.tasks name={prompt.task}: has no verifier, so no reward; choose another task")
    answer = extract_answer(response)
    return 0.0 if answer is None else min(1.0, max(0.0, float(verify(answer, prompt.entry))))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """`score` with the arguments of a verl reward function; ground_truth is the prompt as `pack` writes it."""
    return score(unpack(ground_truth), solution_str)


def _prepare(ground_truth: str | None) -> None:
    """Import the verifiers, or make the data set that a prompt comes from: see `bebop.verifiers.helper`."""
    if ground_truth is None:
        load_plugins()
        _gym()
    else:
        prompt = unpack(ground_truth)
        dataset(prompt.task, prompt.entry.get("params", {}))


compute_score.prepare = _prepare  # type: ignore[attr-defined]


def pack(prompt: Prompt) -> str:
    """A prompt without its worked solution, as JSON: everything that its verifier needs."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(prompt, solution=None, entry=dict(prompt.entry))))


def unpack(text: str) -> Prompt:
    """The inverse of `pack`."""
    return Prompt(**json.loads(text))
