"""``panscan samples``: documents that the next command can read, and none overwritten unasked."""

import base64
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.conftest import Panscan

from panscan.cli import demo
from panscan.cli.main import run
from panscan.records.store import read_run
from panscan.settings import options_of
from panscan.workload.request_sets import FORMATS


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_the_line_that_it_prints_can_be_run(folder: Path, panscan: Panscan) -> None:
    made, following = panscan("samples new/docs --count 3").out.splitlines()
    assert made == "3 documents in new/docs"
    assert len(contents(folder / "new" / "docs")) == 3 + 2
    assert following.startswith("next: panscan bench --dataset ")
    _, *arguments = shlex.split(following.removeprefix("next: "))
    assert run([*arguments, "--dry-run", "--device", "cpu"]) == 0
    assert not (folder / "runs").exists()


def test_a_narrow_encoding_of_stdout_is_no_error(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "panscan", "samples", "café", "--count", "1"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(rb"1 documents in caf\xe9")
    assert (folder / "café" / "questions.jsonl").exists()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_request_sets_have_the_fields_that_each_tool_reads(folder: Path, panscan: Panscan) -> None:
    """The same documents, prompts and lengths in every format; each image its own, and before the text."""
    assert {*options_of("samples")["request_set"].choices} == {*FORMATS}
    parts: dict[str, list[Any]] = {}
    lengths: dict[str, list[int]] = {}
    for name in FORMATS:
        made, following = panscan("samples sets --format", name, "--count", "9").out.splitlines()
        assert made.startswith(f"9 requests in sets/{name}.jsonl: ")
        assert following.startswith("next: ")
        assert f"sets/{name}.jsonl" in following
        rows = lines(folder / "sets" / f"{name}.jsonl")
        if name == "vllm":
            assert all(list(row) == ["content"] for row in rows)
            parts[name] = [row["content"] for row in rows]
        else:
            length = {"aiperf": "output_length", "guidellm": "output_tokens_count"}[name]
            assert all(list(row) == ["messages", length] for row in rows)
            assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
            parts[name] = [row["messages"][0]["content"] for row in rows]
            lengths[name] = [row[length] for row in rows]
    assert parts["aiperf"] == parts["guidellm"] == parts["vllm"]
    assert lengths["aiperf"] == lengths["guidellm"]
    assert all([part["type"] for part in content] == ["image_url", "text"] for content in parts["vllm"])
    asks = [content[1]["text"].endswith("?") for content in parts["vllm"]]  # else an instruction, with a longer answer
    assert asks == [length == 32 for length in lengths["aiperf"]] and len(set(asks)) == 2
    urls = [content[0]["image_url"]["url"] for content in parts["vllm"]]
    assert len(set(urls)) == 9
    ratios = set()
    for url in urls:
        head, _, data = url.partition(",")
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            assert head == f"data:image/{str(image.format).lower()};base64"
            ratios.add(round(image.height / image.width, 1))
    assert min(ratios) < 0.6
    assert max(ratios) > 2.0


def test_a_request_set_is_reproducible_and_replaced_only_when_asked(folder: Path) -> None:
    arguments = ["samples", "sets", "--format", "guidellm", "--count", "2"]
    assert run(arguments) == 0
    before = contents(folder / "sets")
    assert run(arguments) == 0
    assert contents(folder / "sets") == before
    assert run([*arguments, "--seed", "1"]) == 2
    assert contents(folder / "sets") == before
    assert run([*arguments, "--seed", "1", "--force"]) == 0
    assert set(contents(folder / "sets")) == {"guidellm.jsonl"}
    assert contents(folder / "sets") != before


# ``panscan demo``: the whole story on few documents, on the real command line.


pytestmark = pytest.mark.usefixtures("without_charts")

DEMO = ["demo", "tale", "--count", "2"]


def test_the_story_to_a_usable_preset(folder: Path, panscan: Panscan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SWEEP", (*demo._SWEEP, "--warmup", "0", "--verify-requests", "1"))  # half the time
    earlier = folder / "tale" / "runs" / "99991231-235959-mini"
    earlier.mkdir(parents=True)
    said = " ".join(panscan(*DEMO, code=2).err.split())
    assert "tale already holds a demo: choose another folder, or add --force (earlier runs are kept)" in said
    said = panscan(*DEMO, "--force").out
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
    asked = panscan(line).out
    rows = (folder / "tale" / "documents" / "questions.jsonl").read_text("utf-8")
    assert asked.splitlines()[0] in rows.split('"What is the total?", "answers": ')[1].split("]")[0]
