"""Checkpoints of the hub: download with progress, the copy in the cache, and a hub that does not answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest

from panscan.model.bundled import mini_directory

NAME = "somebody/gemma"
COMMIT = "c" * 40
# No PyTorch: what a command does before it imports that. The recorded line is what a display would show.
RESOLVE = """
import sys, time
time.sleep = lambda _: None  # huggingface_hub waits for seconds between its attempts
from panscan.core import PanscanError
from panscan.core.activity import displayed
from panscan.model.hub import checkpoint_directory

class Recorder:
    def show(self, running):
        self.seen.extend(step for step in running if step not in self.seen)
    seen = []

with displayed(Recorder()):
    try:
        print(checkpoint_directory(sys.argv[1], weights=sys.argv[2] == "all"))
    except PanscanError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        for step in Recorder.seen:
            print(step.text, step.unit, int(step.done), step.total, file=sys.stderr)
assert "torch" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """Serves the bundled checkpoint as the hub does; counts the requests."""

    files: ClassVar = {path.name: path.read_bytes() for path in mini_directory().iterdir() if path.is_file()}
    requests: ClassVar[list[str]] = []
    stalls = False
    breaks = False  # the connection is closed before a file is complete
    commit = COMMIT
    refusal: ClassVar[tuple[int, str] | None] = None  # status and code, as the real one words them

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if NAME in path:
            self.requests.append(path)
        if NAME not in path:  # huggingface_hub asks for other things, too
            self.reply(b"", 404)
        elif self.refusal and (self.refusal[0] != 403 or "/resolve/" in path):  # what gated files are is public
            self.reply(b"", self.refusal[0], {"X-Error-Code": self.refusal[1], "X-Error-Message": "refused"})
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            sizes = [(name, len(data), sha1(data).hexdigest()) for name, data in self.files.items()]
            listed = [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in sizes]
            self.reply(json.dumps(listed).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self.reply(json.dumps({"id": NAME, "sha": self.commit, "siblings": siblings}).encode())
        else:
            self.reply(self.files[path.rpartition("/")[2]])

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def reply(self, data: bytes, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and self.breaks and "/resolve/" in self.path:
            self.close_connection = True
        elif self.command == "GET" and not (self.stalls and self.path.endswith("tokenizer.json")):
            self.wfile.write(data)
        elif self.command == "GET":
            self.rfile.read(1)  # until the client has gone

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def resolve(endpoint: str, home: Path, what: str = "all", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RESOLVE, NAME, what]
    variables = hub_variables(endpoint, home) | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def hub_variables(endpoint: str, home: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}


ASK = [sys.executable, "-m", "panscan", "ask", "-p", "Hello?", "--model", NAME]


def test_a_download_reports_its_bytes_and_is_used_when_the_hub_is_away(hub: str, silent: str, tmp_path: Path) -> None:
    first = resolve(hub, tmp_path, "small")
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert not (directory / "model.safetensors").exists()
    small = sum(len(data) for name, data in Hub.files.items() if not name.endswith(".safetensors"))
    assert f"downloading {NAME} B {small} {small}" in first.stderr
    assert resolve(closed(), tmp_path).returncode == 3, "an incomplete copy is no checkpoint"

    second = resolve(hub, tmp_path)
    weights = len(Hub.files["model.safetensors"])
    assert f"downloading {NAME} B {weights} {weights}" in second.stderr
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == Hub.files
    Hub.requests.clear()
    assert resolve(hub, tmp_path).stdout == second.stdout
    assert len(Hub.requests) == 1, "the hub is asked for the commit only"

    for away in ({"endpoint": silent}, {"endpoint": closed()}, {"endpoint": hub, "HF_HUB_OFFLINE": "1"}):
        kept = resolve(home=tmp_path, **away)
        assert (kept.stdout, kept.returncode) == (second.stdout, 0), kept.stderr


REFUSALS = [
    (403, "GatedRepo", f"accept its licence at https://huggingface.co/{NAME}, then run 'hf auth login'"),
    (401, "RepoNotFound", "no such checkpoint on the hub"),
    (404, "RevisionNotFound", "no such --revision"),
]


@pytest.mark.parametrize(("status", "code", "advice"), REFUSALS)
def test_what_the_hub_refuses_becomes_advice(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, advice: str
) -> None:
    monkeypatch.setattr(Hub, "refusal", (status, code))
    refused = resolve(hub, tmp_path)
    assert refused.returncode == 3 and refused.stderr.startswith(f"--model {NAME}: "), refused.stderr
    assert advice in refused.stderr


def test_a_download_that_breaks_off(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error without an earlier copy; with one, a warning and the copy."""
    monkeypatch.setattr(Hub, "breaks", True)
    failed = resolve(hub, tmp_path)
    assert failed.returncode == 3
    assert f"--model {NAME}: the download broke off (" in failed.stderr
    monkeypatch.setattr(Hub, "breaks", False)
    whole = resolve(hub, tmp_path)
    assert whole.returncode == 0, whole.stderr
    monkeypatch.setattr(Hub, "breaks", True)
    monkeypatch.setattr(Hub, "commit", "d" * 40)
    monkeypatch.setattr(Hub, "files", {name: data + b" " for name, data in Hub.files.items()})
    kept = resolve(hub, tmp_path)
    assert (kept.returncode, kept.stdout) == (0, whole.stdout), kept.stderr
    assert "using the cached copy, because the latest commit was not downloaded: the download broke off" in kept.stderr


def test_ctrl_c_ends_a_download(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "stalls", True)
    with subprocess.Popen(ASK, env=hub_variables(hub, tmp_path), stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith(f"downloading {NAME}: "):
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said.strip()) == (130, "panscan: interrupted")


@pytest.mark.parametrize("kind", ["silent", "closed", "offline"])
def test_an_unreachable_hub_is_one_line_within_seconds(silent: str, tmp_path: Path, kind: str) -> None:
    endpoint = silent if kind == "silent" else closed()
    environment = {"HF_HUB_OFFLINE": "1"} if kind == "offline" else {}
    variables = hub_variables(endpoint, tmp_path) | environment
    # huggingface_hub alone would retry for minutes; the rest of the limit is for a busy machine
    done = subprocess.run(ASK, env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    *progress, last = done.stderr.splitlines()
    assert last.startswith(f"panscan: --model {NAME}: not downloaded, and ")
    assert ("HF_HUB_OFFLINE is set" in last) == (kind == "offline")
    if kind == "silent":
        assert f"{endpoint} cannot be reached (no answer within 4 s): check the network" in last
        assert f"contacting {endpoint} ..." in progress
