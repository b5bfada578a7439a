"""The process of one replica: runs a sweep, whose writer and observer send messages to the parent."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from panscan.bench.replicas import HEARTBEAT_SECONDS, Message, Progress, Ready, ReplicaSignal, Start
from panscan.core import PanscanError, PanscanWarning
from panscan.core.child import Parent
from panscan.core.process import import_uncollected
from panscan.records.request_records import RepeatRecord
from panscan.records.store import AnyRecord

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.settings import Settings


class _RemoteRun:
    """The parent's writer and observer, as this process's sweep uses them."""

    def __init__(self) -> None:
        self._parent = Parent()
        self.start: Start = self._parent.receive()
        threading.Thread(target=self._send_heartbeats, name="panscan-heartbeat", daemon=True).start()

    def send(self, message: Message) -> None:
        self._parent.send(message)

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Send records; each ``repeat`` line gets the number of threads that this process computes with."""
        from panscan.model.machine import thread_count

        for record in records:
            if isinstance(record, RepeatRecord):
                record.torch_threads = thread_count()
        self.send(list(records))

    def ready(self, cell: Cell, repeat: int) -> None:
        """Wait until every replica is ready to start this repeat.

        Raises:
            PanscanError: another replica failed in this cell.
        """
        self.send(Ready(cell.id, repeat))
        if self._parent.receive() is ReplicaSignal.ABORT:
            raise PanscanError("given up, because another replica failed in this cell")

    def loading(self, settings: Settings) -> None:
        self._report(Progress("loading", (settings,)))

    def batch_done(self) -> None:
        self._report(Progress("batch_done"))

    def stage(self, what: str) -> None:
        self._report(Progress("stage", (what,)))

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        """Do nothing: the parent reports the outcome once it has the records of all replicas."""

    def _send_heartbeats(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_SECONDS):
            self.send(ReplicaSignal.HEARTBEAT)

    def _report(self, progress: Progress) -> None:
        """Send progress, if this is the first replica: all replicas make the same progress."""
        if self.start.replica == 0:
            self.send(progress)

    def warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """Replace ``warnings.showwarning``: send panscan's warnings, ignore those of other libraries."""
        if issubclass(category, PanscanWarning):
            self.send(str(message))


def main() -> None:
    """Run the sweep that the parent sends."""
    run = _RemoteRun()
    start = run.start
    import_uncollected("panscan.model.checkpoint")
    from panscan.bench.run import verifier_of
    from panscan.bench.sweep import run_sweep
    from panscan.model.runtime import quiet_libraries
    from panscan.records.store import read_run

    quiet_libraries()
    warnings.simplefilter("always", PanscanWarning)
    warnings.showwarning = run.warning
    try:
        plan = start.plan if start.replica == 0 else replace(start.plan, verify=False)
        previous = read_run(start.directory)
        verifier = verifier_of(start.plan, run.write, run.stage, start.directory, previous, follows=start.replica > 0)
        run_sweep(plan, run, start.done, run, verifier)
    except PanscanError as error:
        run.send(error)
    else:
        run.send(ReplicaSignal.FINISHED)
