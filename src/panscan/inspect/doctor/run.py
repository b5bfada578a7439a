"""Runs the checks of each lane in a separate process, and survives those that hang or crash.

A check may hang in a driver, or end the process in a broken kernel. Only the parent, in another process, survives both.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module

from panscan.core.child import Child, Inbox, Parent
from panscan.core.errors import error_line, one_line
from panscan.inspect.doctor.checks import Check, CheckFinding, CheckResult, not_checked, warning

LANE_ENVIRONMENT: dict[str, dict[str, str]] = {
    "gpu": {"HF_HUB_OFFLINE": "1"},
    "gemma": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    "compile": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
}
"""Environment variables of lanes. Libraries must not use the network, and threads of several lanes would wait for each
other."""
_STARTUP = 60.0  # seconds until a process begins its first check
_MOST_LOSSES = 3  # processes of a lane that hang or crash before its other checks are skipped

Message = tuple[str, CheckFinding | float | None]
"""From a lane's process: name of a check with None when it begins, with each finding, and with its seconds when it
ends."""


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
    inbox: Inbox = queue.SimpleQueue()
    names = dict.fromkeys(check.lane for check in checks)
    with ExitStack() as children:  # all are ended at last: waiting for one that is stuck in a driver would delay others
        lanes = [
            _Lane(name, [check for check in checks if check.lane == name], results, inbox, children) for name in names
        ]
        while open_lanes := [lane for lane in lanes if lane.start()]:
            deadline = min(end, *(lane.deadline for lane in open_lanes))
            messages = []
            with suppress(queue.Empty):
                messages.append(inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            messages += [inbox.get() for _ in range(inbox.qsize())]  # a check that has ended in time is not late
            for child, message in messages:
                for lane in open_lanes:
                    begun = lane.take(message) if lane.child is child else None
                    if begun is not None and on_progress is not None:
                        on_progress(len(results), begun)
            now = time.monotonic()
            for lane in open_lanes:
                lane.check_deadline(now)
            if now >= end:
                break
    for lane in lanes:
        lane.skip(not_checked(f"all checks together took more than {timeout:g} s", "Raise --timeout."))
    return [results[check.name] for check in checks]


class _Lane:
    """The checks of one lane, and the process that runs them."""

    def __init__(
        self,
        name: str,
        checks: Sequence[Check],
        results: dict[str, CheckResult],
        inbox: Inbox,
        children: ExitStack,
    ) -> None:
        self._name, self._todo, self._results, self._inbox = name, deque(checks), results, inbox
        self._children = children
        self._findings: list[CheckFinding] = []
        self._began = False
        self._losses = 0
        self.child: Child | None = None
        self.deadline = 0.0

    def start(self) -> bool:
        """Start a process if there is none. Returns False when the lane has nothing left to run."""
        if not self._todo:
            self._kill()
            return False
        if self.child is None:
            environment = os.environ | LANE_ENVIRONMENT.get(self._name, {})
            child = Child("panscan.inspect.doctor.run", environment=environment, keep_output=True)
            self.child = self._children.enter_context(child)
            self.child.listen_into(self._inbox)
            self.deadline = time.monotonic() + _STARTUP
            self.child.send_if_alive(list(self._todo))
        return True

    def take(self, message: Message | None) -> str | None:
        """Take a message, None at the end of the process. Returns the name of the check that begins, if it is that."""
        if message is None:
            assert self.child is not None  # the process that has ended
            how = self.child.ending()
            fix = "Reinstall the library that the output names, in a version for this PyTorch."
            if self.child.exit_code == -signal.SIGKILL:
                fix = "Free memory: the kernel kills processes when it runs out."
            self._lose(warning(f"the check's process {how}", fix))
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
        if self.child is None or now < self.deadline:
            return
        allowed = self._todo[0].seconds if self._began else _STARTUP
        self._lose(
            warning(
                f"the check did not finish within {allowed:g} s",
                "A call hangs, or this machine is overloaded: run the command again; if it repeats, the driver or a"
                " library hangs.",
            )
        )

    def _kill(self) -> None:
        """Kill the process and what it started, without waiting for its end, which a driver may delay."""
        if self.child is not None:
            self.child.kill()
            self.child = None

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
        self._kill()
        self._findings.append(finding)
        self._finish(None)
        self._losses += 1
        if self._losses == _MOST_LOSSES:
            self.skip(not_checked(f"{_MOST_LOSSES} earlier checks hung or crashed"))


def main() -> None:
    """Receive a list of checks, run them, and send a :data:`Message` for each event."""
    parent = Parent()
    checks: list[Check] = parent.receive()
    for check in checks:
        parent.send((check.name, None))
        start = time.perf_counter()
        try:
            module, _, function = check.function.partition(":")
            for finding in getattr(import_module(module), function)():
                parent.send((check.name, finding))
        except Exception as error:  # a bug in one check must not hide what the others find
            parent.send((check.name, not_checked(f"the check failed: {one_line(error_line(error, 300))}")))
        parent.send((check.name, time.perf_counter() - start))
    parent.receive()  # until the parent ends this process: threads of libraries and CUDA's own cleanup may hang
