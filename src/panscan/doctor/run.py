"""Runs the checks of each lane in a separate process, and survives those that hang or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import BinaryIO

from panscan.core.errors import one_line
from panscan.core.process import worker_command
from panscan.doctor.findings import Check, CheckFinding, CheckResult, not_checked, warning
from panscan.doctor.worker import Message

__all__ = ["LANE_ENVIRONMENT", "run_checks"]

LANE_ENVIRONMENT: dict[str, dict[str, str]] = {
    "gpu": {"HF_HUB_OFFLINE": "1"},
    "gemma": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    "compile": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
}
"""Environment variables of lanes. Libraries must not use the network, and threads of several lanes would wait for each
other."""
_STARTUP = 60.0  # seconds until a process begins its first check
_MOST_LOSSES = 3  # processes of a lane that hang or crash before its other checks are skipped
_TAIL_BYTES = 2000


def run_checks(
    checks: Sequence[Check], timeout: float, on_progress: Callable[[int, str], None] | None = None
) -> list[CheckResult]:
    """Run checks and return their results in the same order.

    A check that misses its deadline, or ends its process, gets a warning; the others of its lane continue in a new
    process. Nothing that runs in a check raises here.

    Args:
        checks: with unique names.
        timeout: seconds after which the remaining checks are reported as not checked.
        on_progress: called with the number of finished checks and the name of the check that begins.
    """
    results: dict[str, CheckResult] = {}
    end = time.monotonic() + timeout
    lanes = [_Lane(name, [check for check in checks if check.lane == name], results) for name in _lanes(checks)]
    try:
        while open_lanes := {lane.connection: lane for lane in lanes if lane.start()}:
            deadline = min(end, *(lane.deadline for lane in open_lanes.values()))
            for ready in wait(list(open_lanes), max(0.0, deadline - time.monotonic())):
                lane = open_lanes[ready]  # type: ignore[index]  # wait() returns some of its arguments
                if (name := lane.receive()) is not None and on_progress is not None:
                    on_progress(len(results), name)
            now = time.monotonic()
            for lane in open_lanes.values():
                lane.check_deadline(now)
            if now >= end:
                break
    finally:
        for lane in lanes:
            lane.close()
    for lane in lanes:
        lane.skip(not_checked(f"all checks together took more than {timeout:g} s", "Raise --timeout."))
    return [results[check.name] for check in checks]


def _lanes(checks: Iterable[Check]) -> list[str]:
    return list(dict.fromkeys(check.lane for check in checks))


class _Lane:
    """The checks of one lane, and the process that runs them."""

    def __init__(self, name: str, checks: Sequence[Check], results: dict[str, CheckResult]) -> None:
        self._name, self._todo, self._results = name, deque(checks), results
        self._findings: list[CheckFinding] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._began = False
        self._losses = 0
        self.connection: Connection = None  # type: ignore[assignment]  # set by start(), before anything reads it
        self.deadline = 0.0

    def start(self) -> bool:
        """Start a process if there is none. Returns False when the lane has nothing left to run."""
        if not self._todo:
            self.close()
            return False
        if self._process is not None:
            return True
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        self._process = subprocess.Popen(
            worker_command("panscan.doctor.worker", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | LANE_ENVIRONMENT.get(self._name, {}),
            start_new_session=True,  # its own group, so that compilers which a check starts end with it
        )
        theirs.close()
        self.deadline = time.monotonic() + _STARTUP
        with suppress(OSError):  # a process that died at once is noticed by receive()
            self.connection.send(list(self._todo))
        return True

    def receive(self) -> str | None:
        """Take one message. Returns the name of the check that begins, if it is that."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            self._lose(self._crash())
            return None
        name, content = message
        if content is None:
            self._began, self.deadline = True, time.monotonic() + self._todo[0].seconds
            return name
        if isinstance(content, CheckFinding):
            self._findings.append(content)
        else:
            self._finish(content)
        return None

    def check_deadline(self, now: float) -> None:
        """Give up the running check if it is late."""
        if self._process is None or now < self.deadline:
            return
        allowed = self._todo[0].seconds if self._began else _STARTUP
        self._lose(
            warning(
                f"the check did not finish within {allowed:g} s",
                "A call hangs, or this machine is overloaded: run the command again; if it repeats, the driver or a"
                " library hangs.",
            )
        )

    def close(self) -> None:
        """Kill the process and what it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that is stuck in the kernel cannot be killed: leave it
            self._process.wait(2.0)
        self.connection.close()
        assert self._log is not None  # opened with the process
        self._log.close()
        self._process = None

    def skip(self, reason: CheckFinding) -> None:
        """Record why the remaining checks have no result. The first keeps what it has found."""
        while self._todo:
            self._findings.append(reason)
            self._finish(None)

    def _finish(self, seconds: float | None) -> None:
        """Record the first check's findings; the process continues with the next."""
        check = self._todo.popleft()
        self._results[check.name] = CheckResult(check, tuple(self._findings), seconds)
        self._findings, self._began = [], False
        self.deadline = time.monotonic() + _STARTUP

    def _lose(self, finding: CheckFinding) -> None:
        """Record that the running check ended its process, which :meth:`start` replaces."""
        self.close()
        self._findings.append(finding)
        self._finish(None)
        self._losses += 1
        if self._losses == _MOST_LOSSES:
            self.skip(not_checked(f"{_MOST_LOSSES} earlier checks hung or crashed"))

    def _crash(self) -> CheckFinding:
        assert self._process is not None and self._log is not None  # receive() has a process
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        killed = code == -signal.SIGKILL
        return warning(
            f"the check ended its process {how}; the last output was: {one_line(said.strip())[:200]}",
            "Free memory: the kernel kills processes when it runs out."
            if killed
            else "Reinstall the library that the output names, in a version that matches PyTorch.",
        )
