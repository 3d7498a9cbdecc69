"""configs/ holds differences from the schema, and the schema explains every key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from bebop.config import COMMANDS, Section, defaults
from bebop.config.reference import comments

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "configs"
GROUP_FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.glob("*/*.yaml"))
# the key that a file of the group is named after; it stands there even if it is the default
NAMED_BY = {"model": "name", "loss": "name", "rollout": "engine", "trainer": "mode", "bench": "suite"}


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, BaseModel)}


SECTIONS = {name: each for model in COMMANDS.values() for name, each in sections(model).items()}


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_group_files_hold_only_differences(path):
    group, values = path.parts[0], yaml.safe_load((CONFIGS / path).read_text())
    usual = defaults(SECTIONS[group])
    assert values.keys() <= usual.keys()
    repeated = [key for key, value in values.items() if value == usual[key] and key != NAMED_BY.get(group)]
    assert not repeated


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_group_files_open_with_what_they_are_for(path):
    assert (CONFIGS / path).read_text().startswith("# ")


def every_section(of: type[BaseModel] = Section) -> list[type[BaseModel]]:
    return [each for sub in of.__subclasses__() for each in (sub, *every_section(sub))]


@pytest.mark.parametrize("section", every_section(), ids=lambda section: section.__name__)
def test_every_key_is_explained_by_a_comment(section):
    own = [name for name in section.__annotations__ if name in section.model_fields]
    if section in COMMANDS.values():  # sections are explained by their keys
        own = [name for name in own if name not in SECTIONS]
    assert set(own) <= comments(section).keys()


def test_the_reference_is_current():
    env = {key: value for key, value in os.environ.items() if key != "BEBOP_PLUGINS"}
    words = [sys.executable, "-m", "bebop.config.reference"]
    made = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "config.md").read_text(), "run: python -m bebop.config.reference > docs/config.md"
