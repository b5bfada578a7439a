"""Replicas of one sweep on disjoint devices: one process each, measured at the same time into one run.

Every replica visits the same cells and repeats in the same order. For each visit it either sends :class:`Ready` and
waits for an answer, or it sends the cell's outcome, and then no other replica waits to start that cell. So no replica
waits for one that never arrives, whatever order the messages arrive in.

Only the first replica compares answers, after a cell's last repeat; the others do not wait for its verdict.
"""

from __future__ import annotations

import contextlib
import os
import queue
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from panscan.bench.plan import FinishedVisits, Observer, SweepPlan, Writer
from panscan.core import PanscanError, PanscanWarning, SettingError, UnsupportedError, now
from panscan.core.access import remote_access
from panscan.core.child import Child, Inbox
from panscan.core.process import usable_cores
from panscan.records.request_records import RepeatRecord, ReplicaRecord, RequestRecord
from panscan.records.schema import CellRecord
from panscan.records.store import AnyRecord

HEARTBEAT_SECONDS = 2.0
_SILENT_SECONDS = 120.0  # without a message, after which a replica hangs; imports may hold Python's lock for a while
_TICK_SECONDS = 1.0
_WORKER = "panscan.bench.replica_worker"


class ReplicaSignal(Enum):
    """Messages without data."""

    PROCEED = auto()
    """Answers :class:`Ready`: every replica is ready, start measuring."""
    ABORT = auto()
    """Answers :class:`Ready`: another replica failed in this cell, skip it."""
    FINISHED = auto()
    """From a replica: it finished its sweep, and its process exits."""
    HEARTBEAT = auto()
    """From a replica, every :data:`HEARTBEAT_SECONDS`: its process runs."""


class Start(Struct, frozen=True):
    """The first message to a replica.

    Args:
        replica: its number.
        plan: the sweep to run.
        done: finished visits, as (cell id, repeat).
        directory: the run directory.
    """

    replica: int
    plan: SweepPlan
    done: FinishedVisits
    directory: Path


class Ready(Struct, frozen=True):
    """From a replica: the warm-up is over; it waits for an answer."""

    cell: str
    repeat: int


class Progress(Struct, frozen=True):
    """From a replica: a method of its :class:`panscan.bench.plan.Observer` was called."""

    method: str
    arguments: tuple[Any, ...] = ()


Message = Ready | Progress | list[AnyRecord] | str | PanscanError | ReplicaSignal
"""From a replica; a list is of records of a repeat, of a cell's outcome or of the whole run; a text is a warning's; an
error ends its sweep."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The devices of one replica.

    Args:
        visible: its CUDA_VISIBLE_DEVICES; None to leave the variable unchanged.
        device: the same devices as this process names them, such as ``cuda:2,3``; "" on a CPU.
    """

    visible: str | None = None
    device: str = ""


