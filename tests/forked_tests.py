"""``pytest --processes 4``: tests in forks of one process, which imports and collects once for all of them.

A fork runs whole modules, so that their fixtures are made once, and asks for the next one when it begins the last test
of what it has. This process replays their reports. One that dies fails its test and is replaced.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import pytest
from tests import forked_workers

_ENDING_SECONDS = 10

_SLOWEST = (
    *("test_cluster", "test_demo", "test_generate", "test_ranks", "test_replicas"),
    *("cli/test_bench", "cli/test_verify", "mutations/", "serve/", "verdict/test_cells", "verify/test_run"),
)
"""Modules that begin first, because a process that gets one last would be alone with it."""


@dataclass(eq=False)
class _Fork:
    """A process that runs tests, as the first one sees it."""

    pid: int
    connection: Connection
    items: list[int] = field(default_factory=list)
    """Places of the tests that it was given; it has begun all before ``begun``."""
    begun: int = 0


class ForkedTests:
    """Plugin that replaces the loop over the tests.

    Args:
        processes: number of tests that run at the same time.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._modules: list[list[int]] = []
        self._forks: dict[Connection, _Fork] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        places = range(len(session.items))
        modules = [list(module) for _, module in groupby(places, lambda place: session.items[place].path)]
        self._modules = sorted(modules, key=lambda module: _is_slow(session.items[module[0]]))
        for _ in range(min(self.processes, len(modules))):
            self._fork(session)
        try:
            while self._forks:
                for connection in wait(list(self._forks)):
                    self._receive(session, self._forks[connection])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _end(self) -> None:
        """Interrupt the forks that still run, and kill those that do not end."""
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forks = [psutil.Process(fork.pid) for fork in self._forks.values()]
        for fork in forks:
            fork.send_signal(signal.SIGINT)
        for fork in psutil.wait_procs(forks, timeout=_ENDING_SECONDS)[1]:
            fork.kill()
        signal.signal(signal.SIGINT, handler)

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        if pid := os.fork():
            theirs.close()
            self._forks[ours] = _Fork(pid, ours)
            return
        code = 1
        try:
            for connection in (*self._forks, ours):
                connection.close()
            _run(session, theirs)
            code = 0
        finally:
            atexit._run_exitfuncs()
            os._exit(code)

    def _receive(self, session: pytest.Session, fork: _Fork) -> None:
        """Act on one message of a fork, or on its end."""
        hook = session.config.hook
        try:
            message = fork.connection.recv()
        except EOFError:
            self._replace(session, fork)
            return
        if message == "next":
            module = self._modules.pop() if self._modules else []
            fork.items += module
            fork.connection.send(module)
        elif message == "begun":
            fork.begun += 1
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=message)
            hook.pytest_runtest_logreport(report=report)

    def _replace(self, session: pytest.Session, fork: _Fork) -> None:
        """Forget a fork; if it died, fail the test that it ran, and let another run the rest."""
        del self._forks[fork.connection]
        _, status = os.waitpid(fork.pid, 0)
        if status == 0:
            return
        if fork.begun:
            item, code = session.items[fork.items[fork.begun - 1]], os.waitstatus_to_exitcode(status)
            text = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        if rest := fork.items[fork.begun :]:
            self._modules.append(rest)
        self._fork(session)


def _is_slow(item: pytest.Item) -> bool:
    return any(name in item.nodeid for name in _SLOWEST)


def _run(session: pytest.Session, connection: Connection) -> None:
    """Run tests in a fork, as long as there are any."""
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # the first process reports
    capture.start_global_capturing()  # into files of its own
    capture.suspend_global_capture()
    paths: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    paths._basetemp = paths.mktemp(f"process-{os.getpid()}", numbered=False)
    random.seed()
    config.pluginmanager.register(_Reporter(config, connection))
    forked_workers.prepare()
    items = _items(session, connection)
    item = next(items, None)
    try:
        while item is not None:
            following = next(items, None)
            connection.send("begun")
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
    finally:  # nothing is left to tear down, unless the tests were interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)


def _items(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    while True:
        connection.send("next")
        if not (module := connection.recv()):
            return
        for place in module:
            yield session.items[place]


class _Reporter:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._connection.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
