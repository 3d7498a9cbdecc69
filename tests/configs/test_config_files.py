"""configs/ and the schema say the same, and say it to the reader too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from bebop import config as schema

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "configs"
GROUPS = {
    "model": schema.Model,
    "data": schema.Data,
    "loss": schema.Loss,
    "sft": schema.Sft,
    "rollout": schema.RolloutSection,
    "trainer": schema.Trainer,
    "grpo": schema.Grpo,
    "monitor": schema.Monitor,
    "logger": schema.Logger,
    "doctor": schema.Doctor,
    "bench": schema.Bench,
}
# The file of each group that carries the schema's own defaults.
DEFAULT_FILES = {
    "model": "tiny", "loss": "e2e_tv", "sft": "default", "rollout": "vllm", "trainer": "colocate_async",
    "grpo": "tiny", "monitor": "default", "logger": "default", "doctor": "default", "bench": "rollout",
}  # fmt: skip
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))


def test_every_group_has_a_schema():
    assert {path.parts[0] for path in FILES if len(path.parts) > 1} == set(GROUPS)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_comment_stands_above_every_field(path):
    lines = (CONFIGS / path).read_text().splitlines()
    in_defaults = False
    for before, line in zip(["", *lines], lines, strict=False):
        field = re.match(r"^\s*(?:- )?(\w+):", line)
        in_defaults = line.startswith("defaults:") or (in_defaults and line.startswith(" "))
        if field and not in_defaults and not line.lstrip().startswith("- ") and not _inside_list(path, line):
            assert before.lstrip().startswith("#"), f"{path}: no comment above {line.strip()!r}"


def _inside_list(path: Path, line: str) -> bool:
    # entries of data.tasks explain themselves by the comment above the first of them
    return path.parts[0] in ("data", "recipes") and line.startswith("    ")


@pytest.mark.parametrize("path", [p for p in FILES if len(p.parts) > 1], ids=str)
def test_group_files_name_every_field_of_their_section(path):
    values = yaml.safe_load((CONFIGS / path).read_text())
    assert set(values) == set(GROUPS[path.parts[0]].model_fields)


@pytest.mark.parametrize("group", DEFAULT_FILES)
def test_default_files_carry_the_schema_defaults(group):
    values = yaml.safe_load((CONFIGS / group / f"{DEFAULT_FILES[group]}.yaml").read_text())
    for name, info in GROUPS[group].model_fields.items():
        if info.is_required():
            continue
        default = info.get_default(call_default_factory=True)
        expected = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        assert values[name] == expected, f"{group}.{name}"
