"""``panscan compare`` from the command line to its exit code."""

from pathlib import Path

import pytest
from tests.analysis.noisy_runs import noisy_records
from tests.conftest import documented
from tests.records.synthetic import write_run

from panscan.cli.main import run
from panscan.records.store import FILE_NAME

GATE = ["--fail-on", "p95_e2el>5%"]


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: ``a``, ``b`` like it, and ``slow``, a tenth slower; and ``few``, which tells nothing."""
    monkeypatch.setenv("COLUMNS", "80")
    write_run(folder / "a", noisy_records(1))
    write_run(folder / "b", noisy_records(2))
    write_run(folder / "slow", noisy_records(3, factor=1.1))
    write_run(folder / "few", noisy_records(4, batches=2, repeats=1))
    return folder


def test_the_exit_code_says_whether_a_condition_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "a", "a", *GATE, "--strict"]) == 0
    assert run(["compare", "a", "b", *GATE, "--strict"]) == 0
    assert "--fail-on p95_e2el>5% does not hold" in capsys.readouterr().err
    assert run(["compare", "a", "slow", *GATE]) == 5
    said = capsys.readouterr()
    assert "--fail-on p95_e2el>5% holds: sdpa attention, batch size 1 (c0): " in said.err
    assert "slower" in said.out
    assert run(["compare", "a", "slow"]) == 0
    assert run(["compare", "a", "b", "slow", *GATE]) == 5


def test_what_cannot_be_told_is_said_and_fails_only_if_strict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "a", "few", *GATE]) == 0
    said = capsys.readouterr().err
    assert "cannot be evaluated: sdpa attention, batch size 1 (c0): 2 batches are too few to tell" in said
    assert run(["compare", "a", "few", *GATE, "--strict"]) == 5
    assert run(["compare", "a", "a", "--fail-on", "verdict"]) == 0
    assert "unverified in A, unverified in B" in capsys.readouterr().err


def test_formats_are_clean_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["compare", "a", "slow", *GATE, "--format", "json"])
    assert documented("compare", capsys.readouterr().out)["comparisons"][0]["b"] == "B"
    run(["compare", "a", "slow", *GATE, "--format", "md"])
    assert capsys.readouterr().out.startswith("### Comparison\n\n- A: a\n- B: slow\n")


def test_half_a_line_is_noted_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "b" / FILE_NAME).open("a") as file:
        file.write('{"type": "requ')
    assert run(["compare", "a", "b"]) == 0
    assert "Note on B: the last line is torn and left out (14 bytes)" in capsys.readouterr().out
