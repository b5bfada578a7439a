"""``panscan samples``: documents that the next command can read, and none overwritten unasked."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from panscan.cli.main import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_the_line_that_it_prints_can_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", "new/docs", "--count", "3"]) == 0
    made, following = capsys.readouterr().out.splitlines()
    assert made == "3 documents in new/docs"
    assert len(contents(folder / "new" / "docs")) == 3 + 1
    assert following.startswith("next: panscan bench --dataset ")
    _, *arguments = shlex.split(following.removeprefix("next: "))
    assert run([*arguments, "--dry-run", "--device", "cpu"]) == 0
    assert not (folder / "runs").exists()


def test_a_second_call_writes_the_same_bytes_and_a_seed_others(folder: Path) -> None:
    for place in ("a", "a", "b"):
        assert run(["samples", place, "--count", "2"]) == 0
    assert run(["samples", "c", "--count", "2", "--seed", "1"]) == 0
    first = contents(folder / "a")
    assert contents(folder / "b") == first
    assert set(contents(folder / "c").values()).isdisjoint(first.values())


def test_other_documents_are_replaced_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", "a", "--count", "2"]) == 0
    (folder / "a" / "mine.txt").write_text("kept")
    before = contents(folder / "a")
    assert run(["samples", "a", "--count", "2", "--seed", "1"]) == 2
    assert "--overwrite (overwrite=True) replaces it" in capsys.readouterr().err
    assert contents(folder / "a") == before
    assert run(["samples", "a", "--count", "2", "--seed", "1", "--overwrite"]) == 0
    assert run(["samples", "b", "--count", "2", "--seed", "1"]) == 0
    after = contents(folder / "a")
    assert after.pop("mine.txt") == b"kept"
    assert {name: after[name] for name in contents(folder / "b")} == contents(folder / "b")


def test_a_narrow_encoding_of_stdout_is_no_error(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "panscan", "samples", "café", "--count", "1"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(rb"1 documents in caf\xe9")
    assert (folder / "café" / "questions.jsonl").exists()
