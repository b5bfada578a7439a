"""``panscan batch``: how it begins, and what it says when it stops."""

import contextlib
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import noise
from tests.images.site import Site, serving

from panscan.cli.main import run
from panscan.core import EngineError
from panscan.engine.loop import Loop
from panscan.model.bundled import tiny_directory

QUICK = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "4"]
QUESTION = "What is the total?"


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with a directory of three pictures."""
    Path("docs").mkdir()
    for number in range(3):
        noise(90, 90, number).save(f"docs/{number}.png")
    return folder


def started(*arguments: str) -> list[str]:
    return ["batch", *QUICK, *arguments]


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PANSCAN_ALLOW_PRIVATE_URLS", "1")
    with serving() as server:
        yield server


def test_answers_behind_a_slow_one_survive_kill_9(folder: Path, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    answering = threading.Event()
    site.before_answer = lambda path, port: answering.wait(60)
    slow = site.put("/slow.png", Path("docs/0.png").read_bytes())
    rows = [{"image": name, "question": f"{QUESTION} {name}"} for name in (slow, "0.png", "1.png", "2.png")]
    Path("docs/q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = Path("a.jsonl")
    words = ("docs/q.jsonl", "-o", "a.jsonl", "--allow-external-images")
    line = [sys.executable, "-m", "panscan", *started(*words)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (answers.exists() and answers.read_bytes().count(b"\n") == 3):
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(timeout=0.01) is None, "the job ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    waiting = {line["id"]: line for line in lines_of("a.jsonl")}
    assert sorted(waiting) == ["00001", "00002", "00003"]
    with answers.open("ab") as file:
        file.write(b'{"id": "0000')
    answering.set()
    capsys.readouterr()
    assert run(started(*words)) == 3
    assert "a.jsonl already has answers: continue with --resume" in capsys.readouterr().err
    assert run(started(*words, "--resume")) == 0
    captured = capsys.readouterr()
    assert captured.out == "4 answered: a.jsonl\n"
    lines = lines_of("a.jsonl")
    assert [line["id"] for line in lines] == ["00000", "00001", "00002", "00003"]
    assert lines[1:] == [waiting[line["id"]] for line in lines[1:]]  # their times, too: nobody asked again


def test_a_setting_that_suits_no_document_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--vision-cache-gb", "1e-9"]
    assert run(started("docs", "-p", QUESTION, "-o", "a.jsonl", *small)) == 2
    said = capsys.readouterr().err
    assert said.count("--vision-cache-gb 1e-09") == 1
    assert "failed" not in said
    assert "resume with" not in said
    assert [path.name for path in folder.iterdir()] == ["docs"]


def test_a_failed_load_or_another_limit_keeps_failures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {name: Path(name).read_bytes() for name in ("docs/0.png", "docs/2.png")}
    for name in whole:
        Path(name).write_bytes(b"not a picture")
    job = ["docs", "-p", QUESTION, "-o", "a.jsonl"]
    shutil.copytree(tiny_directory(), "checkpoint")
    assert run(started(*job, "--model", "./checkpoint")) == 3
    first = Path("a.jsonl").read_bytes()
    for name, picture in whole.items():
        Path(name).write_bytes(picture)
    Path("checkpoint").rename("elsewhere")
    retry = [*job, "--resume", "--retry-failed", "--model", "./checkpoint"]
    assert run(started(*retry)) == 3
    assert Path("a.jsonl").read_bytes() == first
    Path("elsewhere").rename("checkpoint")
    assert run(started(*retry, "--num-prompts", "1")) == 3
    assert [line["error"] is None for line in lines_of("a.jsonl")] == [True, True, False]
    assert run(started(*retry)) == 0
    found = [(line["id"], line["error"]) for line in lines_of("a.jsonl")]
    assert found == [(f"docs/{number}.png", None) for number in range(3)]
    capsys.readouterr()
    assert run(started(*retry)) == 0
    assert capsys.readouterr().out == "nothing left to ask: 3 answered already: a.jsonl\n"


def test_a_broken_engine_is_no_failure_of_documents_and_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Loop.step, 0

    def breaking(loop: Loop) -> bool:
        nonlocal steps
        if steps == 6:  # four of the first document, two of the second
            raise RuntimeError("a bug")
        busy = step(loop)
        steps += busy
        return busy

    monkeypatch.setattr("sys.stdin", io.StringIO("What's\tthe total?\n"))
    monkeypatch.setattr(Loop, "step", breaking)
    one_by_one = ["--max-num-seqs", "1", "--max-concurrency", "1"]
    options = ["--overwrite=true", "--system", "--resume"]  # the second is a system prompt, which stays
    assert run(started("docs", "-o", "a.jsonl", "-p", "-", *options, *one_by_one)) == EngineError.exit_code
    monkeypatch.setattr(Loop, "step", step)
    lines = lines_of("a.jsonl")
    assert [(line["id"], line["error"]) for line in lines] == [("docs/0.png", None)]
    said = capsys.readouterr().err
    assert "panscan: the engine stopped: RuntimeError: a bug" in said
    _, _, line = said.partition("resume with: ")
    words = shlex.split(line.partition("\npanscan: ")[0])
    assert words[-3:] == ["-p", "What's\tthe total?\n", "--resume"]
    assert run(words[1:]) == 0
    assert [line["id"] for line in lines_of("a.jsonl")] == ["docs/0.png", "docs/1.png", "docs/2.png"]