def slots(plan: SweepPlan) -> list[Slot]:
    """Return the devices of each replica of a plan: slices of the visible GPUs, or empty slots on a CPU.

    Creates no CUDA context.

    Raises:
        SettingError: a setting is not supported with replicas.
        UnsupportedError: the plan needs more GPUs than are visible.
    """
    from panscan.model.machine import gpu_count

    count, gpus, size = plan.replicas, plan.gpus_per_replica, _tensor_parallel_size(plan)
    if not _on_gpus(plan):
        if gpus > 1:
            raise SettingError(f"--gpus-per-replica {gpus}: this runs on the CPU; --replicas divides its cores")
        return [Slot()] * count
    if 1 < gpus < size:
        raise SettingError(
            f"--gpus-per-replica {gpus} is less than --tensor-parallel-size {size}; leave --gpus-per-replica out"
        )
    if gpus > size and any(cell.settings.device_map is None for cell in plan.cells):
        raise SettingError(f"--gpus-per-replica {gpus} needs --device-map or --tensor-parallel-size {gpus}")
    return gpu_slots(count, max(gpus, size), gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES"), size)


def _tensor_parallel_size(plan: SweepPlan) -> int:
    """Return the largest tensor parallel size in a plan."""
    return max((cell.settings.tensor_parallel_size for cell in plan.cells), default=1)


def gpu_slots(count: int, gpus: int, visible: int, outer: str | None, size: int = 1) -> list[Slot]:
    """Return ``count`` slices of ``gpus`` GPUs from ``visible`` ones.

    Args:
        count: slices.
        gpus: GPUs in a slice.
        visible: number of visible GPUs.
        outer: this process's CUDA_VISIBLE_DEVICES, of numbers or UUIDs; None if it is not set.
        size: the tensor parallel size, which the error names instead of the GPUs per replica if both are equal.

    Raises:
        UnsupportedError: the slices need more GPUs than are visible.
    """
    if count * gpus > visible:
        option = "tensor-parallel-size" if gpus == size > 1 else "gpus-per-replica"
        raise UnsupportedError(
            f"--replicas {count} with --{option} {gpus} need {count * gpus} GPUs; visible: {visible}"
        )
    names = [str(index) for index in range(visible)] if outer is None else [name.strip() for name in outer.split(",")]
    slices = [range(first, first + gpus) for first in range(0, count * gpus, gpus)]
    return [Slot(",".join(names[i] for i in part), "cuda:" + ",".join(map(str, part))) for part in slices]


def _on_gpus(plan: SweepPlan) -> bool:
    """Return whether any cell of a plan needs a GPU.

    Raises:
        SettingError, UnsupportedError: a cell's devices are not supported with replicas.
    """
    from panscan.model.machine import resolve_device

    kinds = set()
    for cell in plan.cells:
        settings = cell.settings
        if settings.device.startswith("cuda:"):
            raise SettingError(f"--device {settings.device}: --replicas chooses the GPUs; --device cuda is enough")
        kinds.add(settings.device if settings.device == "cuda" else resolve_device(settings.device).type)
    if "mps" in kinds:
        raise UnsupportedError("--replicas: this machine has one Apple GPU; --device cpu runs them on the CPU")
    return "cuda" in kinds


def run_replicas(plan: SweepPlan, directory: Path, writer: Writer, done: FinishedVisits, observer: Observer) -> None:
    """Run a plan's sweep in each of its replicas at the same time; all replicas start each repeat together.

    If one replica fails in a cell, all skip that cell, its reason names the replica, and the sweep continues. No
    process is left when this returns or raises.

    Args:
        plan: what to measure, and in how many replicas.
        directory: the run directory.
        writer: takes the run's records; it already wrote the header.
        done: visits that an earlier start of this run finished.
        observer: observes the sweep as if it ran in one process.

    Raises:
        SettingError, UnsupportedError: see :func:`slots`.
        PanscanError: a replica died or hangs.
    """
    chosen = slots(plan)
    devices = [slot.device for slot in chosen]
    inbox: Inbox = queue.SimpleQueue()
    threads = _threads_per_process(len(chosen), _tensor_parallel_size(plan), on_cpu=not any(devices))
    with contextlib.ExitStack() as stack:
        replicas = []
        for number, slot in enumerate(chosen):
            environment = {**os.environ, **remote_access().environment(), "OMP_NUM_THREADS": str(threads)}
            if slot.visible is not None:
                environment["CUDA_VISIBLE_DEVICES"] = slot.visible
            replica = stack.enter_context(Child(_WORKER, environment=environment, keep_output=True))
            replicas.append(replica)
            replica.listen_into(inbox)
            replica.send_if_alive(Start(number, plan, done, directory))
        sync = ReplicaSync(
            plan,
            done,
            devices,
            writer=writer,
            observer=observer,
            answer=lambda number, answer: replicas[number].send_if_alive(answer),
        )
        finished: set[int] = set()
        silent = dict.fromkeys(range(len(replicas)), 0.0)
        before = now()
        while silent:
            number, message = -1, None
            with contextlib.suppress(queue.Empty):
                replica, message = inbox.get(timeout=_TICK_SECONDS)
                number = replicas.index(replica)
            # A suspension of this process, which stops its threads too, counts as one tick.
            passed, before = min(now() - before, _TICK_SECONDS), now()
            silent = {other: 0.0 if other == number else seconds + passed for other, seconds in silent.items()}
            if message is ReplicaSignal.FINISHED:
                finished.add(number)
            elif message is not None:
                sync.take(number, message)
            elif number in finished:
                del silent[number]
            elif number >= 0:
                raise PanscanError(f"replica {number} {replicas[number].ending()} (finished repeats are kept)")
            for other, seconds in silent.items():
                if seconds > _SILENT_SECONDS:
                    problem = f"hangs: no message for {seconds:.0f} s"
                    raise PanscanError(f"replica {other} {problem} (finished repeats are kept)")


def _threads_per_process(replicas: int, size: int, *, on_cpu: bool) -> int:
    """Return the threads of each process, so that together they use the cores available to this one.

    Args:
        replicas: number of replicas.
        size: processes of each replica, the tensor parallel size.
        on_cpu: whether they compute on the CPU, so that a lack of cores deserves a warning.
    """
    cores = usable_cores()
    if on_cpu and replicas * size > cores:
        processes = f"--replicas {replicas}" + (f" of {size} processes each" if size > 1 else "")
        message = f"{processes} share {cores} CPU core(s), which slows all of them down"
        warnings.warn(message, PanscanWarning, stacklevel=2)
    return max(1, cores // (replicas * size))


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
        done: FinishedVisits,
        devices: Sequence[str],
        *,
        writer: Writer,
        observer: Observer,
        answer: Callable[[int, ReplicaSignal], None],
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
        measured = [cell for cell in self._cells if all((cell, repeat) in done for repeat in range(plan.repeats))]
        self._through = {(replica, cell) for cell in measured for replica in range(len(devices))}

    def take(self, replica: int, message: Message) -> None:
        """Handle a message of a replica.

        Raises:
            PanscanError: the replica cannot continue, so the run cannot.
        """
        match message:
            case Ready():
                self._ready(replica, message)
            case Progress(method, arguments):
                getattr(self._observer, method)(*arguments)
            case list():
                self._wrote(replica, message)
            case str():
                warnings.warn(message, PanscanWarning, stacklevel=2)
            case PanscanError():
                raise type(message)(f"replica {replica}: {message}")

    def _ready(self, replica: int, visit: Ready) -> None:
        self._waiting[replica] = visit
        if visit.cell in self._broken:
            self._give_up(visit.cell)
        elif len(self._waiting) == len(self._devices):
            self._waiting.clear()
            self._observer.ready(self._cells[visit.cell], visit.repeat)
            for number in range(len(self._devices)):
                self._answer(number, ReplicaSignal.PROCEED)

    def _give_up(self, cell: str) -> None:
        """Tell the replicas that wait to start a cell to skip it."""
        for replica in [replica for replica, visit in self._waiting.items() if visit.cell == cell]:
            del self._waiting[replica]
            self._gave_up.add((replica, cell))
            self._answer(replica, ReplicaSignal.ABORT)

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
            self._close(cell, [reply.popleft() for reply in replies])

    def _close(self, cell: str, replies: Sequence[Sequence[AnyRecord]]) -> None:
        """Write a visit that all replicas ended: one merged repeat, or one outcome with its reason."""
        firsts = [(number, records[0]) for number, records in enumerate(replies)]
        outcomes = [(number, record) for number, record in firsts if isinstance(record, CellRecord)]
        if not outcomes:
            self._writer.write(merged_repeat(replies, self._devices))
            return
        failures = [(number, record) for number, record in outcomes if (number, cell) not in self._gave_up]
        first, record = failures[0]
        kinds = {(failure.outcome, failure.reason) for _, failure in failures}
        everywhere = len(failures) == len(replies) and len(kinds) == 1
        reason = record.reason if everywhere else f"replica {first}: {record.reason}"
        self._writer.write([structs.replace(record, reason=reason)])
        self._observer.problem(self._cells[cell], record.outcome, reason or "")


def merged_repeat(parts: Sequence[Sequence[AnyRecord]], devices: Sequence[str]) -> list[AnyRecord]:
    """Merge the records of one repeat: all requests, one ``repeat`` line, the first replica's other lines.

    The line's ``started`` and ``ended`` are the common window, from the latest start to the earliest end; peaks are
    sums. Batch numbers are shifted so that no two replicas share one.
    """
    requests = [(number, one) for number, part in enumerate(parts) for one in part if isinstance(one, RequestRecord)]
    batches = 1 + max((request.batch for _, request in requests), default=0)
    shifted = [
        structs.replace(request, replica=number, batch=request.batch + number * batches) for number, request in requests
    ]
    lines = [next(record for record in part if isinstance(record, RepeatRecord)) for part in parts]
    sums: dict[str, Any] = {}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes"):
        values = [getattr(part, name) for part in lines]
        sums[name] = None if None in values else sum(values)
    replicas = []
    for number, (part, device) in enumerate(zip(lines, devices, strict=True)):
        fields = {name: getattr(part, name) for name in ReplicaRecord.__struct_fields__ if name != "replica"}
        known = part.device or ""
        fields["device"] = device if device and known.startswith("cuda") else known  # each calls its own GPU cuda:0
        replicas.append(ReplicaRecord(replica=number, **fields))
    line = structs.replace(
        lines[0],
        started=max(part.started for part in lines),
        ended=min(part.ended for part in lines),
        warmup_s=max(part.warmup_s for part in lines),
        replicas=replicas,
        **sums,
    )
    return [*shifted, line, *(record for record in parts[0] if not isinstance(record, RequestRecord | RepeatRecord))]
