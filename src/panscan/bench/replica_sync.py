"""Synchronizes the replicas of a sweep and merges their records into one run. Only decisions: no process, no tensor.

Every replica visits the same cells and repeats in the same order. For each visit it either sends :class:`Ready` and
waits for an answer, or it sends the cell's outcome, and then no other replica waits to start that cell. So no replica
waits for one that never arrives, whatever order the messages arrive in.

Only the first replica compares answers, after a cell's last repeat; the others do not wait for its verdict.

Messages are plain data: they are pickled on their way between the processes.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from panscan.core import PanscanError, PanscanWarning
from panscan.records.schema import AnyRecord, CellRecord, RepeatRecord, ReplicaRecord, RequestRecord

if TYPE_CHECKING:
    from panscan.bench.plan import Observer, SweepPlan, Writer
    from panscan.settings import Settings

__all__ = [
    "Abort",
    "Answer",
    "BatchDone",
    "Failed",
    "Finished",
    "Loading",
    "Message",
    "Proceed",
    "Ready",
    "RecordsWritten",
    "ReplicaSync",
    "Stage",
    "Start",
    "Warned",
    "merged",
]


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a replica.

    Args:
        replica: its number.
        plan: the sweep to run.
        done: finished visits, as (cell id, repeat).
        directory: the run directory.
    """

    replica: int
    plan: SweepPlan
    done: set[tuple[str, int | None]]
    directory: Path


@dataclass(frozen=True, slots=True)
class Proceed:
    """Answers :class:`Ready`: every replica is ready, start measuring."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Answers :class:`Ready`: another replica failed in this cell, skip it."""


Answer = Proceed | Abort


@dataclass(frozen=True, slots=True)
class Loading:
    """The replica starts loading a model."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Ready:
    """The warm-up is over; the replica waits for an :data:`Answer`."""

    cell: str
    repeat: int


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The replica measured a batch."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The replica starts work that is not measured, such as computing the reference."""

    text: str


@dataclass(frozen=True, slots=True)
class RecordsWritten:
    """Records of a repeat, of a cell's outcome, or of the whole run."""

    records: Sequence[AnyRecord]


@dataclass(frozen=True, slots=True)
class Warned:
    """The replica issued a :class:`panscan.core.PanscanWarning`."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica cannot continue its sweep."""

    error: PanscanError


@dataclass(frozen=True, slots=True)
class Finished:
    """The replica finished its sweep, and its process exits."""


Message = Loading | Ready | BatchDone | Stage | RecordsWritten | Warned | Failed | Finished


