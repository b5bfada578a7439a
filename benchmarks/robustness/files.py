"""Part ``files``: damaged images and PDFs, found, decoded and planned as every command does.

Workers decode one file after the other. The kernel ends a worker whose file takes too long (the alarm's default action
needs no Python), and another one continues with the next file.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.robustness.cases import Case, Part, random_of
from benchmarks.robustness.mutate import MUTATIONS, mutated
from benchmarks.robustness.seeds import SEEDS
from panscan.core import ImageError, InputError, PanAndScan
from panscan.images.files import find_pages, open_image
from panscan.images.views import plan_views

_DEADLINE = 10.0  # seconds for one file
_ADDRESS_SPACE = 2_000_000_000  # bytes beyond what a worker begins with
_MOST_MB = 800  # an image of 178 million pixels, the most that is decoded, takes 537 MB
_PAGES = 4  # of one file


def damaged(seed: int, index: int) -> tuple[str, str, bytes]:
    """Return kind, mutation and bytes of a case."""
    random = random_of(seed, "files", index)
    kind = list(SEEDS)[index % len(SEEDS)]
    name = list(MUTATIONS)[index // len(SEEDS) % len(MUTATIONS)]
    return kind, name, mutated(SEEDS[kind](), name, random)


def run_files(part: Part, seed: int, scratch: Path, workers: int) -> None:
    """Decode every case of a part in ``workers`` processes."""
    with selectors.DefaultSelector() as selector:
        for number in range(min(workers, len(part.cases))):
            _Worker(part.cases[number::workers], seed, scratch / str(number)).start(selector)
        while selector.get_map():
            for key, _ in selector.select():
                for case in key.data.arrived(selector):
                    part.add(case, {"input": damaged(seed, case.index)[2]} if case.failed else None)


@dataclass(slots=True)
class _Worker:
    """A process that decodes some cases, and the reading end of its pipe of results."""

    left: Sequence[int]
    seed: int
    folder: Path
    pid: int = 0
    pipe: int = -1
    _read: bytearray = field(default_factory=bytearray)

    def start(self, selector: selectors.BaseSelector) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _decode_all(self.left, self.seed, self.folder, writing)
            finally:
                os._exit(0)
        os.close(writing)
        selector.register(self.pipe, selectors.EVENT_READ, self)

    def arrived(self, selector: selectors.BaseSelector) -> list[Case]:
        """Return the cases whose results arrived. A worker that died is replaced; its case has failed."""
        chunk = os.read(self.pipe, 65_536)
        self._read += chunk
        *lines, rest = bytes(self._read).split(b"\n")
        self._read[:] = rest
        cases = [Case(**json.loads(line)) for line in lines]
        self.left = self.left[len(cases) :]
        if not chunk:
            selector.unregister(self.pipe)
            os.close(self.pipe)
            _, status = os.waitpid(self.pid, 0)
            if self.left:
                kind, name, _ = damaged(self.seed, self.left[0])
                hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                cases.append(Case(self.left[0], kind, name, "hang" if hung else "crash", f"wait status {status}"))
                self.left = self.left[1:]
            if self.left:
                self._read.clear()
                self.start(selector)
        return cases


def _decode_all(cases: Sequence[int], seed: int, folder: Path, pipe: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    noise = os.open(folder / "stderr", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(noise, 2)
    limit = _status("VmSize") * 1024 + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for index in cases:
        signal.setitimer(signal.ITIMER_REAL, _DEADLINE)
        result = _decode(seed, index, folder / "input")
        signal.setitimer(signal.ITIMER_REAL, 0)
        result["noise"] = os.fstat(noise).st_size
        if result["noise"]:
            result["detail"] = f"{result['detail']} | {os.pread(noise, 200, 0).decode('utf-8', 'replace')}"
            os.ftruncate(noise, 0)
            os.lseek(noise, 0, os.SEEK_SET)
        os.write(pipe, json.dumps(result).encode() + b"\n")


def _decode(seed: int, index: int, path: Path) -> dict[str, Any]:
    kind, name, content = damaged(seed, index)
    path.write_bytes(content)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    outcome, detail = _outcome(path)
    seconds, peak = time.perf_counter() - start, _status("VmHWM") / 1024
    if peak > _MOST_MB:
        outcome, detail = "memory", f"{peak:.0f} MB; {detail}"
    return {
        "index": index,
        "group": kind,
        "how": name,
        "outcome": outcome,
        "detail": detail,
        "seconds": round(seconds, 3),
        "peak_mb": round(peak),
    }


def _outcome(path: Path) -> tuple[str, str]:
    problems: list[InputError] = []
    try:
        pages = find_pages([path], on_problem=problems.append)
        for page in pages[:_PAGES]:
            try:
                image = open_image(page)
                plan_views(*image.size, PanAndScan())
            except ImageError as error:
                problems.append(error)
    except BaseException:
        return "traceback", traceback.format_exc()[-1500:]
    for problem in problems:
        if "\n" in str(problem) or not str(problem).startswith(str(path)):
            return "message", f"not one line that names the file: {str(problem)[:300]!r}"
    return ("refused", str(problems[0])[-200:]) if problems else ("read", "")


def _status(name: str) -> int:
    """Return a field of this process's status, in KiB."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
