"""A job on replicas: every line once whatever is killed, the answers of one engine, and nothing left running."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.batch.shuffling import unchanging
from tests.conftest import Panscan, until_in
from tests.images.site import serving

from panscan.cli.main import run
from panscan.workload.samples import write_samples

pytest.importorskip("ray", reason="needs the extra cluster")

from tests.batch.fragile_replicas import ELSEWHERE, INNOCENT

COMMON = ["--model", "tiny", "--device", "cpu", "--max-num-seqs", "2", "--max-new-tokens", "16"]
PAGES = 12
SECONDS = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster that outlives the jobs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    options = ["--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "4", "--include-dashboard", "false"]
    # A short path, because it is part of the names of sockets; Ray's default folder belongs to other clusters too.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as variables,
    ):
        variables.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        variables.setenv("RAY_AUTH_MODE", "token")
        variables.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        head = subprocess.Popen([*ray, *options, "--temp-dir", folder], stdout=subprocess.DEVNULL)
        try:
            until_in(head, lambda: listens(port))
            yield f"127.0.0.1:{port}"
        finally:
            family = psutil.Process(head.pid).children(recursive=True)
            head.kill()
            head.wait()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def replicas() -> list[psutil.Process]:
    """Return the processes of this test's replicas."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "EngineReplica" in " ".join(process.cmdline()):
                processes.append(process)
    return processes


def connected_replica(port: int) -> psutil.Process | None:
    """Return the replica whose connection has this port on its side; None if it is another process's."""
    for replica in replicas():
        with contextlib.suppress(psutil.Error):
            if any(connection.laddr.port == port for connection in replica.net_connections("tcp")):
                return replica
    return None


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.timeout(600)
def test_a_job_survives_a_killed_replica_and_its_own_death(
    cluster: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first replica that reads the page before the last is killed, and the job while a replica reads the last."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_samples(folder / "samples", count=PAGES - 2)
    page = min((folder / "samples").glob("*.png")).read_bytes()
    output, log = folder / "job.jsonl", folder / "log"
    killed: list[psutil.Process] = []
    job_ended = threading.Event()

    def before_answer(path: str, port: int) -> None:
        if (replica := connected_replica(port)) is None:  # the job counts the file's pages
            return
        if path == "/deadly.png" and not killed:
            killed.append(replica)
            replica.kill()
        elif path == "/last.png":
            job_ended.wait(SECONDS)

    with serving() as site:
        site.before_answer = before_answer
        sources = ["samples", site.put("/deadly.png", page), site.put("/last.png", page)]
        job = ["batch", *sources, "--allow-private-urls", "-p", "What is the total?", *COMMON]
        assert run([*job, "-o", "whole.jsonl"]) == 0
        assert run([*job, "-o", "job.jsonl", "--num-prompts", "3"]) == 0
        replicated = ["-o", "job.jsonl", "--resume", "--dtype", "fp32", "--replicas", "2", "--ray-address", cluster]
        command = [sys.executable, "-m", "panscan", *job, *replicated]
        with log.open("wb") as file, subprocess.Popen(command, stderr=file) as driver:
            try:
                until_in(driver, lambda: count_lines(output) == PAGES - 1)  # all but the last page
                assert "was lost: Ray starts another one" in log.read_text()
                assert "Traceback" not in log.read_text()
            finally:
                driver.kill()
                job_ended.set()
        assert count_lines(output) == PAGES - 1
        assert not psutil.wait_procs(replicas(), timeout=60)[1], "they would keep their GPUs"
        capsys.readouterr()
        assert run([*job, "-o", "job.jsonl", "--resume"]) == 0
    assert capsys.readouterr().out == f"{PAGES} answered: job.jsonl\n"
    assert unchanging(output) == unchanging(folder / "whole.jsonl")
    retries = [json.loads(line)["retries"] for line in output.read_bytes().splitlines()]
    assert set(retries) == {0, 1} and retries[-2:] == [1, 0]


@pytest.mark.timeout(600)
def test_only_the_request_that_kills_its_replicas_fails(tmp_path: Path) -> None:
    """On the second cluster that a process starts, which has imported Ray before the first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.batch.fragile_replicas"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    assert "was lost: Ray starts another one" in done.stderr and "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_bytes().splitlines()]
    by_id = {line.pop("id"): line for line in lines}
    assert len(lines) == len(by_id) == INNOCENT + 3
    crashed = by_id.pop("crash")
    assert crashed["error"] == "3 engines died while computing this request: the replica was lost: ActorDiedError"
    assert crashed["retries"] == 2
    assert by_id.pop("missing.png")["error"] == "missing.png: no such file or directory"
    assert by_id.pop(ELSEWHERE)["text"] == f"PageBytes {ELSEWHERE}"
    assert {(line["text"], line["error"]) for line in by_id.values()} == {("here", None)}


WRONG_CLUSTERS = [
    (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: no Ray cluster answers there"),
    (["--ray-address", "auto", "--device", "auto"], "--dtype: auto depends on the cluster's machines"),
    (["--replicas", "2", "--device", "cuda:1", "--dtype", "fp32"], "--device cuda:1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CLUSTERS)
def test_wrong_clusters_are_refused(folder: Path, panscan: Panscan, options: list[str], message: str) -> None:
    write_samples(folder / "samples", count=1)
    code = 4 if "cuda:1" in options else 2
    assert message in panscan("batch samples -p 'What is the total?'", *COMMON, *options, code=code).err
    assert not Path("answers.jsonl").exists()
