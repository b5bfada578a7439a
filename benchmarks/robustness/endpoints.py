"""Part ``endpoints``: ``panscan load`` and ``panscan verify`` against hostile endpoints, which are real servers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.robustness.cases import Case, Part
from benchmarks.robustness.children import Ended, panscan, run_child
from benchmarks.robustness.hostile_server import ENDPOINTS

_DEADLINE = 60.0  # seconds
_MOST_MB = 2500.0
_LIMITED = ("--timeout", "2")  # seconds of a request
_VERBS = {
    "load": ["--num-prompts", "4", "--max-concurrency", "4", "--max-tokens", "8", "--ready-check-timeout-sec", "0"],
    "verify": ["--model", "tiny", "--max-requests", "8", "--max-tokens", "4"],
}
_CODES = {"load": (0, 2, 3, 4), "verify": (0, 2, 3, 5, 6)}


def run_endpoints(part: Part, scratch: Path) -> None:
    """Run both verbs against every endpoint."""
    with _server() as port:
        for index in part.cases:
            verb, name = list(_VERBS)[index % 2], ENDPOINTS[index // 2 % len(ENDPOINTS)]
            folder = scratch / "work"
            folder.mkdir()
            url = f"http://127.0.0.1:{port}/{ENDPOINTS.index(name)}"
            ended = run_child(panscan([verb, url, *_VERBS[verb], *_LIMITED]), folder, deadline=_DEADLINE)
            shutil.rmtree(folder)
            outcome, detail = _outcome(verb, ended), ended.err[-1500:] if ended.traceback else ended.message
            seconds, memory = round(ended.seconds, 2), round(ended.peak_mb)
            part.add(Case(index, verb, name, outcome, detail, ended.code, seconds, memory))


def _outcome(verb: str, ended: Ended) -> str:
    if ended.hung:
        return "hang"
    if ended.traceback or "unexpected" in ended.message:
        return "traceback"
    if ended.code is None:
        return "crash"
    if ended.peak_mb > _MOST_MB:
        return "memory"
    if ended.code not in _CODES[verb]:
        return "wrong code"
    return "refused" if ended.code in (2, 3) else "answered"


@contextmanager
def _server() -> Iterator[int]:
    """Start the endpoints in a process, because children are forked from a process without threads."""
    command = [sys.executable, "-m", "benchmarks.robustness.hostile_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # a pipe
            yield int(process.stdout.readline())
        finally:
            process.kill()
