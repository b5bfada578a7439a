"""The command: what it prints, and how it exits."""

from pathlib import Path

import pytest
from tests.conftest import documented
from tests.inspect.doctor.odd_checks import ROOT

from panscan.cli.main import run
from panscan.inspect.doctor.checks import CHECKS, GROUPS


def test_json_holds_every_finding_and_each_that_asks_for_action_has_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--only", "host,gpus", "--json"]) == 0
    found = documented("doctor", capsys.readouterr().out)
    ran = {finding["check"] for finding in found["findings"]}
    assert ran == {check.name for check in CHECKS if check.group == "host"} | {"gpus"}
    assert sum(found["summary"].values()) == len(found["findings"])
    for finding in found["findings"]:
        assert finding["status"] not in ("warning", "problem") or finding["fix"]
        assert finding["seconds"] is not None


def test_a_problem_gives_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torchvision that belongs to another PyTorch raises an error on import."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text('raise RuntimeError("no operator torchvision::nms")\n')
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'src'}")
    assert run(["doctor", "--only", "torchvision"]) == 4
    shown = capsys.readouterr().out
    assert "torchvision 0.1 does not work" in shown
    assert "torchvision::nms" in shown
    assert "1 problem, 0 warnings" in shown


def test_checks_have_unique_names_known_groups_and_existing_functions() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.group for check in CHECKS} == set(GROUPS)
