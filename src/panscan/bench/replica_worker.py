"""One replica: a process that runs a sweep and talks with the one that started it over its standard input and output.

It ends when its input closes, so that nothing is left running when that process is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panscan.bench.replica_sync import Failed, Finished, Message, Ready, Start, Told, Warned, Wrote
from panscan.core import PanscanError, PanscanWarning

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.settings import Settings

__all__ = ["main"]


class _Link:
    """The writer and the observer of this process' sweep: all that they are given goes to the other process."""

    def __init__(self) -> None:
        self._incoming = os.fdopen(os.dup(0), "rb")
        self._outgoing = os.fdopen(os.dup(1), "wb")
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # what libraries print must not come between the messages
        self._one_at_a_time = threading.Lock()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._replica = 0

    def start(self) -> Start:
        """The sweep to run. From then on, answers are listened for."""
        start: Start = pickle.load(self._incoming)
        self._replica = start.replica
        threading.Thread(target=self._listen, daemon=True).start()
        return start

    def _listen(self) -> None:
        try:
            while True:
                self._answers.put(pickle.load(self._incoming))
        finally:
            os._exit(1)  # the other process is gone; this one may be deep inside of a batch

    def send(self, message: Message) -> None:
        with self._one_at_a_time:
            pickle.dump(message, self._outgoing)
            self._outgoing.flush()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Records, each ``repeat`` line with the number of threads that this process computes with."""
        from panscan.model.machine import thread_count

        threads = {"torch_threads": thread_count()}
        self.send(Wrote([{**record, **(threads if record["type"] == "repeat" else {})} for record in records]))

    def loading(self, settings: Settings) -> None:
        self._tell("loading", settings)

    def ready(self, cell: Cell, repeat: int) -> None:
        """Wait until every replica is as far."""
        self.send(Ready(cell.id, repeat))
        if not self._answers.get():
            raise PanscanError("given up, because another replica could not go on with it")

    def batch_done(self) -> None:
        self._tell("batch_done")

    def stage(self, what: str) -> None:
        self._tell("stage", what)

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        """Told of by whoever has all replicas' records."""

    def _tell(self, method: str, *arguments: Any) -> None:
        """All replicas do the same, so the first one's progress stands for all."""
        if self._replica == 0:
            self.send(Told(method, arguments))

    def warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """In the place of ``warnings.showwarning``; other libraries' warnings stay theirs."""
        if issubclass(category, PanscanWarning):
            self.send(Warned(str(message)))


def main() -> None:
    """Run the sweep that the other process sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; one of them decides
    link = _Link()
    start = link.start()
    from panscan.bench.run import verifier_of
    from panscan.bench.sweep import run_sweep
    from panscan.model.runtime import quiet_libraries
    from panscan.records.store import read_run

    quiet_libraries()
    warnings.simplefilter("always", PanscanWarning)
    warnings.showwarning = link.warning
    try:
        plan = start.plan if start.replica == 0 else replace(start.plan, verify=False)
        verifier = (
            verifier_of(plan, link, link.stage, start.directory, read_run(start.directory)) if plan.verify else None
        )
        run_sweep(plan, link, start.done, link, verifier)
    except PanscanError as error:
        link.send(Failed(error))
    else:
        link.send(Finished())


if __name__ == "__main__":
    main()
