"""A job on replicas: every line once whatever is killed, the answers of one engine, and nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.batch.fragile_replicas import ELSEWHERE, INNOCENT

from panscan.cli.main import run
from panscan.workload.samples import write_samples

pytest.importorskip("ray", reason="needs the extra cluster")

COMMON = ["--model", "tiny", "--device", "cpu", "--max-num-seqs", "2", "--max-new-tokens", "16"]
PAGES = 40
SECONDS = 240.0


class Program:
    """A program in a session of its own, and all processes that it has started."""

    def __init__(self, folder: Path, *command: str) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        self._log = (folder / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Return the condition's first true value while the program runs."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            if value := condition():
                return value
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"ended early with {self.process.wait(timeout=0.05)}: {self.log()}")
        raise AssertionError(f"not within {SECONDS:g} s: {self.log()}")

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of the replicas that are answering."""
        found = []
        for each in self.family:
            with contextlib.suppress(psutil.Error):  # it has ended
                found += (
                    [each] if each.is_running() and "EngineReplica.handle_request" in " ".join(each.cmdline()) else []
                )
        return found

    def log(self) -> str:
        """Return what the program has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def end(self) -> None:
        """Wait for the program and everything that it has started."""
        self.process.wait(SECONDS)
        assert not psutil.wait_procs(self.family, timeout=30)[1]


@contextlib.contextmanager
def program(folder: Path, *command: str) -> Iterator[Program]:
    """Run a program, and leave no process behind even if the test fails."""
    started = Program(folder, *command)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        for each in psutil.wait_procs(started.family, timeout=30)[1]:
            each.kill()


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.timeout(600)
def test_a_job_survives_a_killed_replica_and_resumes_with_and_without_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "samples", count=PAGES)
    job = ["batch", "samples", "-p", "What is the total?", *COMMON]
    assert run([*job, "-o", "whole.jsonl"]) == 0
    assert run([*job, "-o", "job.jsonl", "--num-prompts", "5"]) == 0
    output = tmp_path / "job.jsonl"
    with program(tmp_path, "panscan", *job, "-o", "job.jsonl", "--resume", "--replicas", "2") as driver:
        driver.wait_for(lambda: driver.replicas() and count_lines(output) > 6)
        driver.replicas()[0].kill()
        driver.wait_for(lambda: b'"retries": 1' in output.read_bytes())
        assert "was lost: Ray starts another one" in driver.log()
        driver.process.send_signal(signal.SIGINT)
        driver.end()
        assert driver.process.returncode == 130
        assert "--replicas 2 --resume" in driver.log()
        assert "Traceback" not in driver.log()
    assert count_lines(output) < PAGES
    capsys.readouterr()
    assert run([*job, "-o", "job.jsonl", "--resume"]) == 0
    assert capsys.readouterr().out == f"{PAGES} answered: job.jsonl\n"
    assert unchanging(output) == unchanging(tmp_path / "whole.jsonl")
    retries = [json.loads(line)["retries"] for line in output.read_bytes().splitlines()]
    assert set(retries) == {0, 1}


def unchanging(path: Path) -> list[bytes]:
    """Return the lines up to the fields that depend on the run."""
    return [line.partition(b', "cached_tokens"')[0] for line in path.read_bytes().splitlines()]


@pytest.mark.timeout(600)
def test_only_the_request_that_kills_its_replicas_fails(tmp_path: Path) -> None:
    with program(tmp_path, "tests.batch.fragile_replicas") as driver:
        driver.end()
        assert driver.process.returncode == 0, driver.log()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_bytes().splitlines()]
    found = {line.pop("id"): line for line in lines}
    assert len(lines) == len(found) == INNOCENT + 3
    crashed = {
        "text": "",
        "error": "3 engines died while computing this request: the replica was lost: ActorDiedError",
        "retries": 2,
    }
    assert found.pop("crash") == crashed
    assert found.pop("missing.png")["error"] == "missing.png: no such file or directory"
    assert found.pop(ELSEWHERE)["text"] == f"PageBytes {ELSEWHERE}"
    assert {(line["text"], line["error"]) for line in found.values()} == {("here", None)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: no Ray cluster answers there"),
        (["--ray-address", "auto", "--device", "auto"], "--dtype: auto depends on the cluster's machines"),
        (["--replicas", "2", "--device", "cuda:1", "--dtype", "fp32"], "--device cuda:1"),
    ],
)
def test_wrong_clusters_are_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "samples", count=1)
    assert run(["batch", "samples", "-p", "What is the total?", *COMMON, *options]) > 0
    assert message in capsys.readouterr().err
    assert not Path("answers.jsonl").exists()
