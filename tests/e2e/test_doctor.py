"""doctor on the installed engine: it passes as shipped, and fails where the fix that it is there to prove is off."""

import json

import pytest

from bebop import doctor
from bebop.config import Doctor, DoctorConfig
from bebop.config.policy import CheckedModel
from bebop.policies import random_checkpoint

pytestmark = pytest.mark.e2e


def test_doctor_passes_on_the_installed_engine(tmp_path, capsys):
    assert doctor.run(DoctorConfig(doctor=Doctor(num_requests=2000)), tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] and len(summary["checks"]) >= 9
    printed = capsys.readouterr().out
    assert "T = 0.7" in printed and "this engine is lossless" in printed


def test_doctor_fails_with_the_fixes_off_and_names_the_temperature(tmp_path, capsys):
    config = DoctorConfig(doctor=Doctor(num_requests=500, temperatures=[0.7], engine_fixes=False))
    assert doctor.run(config, tmp_path) == 1
    failed = json.loads((tmp_path / "summary.json").read_text())["failed"]
    assert any("T = 0.7" in check for check in failed)
    assert "FAIL  engine, T = 0.7" in capsys.readouterr().out


def test_doctor_proves_the_torch_engine_too_trees_included(tmp_path, capsys):
    config = DoctorConfig(doctor=Doctor(engine="torch", num_requests=1000))
    assert doctor.run(config, tmp_path) == 0
    checks = [row["check"] for row in json.loads((tmp_path / "summary.json").read_text())["checks"]]
    assert any("Rheo trees" in check and "T = 0.7" in check for check in checks)
    assert "backbone after swap" in checks
    assert "this engine is lossless" in capsys.readouterr().out


def test_doctor_compares_every_reader_of_a_policy(tmp_path, capsys):
    policy = random_checkpoint(tmp_path / "policy", model_type="llama", padding=64)
    assert doctor.run(DoctorConfig(model=CheckedModel(name="hf", path=policy)), tmp_path) == 0
    checks = json.loads((tmp_path / "summary.json").read_text())["checks"]
    assert len(checks) == 6 and all(check["passed"] for check in checks)  # transformers, backbone, vllm, torch in pairs
    assert "every reader reads the same policy" in capsys.readouterr().out
