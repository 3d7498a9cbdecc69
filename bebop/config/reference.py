"""docs/config.md from the schema: `python -m bebop.config.reference > docs/config.md`.

A key's meaning is the comment above its field. Its values and its default are read from the field itself.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from bebop import registry
from bebop.config.commands import COMMANDS, Run, defaults
from bebop.config.members import axis_of
from bebop.config.messages import expected, is_section
from bebop.config.overrides import CONFIGS, options

INTRO = """<!-- Made by `python -m bebop.config.reference > docs/config.md`; change the schema in bebop/config. -->
# Config

Every key with its default. `./launch.sh <command> --cfg job` prints the config of a command, `--dry-run` checks it too.

```
./launch.sh sft loss=tv sft.depth=4          # a file of configs/, and a key
./launch.sh sft -m loss=hard_ce,e2e_tv       # a sweep: one run for each
./launch.sh sft recipe=losses                # recipes/losses/recipe.yaml
./launch.sh grpo verl.trainer.val_before_train=True actor_rollout_ref.actor.optim.lr=1e-5   # keys of verl
```

A key of verl starts with `verl.`, or with a section that only verl has, such as `actor_rollout_ref`.

The defaults are in the schema, [bebop/config](../bebop/config). A file in configs/ holds only what differs from them.
Each command starts from the files that its own file lists: `sft` from those in configs/sft.yaml.
"""


def comments(section: type[BaseModel]) -> dict[str, str]:
    """Key -> the comment above it, for the keys of a section but not of its sections."""
    found, comment = {}, []
    for line in inspect.getsource(section).splitlines():
        if match := re.match(r"    # (.*)", line):
            comment.append(match[1])
            continue
        if (match := re.match(r"    (\w+):", line)) and comment:
            found[match[1]] = " ".join(comment)
        comment = []
    return found


def reference() -> str:
    """The whole page."""
    parts = [INTRO, _commands(), _table("Keys of every command", "", Run)]
    sections: dict[str, type[BaseModel]] = {}
    for command, model in COMMANDS.items():
        fields = {name: field.annotation for name, field in model.model_fields.items()}
        sections |= {name: a for name, a in fields.items() if is_section(a) and name not in sections}
        if own := [name for name in fields.keys() - sections.keys() if name not in Run.model_fields]:
            parts.append(_table(f"Keys of {command}", "", model, sorted(own)))
    parts += [_section(name, section) for name, section in sections.items()]
    return "\n".join(parts)


def _commands() -> str:
    rows = ["| command | what it does | sections |", "|---|---|---|"]
    for command, model in COMMANDS.items():
        names = [f"[{name}](#{name})" for name, field in model.model_fields.items() if is_section(field.annotation)]
        rows.append(f"| `{command}` | {inspect.getdoc(model)} | {', '.join(names)} |")
    return "\n".join(rows) + "\n"


def _section(name: str, section: type[BaseModel]) -> str:
    parts = [_table(name, f"{name}.", section)]
    if options(name):
        rows = [f"| `{name}=` | sets | for |", "|---|---|---|"]
        for option in options(name):
            text = (CONFIGS / name / f"{option}.yaml").read_text()
            about = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
            values = yaml.safe_load(text)
            sets = ", ".join(f"`{key}: {_shown(value)}`" for key, value in values.items())
            rows.append(f"| `{option}` | {_cell(sets)} | {_cell(about)} |")
        parts.append("\n".join(rows) + "\n")
    for key, field in section.model_fields.items():
        inner = next((a for a in (field.annotation, *get_args(field.annotation)) if is_section(a)), None)
        if inner is not None:
            prefix = f"{name}.{key}." if is_section(field.annotation) else f"{name}.{key}.<number>."
            parts.append(_table(f"{name}.{key}", prefix, inner))
    return "\n".join(parts)


def _table(title: str, prefix: str, section: type[BaseModel], keys: list[str] | None = None) -> str:
    about, values = comments(section), defaults(section)
    rows = [f"## {title}\n", "| key | default | values | meaning |", "|---|---|---|---|"]
    for key in keys or section.model_fields:
        field = section.model_fields[key]
        wanted = expected(field)
        if is_section(field.annotation):
            shown = f"[below](#{(prefix + key).replace('.', '')})"
        else:
            shown = "must be set" if values[key] == "???" else f"`{_shown(values[key])}`"
        if axis := axis_of(field):
            wanted = wanted.replace(f"a name in {axis}", ", ".join(registry.find(axis)))
        rows.append(f"| `{prefix}{key}` | {_cell(shown)} | {_cell(wanted)} | {_cell(about[key])} |")
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    """A value as a user would type it, on one line. An entry of data.tasks is shown by its name."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, (dict, BaseModel)):
        return str(dict(value).get("name", value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
