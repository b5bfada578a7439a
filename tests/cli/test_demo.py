"""``panscan demo``: the whole story on few documents, on the real command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from panscan.cli.main import run


def test_the_story_from_documents_to_a_preset_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "tale", "--count", "2"]) == 0
    said = capsys.readouterr().out
    commands = re.findall(r"^\$ panscan (\w+)", said, flags=re.MULTILINE)
    assert commands == ["samples", "bench", "report", "recommend"]
    [decision] = re.findall(r"^Use pan and scan with up to .*? requests/s\.$", said, flags=re.MULTILINE)
    right, without = map(int, re.findall(r"(\d+)%", decision))
    assert right > without + 20, "both documents are long and in small print"
    for name in ("gallery.html", "report.html"):
        [path] = re.findall(rf"^.*: +(\S+{name})$", said, flags=re.MULTILINE)[-1:]
        assert Path(path).stat().st_size > 10_000
    assert decision in Path(path).read_text("utf-8"), "every step names the same setting"
    line = re.split(r"Try: .*?panscan (?=ask)", said.replace("\n", " "))[1]
    assert run(shlex.split(line)) == 0
    asked = capsys.readouterr().out
    rows = (tmp_path / "tale" / "documents" / "questions.jsonl").read_text("utf-8")
    assert asked.splitlines()[0] in rows.split('"What is the total?", "answers": ')[1].split("]")[0]
    assert run(["demo", "tale", "--count", "2"]) == 2
    assert "--force" in capsys.readouterr().err