class ReplicaSync:
    """Handles the replicas' messages one at a time, in the order in which they arrive.

    Args:
        plan: the sweep.
        done: visits that an earlier start finished.
        devices: the device of each replica for its records; "" keeps the name that the replica uses.
        writer: takes the run's records.
        observer: observes the sweep as if it ran in one process.
        answer: sends an answer to the replica of this number.
    """

    def __init__(
        self,
        plan: SweepPlan,
        done: set[tuple[str, int | None]],
        devices: Sequence[str],
        *,
        writer: Writer,
        observer: Observer,
        answer: Callable[[int, Answer], None],
    ) -> None:
        self._cells = {cell.id: cell for cell in plan.cells}
        self._devices = devices
        self._writer = writer
        self._observer = observer
        self._answer = answer
        self._waiting: dict[int, Ready] = {}
        # By cell and replica, one reply for each visit: one replica may fail in the next while others end this one.
        self._replies: dict[str, list[deque[Sequence[AnyRecord]]]] = defaultdict(lambda: [deque() for _ in devices])
        self._broken: set[str] = set()
        self._gave_up: set[tuple[int, str]] = set()
        self._finished: set[int] = set()
        measured = [cell for cell in self._cells if all((cell, repeat) in done for repeat in range(plan.repeats))]
        self._through = {(replica, cell) for cell in measured for replica in range(len(devices))}

    def has_finished(self, replica: int) -> bool:
        """Whether a replica finished its sweep, so that the end of its process is no failure."""
        return replica in self._finished

    def take(self, replica: int, message: Message) -> None:
        """Handle a message of a replica.

        Raises:
            PanscanError: the replica cannot continue, so the run cannot.
        """
        match message:
            case Loading(settings):
                self._observer.loading(settings)
            case Ready():
                self._ready(replica, message)
            case BatchDone():
                self._observer.batch_done()
            case Stage(text):
                self._observer.stage(text)
            case RecordsWritten(records):
                self._wrote(replica, records)
            case Warned(text):
                warnings.warn(text, PanscanWarning, stacklevel=2)
            case Failed(error):
                raise type(error)(f"replica {replica}: {error}")
            case Finished():
                self._finished.add(replica)
            case _:
                assert_never(message)

    def _ready(self, replica: int, visit: Ready) -> None:
        self._waiting[replica] = visit
        if visit.cell in self._broken:
            self._give_up(visit.cell)
        elif len(self._waiting) == len(self._devices):
            self._waiting.clear()
            self._observer.ready(self._cells[visit.cell], visit.repeat)
            for each in range(len(self._devices)):
                self._answer(each, Proceed())

    def _give_up(self, cell: str) -> None:
        """Tell the replicas that wait to start a cell to skip it."""
        for replica in [replica for replica, visit in self._waiting.items() if visit.cell == cell]:
            del self._waiting[replica]
            self._gave_up.add((replica, cell))
            self._answer(replica, Abort())

    def _wrote(self, replica: int, records: Sequence[AnyRecord]) -> None:
        first = records[0]
        if not isinstance(first, RequestRecord | RepeatRecord | CellRecord) or (replica, first.cell) in self._through:
            if replica == 0:  # all replicas load the same, and only the first compares answers
                self._writer.write(records)
            return
        cell = first.cell
        replies = self._replies[cell]
        replies[replica].append(records)
        if isinstance(first, CellRecord):
            self._broken.add(cell)
            self._give_up(cell)
        elif isinstance(records[-1], CellRecord):
            self._through.add((replica, cell))
        if all(replies):
            self._close(cell, [queue.popleft() for queue in replies])

    def _close(self, cell: str, replies: Sequence[Sequence[AnyRecord]]) -> None:
        """Write a visit that all replicas ended: one merged repeat, or one outcome with its reason."""
        outcomes = {replica: records[0] for replica, records in enumerate(replies)}
        ended = {replica: record for replica, record in outcomes.items() if isinstance(record, CellRecord)}
        if not ended:
            self._writer.write(merged(replies, self._devices))
            return
        own = {replica: record for replica, record in ended.items() if (replica, cell) not in self._gave_up}
        first, record = next(iter(own.items()))
        everywhere = len(own) == len(replies) and len({(one.outcome, one.reason) for one in own.values()}) == 1
        reason = record.reason if everywhere else f"replica {first}: {record.reason}"
        self._writer.write([structs.replace(record, reason=reason)])
        self._observer.problem(self._cells[cell], record.outcome, reason or "")


def merged(parts: Sequence[Sequence[AnyRecord]], devices: Sequence[str]) -> list[AnyRecord]:
    """Merge the records of one repeat: all requests, one ``repeat`` line, the first replica's other lines.

    The line's ``started`` and ``ended`` are the common window, from the latest start to the earliest end; peaks are
    sums. Batch numbers are shifted so that no two replicas share one.
    """
    requests = [
        (replica, record) for replica, part in enumerate(parts) for record in part if isinstance(record, RequestRecord)
    ]
    batches = 1 + max((request.batch for _, request in requests), default=0)
    shifted = [
        structs.replace(request, replica=replica, batch=request.batch + replica * batches)
        for replica, request in requests
    ]
    lines = [next(record for record in part if isinstance(record, RepeatRecord)) for part in parts]
    line = structs.replace(
        lines[0],
        started=max(line.started for line in lines),
        ended=min(line.ended for line in lines),
        warmup_s=max(line.warmup_s for line in lines),
        peak_allocated_bytes=_total([line.peak_allocated_bytes for line in lines]),
        peak_reserved_bytes=_total([line.peak_reserved_bytes for line in lines]),
        peak_rss_bytes=_total([line.peak_rss_bytes for line in lines]),
        replicas=[_replica_record(replica, line, devices[replica]) for replica, line in enumerate(lines)],
    )
    return [*shifted, line, *(record for record in parts[0] if not isinstance(record, RequestRecord | RepeatRecord))]


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _replica_record(replica: int, line: RepeatRecord, device: str) -> ReplicaRecord:
    """Return a replica's part of the line. Each process calls its own GPU cuda:0, so the run's name replaces it."""
    known = line.device or ""
    return ReplicaRecord(
        replica=replica,
        started=line.started,
        ended=line.ended,
        warmup_s=line.warmup_s,
        peak_allocated_bytes=line.peak_allocated_bytes,
        peak_rss_bytes=line.peak_rss_bytes,
        torch_threads=line.torch_threads,
        tokens=line.tokens,
        device=device if known.startswith("cuda") and device else known,
    )
