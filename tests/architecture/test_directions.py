"""The direction of imports, the adapters' walls, and the linter: the house rules as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted([*(ROOT / "bebop").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
# Where each heavy package may be imported, and nowhere else.
ADAPTERS = {
    "vllm": ("bebop/engines/",),
    "verl": ("bebop/rl/",),
    "ray": ("bebop/rl/",),
    "deepspeed": ("bebop/sft/deepspeed.py",),
    "wandb": ("bebop/store/wandb.py",),
    "triton": ("kernels/",),
    "speculators": ("kernels/bench/",),
    "numba": ("kernels/",),
}


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("package", ADAPTERS)
def test_heavy_packages_stay_behind_their_adapter(package):
    outside = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name.split(".")[0] == package for name in imports(path))
        and not str(path.relative_to(ROOT)).startswith(ADAPTERS[package])
    ]
    assert not outside


def test_import_directions_hold():
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_ruff_is_content():
    ruff = Path(sys.executable).with_name("ruff")
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *words, "."], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_bebop_imports_without_the_heavy_packages():
    code = (
        "import sys\n"
        f"for name in {sorted(ADAPTERS)}: sys.modules[name] = None\n"
        "import bebop, bebop.config, bebop.records, bebop.store, bebop.policies, bebop.acceptance\n"
        "import bebop.head_training, bebop.data, bebop.backbone, bebop.mtp, bebop.losses, bebop.spec\n"
        "import bebop.monitor, bebop.engines, bebop.sft, bebop.rl, bebop.evaluate, bebop.doctor\n"
        "import bebop.bench, bebop.demo\n"
        "import bebop_kernels\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_is_two_files():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_the_kernels_folder_is_not_a_package_named_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
