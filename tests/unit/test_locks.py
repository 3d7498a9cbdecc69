"""The locks of CPU and GPU machines: what is tested on the one is what runs on the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "requirements"
ENTRY = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)\n((?:    #.*\n)*)", re.MULTILINE)
LOCKS = {
    kind: {n: (v, why) for n, v, why in ENTRY.findall((FOLDER / f"{kind}.lock").read_text())} for kind in ("cpu", "gpu")
}
ASKED = re.findall(r"^([A-Za-z0-9_.-]+)", (FOLDER / "base.in").read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", [name for name in ASKED if name != "setuptools"])
def test_what_bebop_asks_for_has_one_version_on_all_machines(package):
    package = package.lower()
    assert LOCKS["cpu"][package][0] == LOCKS["gpu"][package][0]


def test_each_lock_is_resolved_from_its_own_build_of_torch():
    """torch's GPU build pins a triton and brings CUDA, its CPU build neither; mixed up, a lock can't be met."""

    def asked_by_torch(kind: str, package: str) -> bool:
        return re.search(r"^    #( via|  ) torch$", LOCKS[kind][package][1], re.MULTILINE) is not None

    assert asked_by_torch("gpu", "triton") and asked_by_torch("gpu", "nvidia-cudnn-cu13")
    assert not asked_by_torch("cpu", "triton") and not [name for name in LOCKS["cpu"] if name.startswith("nvidia-")]
