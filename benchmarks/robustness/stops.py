"""Parts ``kills`` and ``enospc``: jobs that SIGKILL or a full disk stops, resumed, compared with undisturbed ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.robustness.cases import Case, Part, random_of
from benchmarks.robustness.children import Ended, panscan, run_child
from benchmarks.robustness.jobs import JOBS, Results, lost, results_of
from panscan.workload.samples import write_samples

_DEADLINE = 300.0
_DISK_KB = 4096
_FREE_KB = {"batch": (0, 4, 8, 12, 16), "bench": (0, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)}
_NO_SPACE = "No space left on device"


@dataclass(eq=False)
class _Yardstick:
    """The documents that all jobs read, and each job's uninterrupted results."""

    scratch: Path

    _results: dict[str, tuple[Results, float]] = field(default_factory=dict)

    @cached_property
    def samples(self) -> Path:
        folder = self.scratch / "samples"
        write_samples(folder, count=6)
        return folder

    def uninterrupted(self, name: str) -> tuple[Results, float]:
        """Return the results of an uninterrupted job, and its seconds."""
        if name in self._results:
            return self._results[name]
        job, where = JOBS[name], self.scratch / "whole"
        where.mkdir()
        ended = run_child(panscan(job.start(where, self.samples)), where, deadline=_DEADLINE)
        results, problem = results_of(job, where)
        if ended.code != 0 or problem or not results:
            raise RuntimeError(f"{name}, uninterrupted: exit code {ended.code}; {problem or ended.err[-500:]}")
        shutil.rmtree(where)
        return self._results.setdefault(name, (results, ended.seconds))


def run_kills(part: Part, seed: int, scratch: Path) -> None:
    """Kill a job at a random moment, some of them a second time while they resume, and let them finish."""
    yardstick = _Yardstick(scratch)
    for index in part.cases:
        random = random_of(seed, "kills", index)
        name = list(JOBS)[index % len(JOBS)]
        where = scratch / "job"
        where.mkdir()
        moments = [random.uniform(0.02, 1.05) for _ in range(random.choice((1, 1, 1, 2)))]
        how = "killed once" if len(moments) == 1 else "killed twice"
        part.add(_stopped(index, name, how, moments, where, yardstick))
        shutil.rmtree(where)


def _stopped(index: int, name: str, how: str, moments: list[float], where: Path, yardstick: _Yardstick) -> Case:
    job, (_, seconds) = JOBS[name], yardstick.uninterrupted(name)
    before: Results = {}
    words = job.start(where, yardstick.samples)
    missing: set[str] = set()
    for moment in moments:
        ended = run_child(panscan(words), where, deadline=_DEADLINE, kill_after=moment * seconds)
        after, problem = results_of(job, where)
        if problem or (not ended.killed and ended.code != 0):
            return _case(index, name, how, "broken", problem or _last(ended), ended)
        missing |= {*lost(before, after)}
        before = after
        words = job.resume(where, yardstick.samples)
    return _finished(index, name, how, before, missing, words, where, yardstick)


def _finished(
    index: int,
    name: str,
    how: str,
    before: Results,
    missing: set[str],
    words: list[str],
    where: Path,
    yardstick: _Yardstick,
) -> Case:
    """Let a stopped job finish, and compare it with the uninterrupted one."""
    job, (expected, _) = JOBS[name], yardstick.uninterrupted(name)
    ended = run_child(panscan(words), where, deadline=_DEADLINE)
    after, problem = results_of(job, where)
    missing |= {*lost(before, after)}
    if ended.hung or ended.traceback or ended.code != 0 or problem:
        outcome, detail = "hang" if ended.hung else "not resumed", problem or _last(ended)
    elif missing:
        outcome, detail = "lost", ", ".join(sorted(missing))
    elif job.duplicates(where):
        outcome, detail = "duplicates", f"{job.duplicates(where)} results stand there twice"
    elif after != expected or (name == "batch, in order" and list(after) != list(expected)):
        outcome, detail = "differs", ", ".join(sorted({*lost(expected, after), *lost(after, expected)}))
    else:
        outcome, detail = "kept", f"{len(before)} of {len(expected)} results were there at the last stop"
    return _case(index, name, how, outcome, detail, ended, len(missing))


def _case(index: int, name: str, how: str, outcome: str, detail: str, ended: Ended, missing: int = 0) -> Case:
    return Case(
        index, name, how, outcome, detail, ended.code, round(ended.seconds, 2), round(ended.peak_mb), lost=missing
    )


def _last(ended: Ended) -> str:
    return ended.err[-1500:] if ended.traceback else ended.message or ended.err[-300:]


def run_enospc(part: Part, seed: int, scratch: Path) -> str:
    """Let jobs run out of space, free some, and resume them; return why this cannot run here, or an empty string."""
    yardstick = _Yardstick(scratch)
    disk = scratch / "disk"
    disk.mkdir()
    try:
        with _mounted(disk):
            for index in part.cases:
                random = random_of(seed, "enospc", index)
                name = list(JOBS)[index % len(JOBS)]
                free = random.choice(_FREE_KB[name[:5]])
                part.add(_filled(index, name, free, disk, yardstick))
                for path in disk.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    except PermissionError as error:
        return str(error)
    return ""


def _filled(index: int, name: str, free_kb: int, disk: Path, yardstick: _Yardstick) -> Case:
    job = JOBS[name]
    where = disk / "job"
    where.mkdir()
    filler = disk / "filler"
    with filler.open("wb") as file:
        space = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - 1024 * free_kb))
    ended = run_child(panscan(job.start(where, yardstick.samples)), yardstick.scratch, deadline=_DEADLINE)
    before, problem = results_of(job, where)
    refused = ended.code == 3 and _NO_SPACE in ended.message
    how = "disk full" if refused else "fits" if ended.code == 0 else "stopped"
    if ended.hung or ended.traceback or problem or how == "stopped":
        filler.unlink()
        return _case(index, name, how, "hang" if ended.hung else "broken", problem or _last(ended), ended)
    filler.unlink()
    return _finished(index, name, how, before, set(), job.resume(where, yardstick.samples), where, yardstick)


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    """Mount a file system of a few megabytes.

    Raises:
        PermissionError: this user may not mount one.
    """
    words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_KB}k", "none", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        process = subprocess.run(words, check=False, capture_output=True, text=True)
        if process.returncode == 0:
            try:
                yield
            finally:
                subprocess.run(["umount", str(folder)], check=True)
            return
        raise PermissionError(f"no file system could be mounted: {process.stderr.strip()}")
    raise PermissionError("there is no mount command")
