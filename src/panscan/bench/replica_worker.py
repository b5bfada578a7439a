"""The process of one replica: runs a sweep and exchanges messages with its parent over standard input and output.

It exits when its input closes, so that nothing keeps running when the parent is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from panscan.bench.replica_sync import (
    Abort,
    Answer,
    BatchDone,
    Failed,
    Finished,
    Loading,
    Message,
    Proceed,
    Ready,
    RecordsWritten,
    Stage,
    Start,
    Warned,
)
from panscan.core import PanscanError, PanscanWarning
from panscan.core.process import import_uncollected
from panscan.records.schema import AnyRecord, RepeatRecord

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.settings import Settings

__all__ = ["main"]


class _ParentConnection:
    """The connection to the parent process: writer and observer of this process's sweep."""

    def __init__(self) -> None:
        self._incoming = os.fdopen(os.dup(0), "rb")
        self._outgoing = os.fdopen(os.dup(1), "wb")
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # what libraries print must not mix with the messages
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._replica = 0

    def start(self) -> Start:
        """Receive the sweep to run, then start listening for answers."""
        start: Start = pickle.load(self._incoming)
        self._replica = start.replica
        threading.Thread(target=self._listen, daemon=True).start()
        return start

    def _listen(self) -> None:
        try:
            while True:
                self._answers.put(pickle.load(self._incoming))
        finally:
            os._exit(1)  # the parent is gone; the main thread may be in the middle of a batch

    def send(self, message: Message) -> None:
        with self._sending:
            pickle.dump(message, self._outgoing)
            self._outgoing.flush()

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Send records; each ``repeat`` line gets the number of threads that this process computes with."""
        from panscan.model.machine import thread_count

        for record in records:
            if isinstance(record, RepeatRecord):
                record.torch_threads = thread_count()
        self.send(RecordsWritten(records))

    def loading(self, settings: Settings) -> None:
        self._report(Loading(settings))

    def ready(self, cell: Cell, repeat: int) -> None:
        """Wait until every replica is ready to start this repeat.

        Raises:
            PanscanError: another replica failed in this cell.
        """
        self.send(Ready(cell.id, repeat))
        match answer := self._answers.get():
            case Proceed():
                return
            case Abort():
                raise PanscanError("given up, because another replica failed in this cell")
            case _:
                assert_never(answer)

    def batch_done(self) -> None:
        self._report(BatchDone())

    def stage(self, what: str) -> None:
        self._report(Stage(what))

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        """Do nothing: the parent reports the outcome once it has the records of all replicas."""

    def _report(self, progress: Loading | BatchDone | Stage) -> None:
        """Send progress, if this is the first replica: all replicas make the same progress."""
        if self._replica == 0:
            self.send(progress)

    def warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """Replace ``warnings.showwarning``: send panscan's warnings, ignore those of other libraries."""
        if issubclass(category, PanscanWarning):
            self.send(Warned(str(message)))


def main() -> None:
    """Run the sweep that the parent sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the parent decides
    parent = _ParentConnection()
    start = parent.start()
    import_uncollected("panscan.model.checkpoint")
    from panscan.bench.run import verifier_of
    from panscan.bench.sweep import run_sweep
    from panscan.model.runtime import quiet_libraries
    from panscan.records.store import read_run

    quiet_libraries()
    warnings.simplefilter("always", PanscanWarning)
    warnings.showwarning = parent.warning
    try:
        plan = start.plan if start.replica == 0 else replace(start.plan, verify=False)
        previous = read_run(start.directory)
        verifier = verifier_of(start.plan, parent, parent.stage, start.directory, previous, follows=start.replica > 0)
        run_sweep(plan, parent, start.done, parent, verifier)
    except PanscanError as error:
        parent.send(Failed(error))
    else:
        parent.send(Finished())
