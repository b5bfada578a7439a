"""Keeps replicas of one sweep in step and makes one run of their records. No process, no tensor: only decisions.

Every replica makes the same visits (a cell, a repeat) in the same order. It passes a visit in one of two ways: it asks
to start, and all start together; or it has said what became of the cell instead, and then no other may wait for it
there. So nobody waits for a replica that never comes, in whatever order their messages arrive.

The first replica alone compares answers, after a cell's last repeat; what it says then is not waited for.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panscan.core import PanscanError, PanscanWarning
from panscan.records.schema import Record

if TYPE_CHECKING:
    from panscan.bench.plan import Observer, SweepPlan, Writer

__all__ = ["Failed", "Finished", "Message", "Ready", "ReplicaSync", "Start", "Told", "Warned", "Wrote", "merged"]


@dataclass(frozen=True, slots=True)
class Start:
    """The first thing that a replica is told: its number, the sweep, the visits that are done, the run directory."""

    replica: int
    plan: SweepPlan
    done: set[tuple[str, int | None]]
    directory: Path


@dataclass(frozen=True, slots=True)
class Ready:
    """Warmed up, and waiting for an answer: True to start measuring, False to give the cell up."""

    cell: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """Records of a repeat, of what became of a cell, or of the run as a whole."""

    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Told:
    """A call of the observer's, by name."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning of panscan's own."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The sweep as a whole cannot go on."""

    error: PanscanError


@dataclass(frozen=True, slots=True)
class Finished:
    """The sweep is through; the replica ends."""


Message = Ready | Wrote | Told | Warned | Failed | Finished


class ReplicaSync:
    """Takes the replicas' messages in the order in which they come, one at a time.

    Args:
        plan: the sweep.
        done: its visits that an earlier start finished.
        devices: where each replica runs, as its records shall say; "" where the replica's own word is right.
        writer: of the run's records.
        observer: sees the sweep as if it were one process.
        answer: tells a replica to start (True) or to give up the cell that it is ready for (False).
    """

    def __init__(
        self,
        plan: SweepPlan,
        done: set[tuple[str, int | None]],
        devices: Sequence[str],
        writer: Writer,
        observer: Observer,
        answer: Callable[[int, bool], None],
    ) -> None:
        self._cells = {cell.id: cell for cell in plan.cells}
        self._devices = devices
        self._writer = writer
        self._observer = observer
        self._answer = answer
        self._waiting: dict[int, Ready] = {}
        # By cell and replica, one reply for each visit: one replica may fail in the next while others end this one.
        self._replies: dict[str, list[deque[Sequence[Record]]]] = defaultdict(lambda: [deque() for _ in devices])
        self._broken: set[str] = set()
        self._gave_up: set[tuple[int, str]] = set()
        measured = [cell for cell in self._cells if all((cell, repeat) in done for repeat in range(plan.repeats))]
        self._through = {(replica, cell) for cell in measured for replica in range(len(devices))}

    def take(self, replica: int, message: Message) -> None:
        """One message of a replica.

        Raises:
            PanscanError: the replica cannot go on, so the run cannot.
        """
        match message:
            case Ready():
                self._ready(replica, message)
            case Wrote(records):
                self._wrote(replica, records)
            case Told(method, arguments):
                getattr(self._observer, method)(*arguments)
            case Warned(text):
                warnings.warn(text, PanscanWarning, stacklevel=2)
            case Failed(error):
                raise type(error)(f"replica {replica}: {error}")

    def _ready(self, replica: int, visit: Ready) -> None:
        self._waiting[replica] = visit
        if visit.cell in self._broken:
            self._give_up(visit.cell)
        elif len(self._waiting) == len(self._devices):
            self._waiting.clear()
            self._observer.ready(self._cells[visit.cell], visit.repeat)
            for each in range(len(self._devices)):
                self._answer(each, True)

    def _give_up(self, cell: str) -> None:
        """Whoever waits to start this cell does not."""
        for replica in [replica for replica, visit in self._waiting.items() if visit.cell == cell]:
            del self._waiting[replica]
            self._gave_up.add((replica, cell))
            self._answer(replica, False)

    def _wrote(self, replica: int, records: Sequence[Record]) -> None:
        kind, cell = records[0]["type"], records[0].get("cell", "")
        if kind not in ("request", "repeat", "cell") or (replica, cell) in self._through:
            if replica == 0:  # about loads and answers one speaks for all
                self._writer.write(records)
            return
        replies = self._replies[cell]
        replies[replica].append(records)
        if kind == "cell":
            self._broken.add(cell)
            self._give_up(cell)
        elif records[-1]["type"] == "cell":
            self._through.add((replica, cell))
        if all(replies):
            self._close(cell, [each.popleft() for each in replies])

    def _close(self, cell: str, replies: Sequence[Sequence[Record]]) -> None:
        """All replicas are through with a visit: it becomes one repeat, or one reason why not."""
        outcomes = {each: records[0] for each, records in enumerate(replies) if records[0]["type"] == "cell"}
        if not outcomes:
            self._writer.write(merged(replies, self._devices))
            return
        own = {each: record for each, record in outcomes.items() if (each, cell) not in self._gave_up}
        first, record = next(iter(own.items()))
        everywhere = len(own) == len(replies) and len({(each["outcome"], each["reason"]) for each in own.values()}) == 1
        reason = record["reason"] if everywhere else f"replica {first}: {record['reason']}"
        self._writer.write([record | {"reason": reason}])
        self._observer.problem(self._cells[cell], record["outcome"], reason)


_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
_OWN = ("started", "ended", "warmup_s", "peak_allocated_bytes", "peak_rss_bytes", "torch_threads")


def merged(parts: Sequence[Sequence[Record]], devices: Sequence[str]) -> list[Record]:
    """One repeat's records out of each replica's: all requests, one ``repeat`` line, the first replica's other lines.

    The line's ``started`` and ``ended`` are the common window, from the latest start to the earliest end; peaks are
    sums. Batch numbers are moved so that no two replicas share one.
    """
    requests = [
        [record | {"replica": replica} for record in part if record["type"] == "request"]
        for replica, part in enumerate(parts)
    ]
    batches = 1 + max((record["batch"] for part in requests for record in part), default=0)
    moved = [record | {"batch": record["batch"] + record["replica"] * batches} for part in requests for record in part]
    lines = [next(record for record in part if record["type"] == "repeat") for part in parts]
    line = lines[0] | {
        "started": max(each["started"] for each in lines),
        "ended": min(each["ended"] for each in lines),
        "warmup_s": max(each["warmup_s"] for each in lines),
        **{name: _total([each[name] for each in lines]) for name in _PEAKS},
        "replicas": [_own(replica, each, devices[replica]) for replica, each in enumerate(lines)],
    }
    return [*moved, line, *(record for record in parts[0] if record["type"] not in ("request", "repeat"))]


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _own(replica: int, line: Mapping[str, Any], device: str) -> Record:
    """A replica's part of the line. Each process calls its own GPU cuda:0; the run needs their names apart."""
    own = {name: line[name] for name in _OWN if name in line}
    return {
        "replica": replica,
        **own,
        "device": device if line["device"].startswith("cuda") and device else line["device"],
    }
