"""``panscan demo``: the whole story on few documents, on the real command line."""

import re
import shlex
from pathlib import Path

import pytest

from panscan.cli.main import run
from panscan.records.store import read_run

pytestmark = pytest.mark.usefixtures("without_charts")

DEMO = ["demo", "tale", "--count", "2"]


def test_the_story_from_documents_to_a_usable_preset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = folder / "tale" / "runs" / "99991231-235959-mini"
    earlier.mkdir(parents=True)
    assert run(DEMO) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "tale already holds a demo: choose another folder, or add --force (earlier runs are kept)" in said
    assert run([*DEMO, "--force"]) == 0
    said = capsys.readouterr().out
    steps = [shlex.split(line) for line in re.findall(r"^\$ (panscan .*)$", said, flags=re.MULTILINE)]
    assert [words[1] for words in steps] == ["samples", "bench", "report", "recommend"]
    decisions = re.findall(r"^Use pan and scan with up to .*? requests/s\.$", said, flags=re.MULTILINE)
    [decision] = {*decisions}
    right, without = map(int, re.findall(r"(\d+)%", decision))
    assert right > without + 20, "both documents are long and in small print"
    for name in ("gallery.html", "report.html"):
        [path] = re.findall(rf"^.*: +(\S+{name})$", said, flags=re.MULTILINE)[-1:]
        assert Path(path).stat().st_size > 10_000
    assert decision in Path(path).read_text("utf-8"), "every step names the same setting"
    preset = (folder / "tale" / "preset.yaml").read_text("utf-8")
    assert f"# decision: {decision}\n" in preset

    [directory] = {*earlier.parent.iterdir()} - {earlier}
    measured = read_run(directory)
    assert any(cell in preset for cell in measured.cells)
    assert {repeat for _, repeat in measured.repeats} == {0, 1, 2}, "three repeats give intervals"
    assert measured.header.command == steps[1]
    line = re.split(r"Try: .*?panscan (?=ask)", said.replace("\n", " "))[1]
    assert run(shlex.split(line)) == 0
    asked = capsys.readouterr().out
    rows = (folder / "tale" / "documents" / "questions.jsonl").read_text("utf-8")
    assert asked.splitlines()[0] in rows.split('"What is the total?", "answers": ')[1].split("]")[0]
