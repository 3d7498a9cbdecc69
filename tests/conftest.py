"""Fixtures that several folders share. Real parts only; what is slow to make is made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

ROOT = Path(__file__).resolve().parent.parent


# Their tests start runs of GRPO, each of which fills two cores with processes.
GRPO = {"test_any_path", "test_grpo", "test_grpo_sync", "test_grpo_torch", "test_main_ppo"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist a file's tests run in one process; runs of GRPO come first, one after the other."""
    items.sort(key=lambda item: item.path.stem not in GRPO)
    for item in items:
        group = "grpo" if item.path.stem in GRPO else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in the MiMo layout, MTP layer included, with the tiny policy's tokenizer."""
    from bebop.policies import random_checkpoint

    return random_checkpoint(tmp_path_factory.mktemp("policy") / "tiny-random")


@pytest.fixture(scope="session")
def verl_on_a_cpu() -> None:
    """verl as a run sets it up; it reads its platform once, when it is first imported."""
    for name, value in {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}.items():
        os.environ.setdefault(name, value)
    from bebop.rl.verl import plugin

    plugin.register()
