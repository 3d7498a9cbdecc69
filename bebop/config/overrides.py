"""Command-line overrides: sorts them into hydra's and verl's, and gives a clear error where hydra's would be unclear.

hydra's own rules hold (`a.b=1`, `group=option`, `-m a=1,2`). In addition:
- an unknown key is an error that names the nearest known key, also after `+` and `++`;
- values of path keys may contain `=`, spaces and commas;
- keys of verl (`verl.<key>=...`, or a key below one of VERL_ROOTS) are passed to verl unchanged;
- `recipe=<folder>` reads recipes/<folder>/recipe.yaml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from bebop.config import COMMANDS, FilePath
from bebop.config.messages import field_names, no_such_key
from bebop.errors import ConfigError
from bebop.registry import one_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECIPES = ROOT / "recipes"
VERL_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "reward", "reward_model", "transfer_queue", "ray_kwargs")
# lists whose entries have keys of their own, as in `data.tasks.0.params.max_terms=2`
FREE_BELOW = ("data.tasks", "model.tiny.tasks")
DIGITS = re.compile(r"\d{4000}")  # Python reads at most 4300
_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=]+?)(?:=(?P<value>.*))?$", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line: overrides for hydra, overrides for verl, and bebop's own flags."""

    overrides: list[str] = field(default_factory=list)
    verl: list[str] = field(default_factory=list)
    multirun: bool = False
    show: bool = False  # --cfg job
    dry_run: bool = False


def parse(command: str, words: list[str]) -> Arguments:
    """Sort the words after the command. Raises ConfigError on an unknown key, group option or flag."""
    words = list(words)
    if command == "report" and _positional(words, 0):
        words[0] = f"run={words[0]}"
    if command == "bench" and _positional(words, 0):
        words[0] = f"bench={words[0]}"
    if command == "monitor":
        for key in ("action", "source" if words[:1] == ["import"] else "run", "counters"):
            place = ("action", "source", "counters").index(key) if key != "run" else 1
            if _positional(words, place):
                words[place] = f"{key}={words[place]}"
    flags = {"multirun": False, "show": False, "dry_run": False}
    overrides, verl = [], []
    while words:
        word = words.pop(0)
        if word in ("-m", "--multirun"):
            flags["multirun"] = True
        elif word in ("--cfg", "-c"):
            if (words.pop(0) if words else None) != "job":
                raise ConfigError(f"{word}: expected `job` after it, as in {word} job")
            flags["show"] = True
        elif word == "--dry-run":
            flags["dry_run"] = True
        elif word.startswith("-"):
            raise ConfigError(f"{word}: unknown flag, expected -m, --cfg job or --dry-run")
        else:
            overrides.append(word)
    kept = []
    for word in overrides:
        match = _OVERRIDE.match(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            raise ConfigError(f"got {word!r}, expected key=value")
        key = match["key"]
        if DIGITS.search(match["value"] or ""):
            raise ConfigError(f"{key}: got a number of more than 4000 digits, expected a shorter one")
        if key.split(".")[0] == "verl":
            verl.append((match["sign"] or "") + word[len(match["sign"] or "") + len("verl.") :])
        elif key.split(".")[0] in VERL_ROOTS and command in ("grpo", "demo"):
            verl.append(word)
        elif key == "recipe":
            kept.append(_recipe(match["value"] or ""))
        elif key.startswith("recipes/"):
            kept.append(_recipe(key.removeprefix("recipes/")))  # hydra's spelling, in the jobs of a sweep
        else:
            kept.append(_known(command, match, flags["multirun"]))
    if verl and command not in ("grpo", "demo"):
        raise ConfigError(f"{verl[0]}: got a key of verl in {command}, but only grpo and demo run verl; leave it out")
    return Arguments(kept, verl, **flags)


def _positional(words: list[str], place: int) -> bool:
    """Whether the word there is a value without its key: it may be a path with a "=" in it."""
    if len(words) <= place or words[place].startswith("-"):
        return False
    return re.match(r"[+~]*\w[\w.]*=", words[place]) is None or Path(words[place]).exists()


def options(group: str) -> list[str]:
    """Names of the configs in a group folder."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _recipe(folder: str) -> str:
    known = sorted(path.parent.name for path in RECIPES.glob("*/recipe.yaml"))
    if folder not in known:
        raise ConfigError(f"recipe: got {folder}, expected {one_of(folder, known)}")
    return f"+recipes/{folder}=recipe"


def _known(command: str, match: re.Match[str], multirun: bool) -> str:
    key, value, sign = match["key"], match["value"], match["sign"] or ""
    model = COMMANDS[command]
    word = match.string
    if key.startswith("hydra.") or any(key == free or key.startswith(free + ".") for free in FREE_BELOW):
        return word
    known = field_names(model)
    if key not in known:
        of_verl = f"; write a key of verl as verl.{key}" if command in ("grpo", "demo") else ""
        raise ConfigError(f"{word}: {no_such_key(key, known, command)}{of_verl}")
    if sign in ("+", "++"):
        word = f"{key}={value}"  # the key exists, so adding it is setting it
    if any(name.startswith(f"{key}.") for name in known) and value is not None and not value.startswith("{"):
        for option in value.split(",") if multirun else [value]:
            if option not in options(key):
                wanted = one_of(option, options(key)) if options(key) else f"a key below it, as in {_first(key, known)}"
                raise ConfigError(f"{key}: got {option}, expected {wanted}")
        return word
    if value and _is_path(model, key) and value != "null" and value[0] not in "'\"" and not (multirun and "," in value):
        word = f"{key}={_quoted(value)}"
    return word


def _first(section: str, known: list[str]) -> str:
    return next(name for name in known if name.startswith(f"{section}.")) + "=<value>"


def _quoted(value: str) -> str:
    # hydra's grammar: in quotes, backslashes count only before a quote, where each stands doubled
    doubled = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{doubled}'"


def _is_path(model: type[BaseModel], key: str) -> bool:
    for part in key.split(".")[:-1]:
        model = model.model_fields[part].annotation
    info = model.model_fields[key.split(".")[-1]]
    # Annotated[Path, ...] arrives as annotation Path; Annotated[...] | None keeps the alias.
    return info.annotation is Path or FilePath in getattr(info.annotation, "__args__", ())
