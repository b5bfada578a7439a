"""Runs the checks of each lane in a separate process, and survives those that hang or crash.

A check may hang in a driver, or end the process in a broken kernel. Only the parent, in another process, survives both.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from queue import Empty, SimpleQueue

from panscan.core.activity import Activity, activity
from panscan.core.child import Child, Parent
from panscan.core.daemons import run_in_daemon
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

Message = str | CheckFinding | float
"""From a lane's process: the name of a check that begins, each of its findings, and its seconds when it ends."""


def run_checks(checks: Sequence[Check], timeout: float) -> list[CheckResult]:
    """Run checks and return their results in the same order.

    A check that misses its deadline, or ends its process, gets a warning; the others of its lane continue in a new
    process. Nothing that runs in a check raises here.

    Args:
        checks: with unique names.
        timeout: seconds after which the remaining checks are reported as not checked.
    """
    results: dict[str, CheckResult] = {}
    late = not_checked(f"all checks together took more than {timeout:g} s", "Raise --timeout.")
    with (
        activity("running checks", total=len(checks)) as step,
        ExitStack() as children,  # all are ended at last: waiting for one that is stuck in a driver would delay others
    ):
        run = _Run(children, results, time.monotonic() + timeout, late, step)
        lanes = [
            run_in_daemon(
                partial(run.run_lane, lane, [check for check in checks if check.lane == lane]), "panscan-lane"
            )
            for lane in dict.fromkeys(check.lane for check in checks)
        ]
        for lane in lanes:
            lane.result()
    return [results[check.name] for check in checks]


@dataclass(frozen=True, slots=True)
class _Run:
    """What the lanes share.

    Args:
        children: the processes of all lanes.
        results: takes the result of each check, by name.
        end: when all checks must have ended, by the monotonic clock.
        late: finding of those that have not.
        step: shows the check that began last.
    """

    children: ExitStack
    results: dict[str, CheckResult]
    end: float
    late: CheckFinding
    step: Activity

    def run_lane(self, lane: str, checks: Sequence[Check]) -> None:
        """Run the checks of a lane in a process, which is replaced when a check hangs or crashes."""
        todo, losses = deque(checks), 0
        while todo and losses < _MOST_LOSSES and time.monotonic() < self.end:
            environment = os.environ | LANE_ENVIRONMENT.get(lane, {})
            child = Child("panscan.inspect.doctor.run", environment=environment, keep_output=True)
            self.children.enter_context(child)
            messages: SimpleQueue[Message | None] = SimpleQueue()
            child.listen(messages.put)
            child.send_if_alive(list(todo))
            finished = True
            while todo and finished:
                result = self._result(todo[0], child, messages)
                self.results[todo.popleft().name] = result
                finished = result.seconds is not None
            child.kill()  # without waiting for its end, which a driver may delay
            losses += not finished
        lost = not_checked(f"{_MOST_LOSSES} earlier checks hung or crashed")
        for check in todo:
            self.results[check.name] = CheckResult(check, (lost if losses == _MOST_LOSSES else self.late,), None)

    def _result(self, check: Check, child: Child, messages: SimpleQueue[Message | None]) -> CheckResult:
        """Return the result of a child's next check, without its seconds if the child is lost."""
        findings: list[CheckFinding] = []
        allowed, since = _STARTUP, time.monotonic()
        while True:
            try:
                message = messages.get(timeout=max(0.0, min(since + allowed, self.end) - time.monotonic()))
            except Empty:
                findings.append(self.late if time.monotonic() >= self.end else _overdue(allowed))
                return CheckResult(check, tuple(findings), None)
            if message is None:
                return CheckResult(check, (*findings, _crash(child)), None)
            if isinstance(message, str):
                self.step.rename(f"running {message}")
                self.step.update(len(self.results))
                allowed, since = check.seconds, time.monotonic()
            elif isinstance(message, CheckFinding):
                findings.append(message)
            else:
                return CheckResult(check, tuple(findings), message)


def _overdue(allowed: float) -> CheckFinding:
    return warning(
        f"the check did not finish within {allowed:g} s",
        "A call hangs, or this machine is overloaded: run the command again; if it repeats, the driver or a library"
        " hangs.",
    )


def _crash(child: Child) -> CheckFinding:
    """Return the finding about a check that ended its process."""
    how = child.ending()
    fix = "Reinstall the library that the output names, in a version for this PyTorch."
    if child.exit_code == -signal.SIGKILL:
        fix = "Free memory: the kernel kills processes when it runs out."
    return warning(f"the check's process {how}", fix)


def main() -> None:
    """Receive a list of checks, run them, and send a :data:`Message` for each event."""
    parent = Parent()
    checks: list[Check] = parent.receive()
    for check in checks:
        parent.send(check.name)
        start = time.perf_counter()
        try:
            module, _, function = check.function.partition(":")
            for finding in getattr(import_module(module), function)():
                parent.send(finding)
        except Exception as error:  # a bug in one check must not hide what the others find
            parent.send(not_checked(f"the check failed: {one_line(error_line(error, 300))}"))
        parent.send(time.perf_counter() - start)
    parent.receive()  # until the parent ends this process: threads of libraries and CUDA's own cleanup may hang
