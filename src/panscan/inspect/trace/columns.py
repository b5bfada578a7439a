"""The events of a trace in columns: numbers and interned names, about 40 bytes per event."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from panscan.core import InputError
from panscan.inspect.trace.intervals import Floats, Ints

OPERATOR, RUNTIME, ANNOTATION, PYTHON, KERNEL, COPY = range(6)
"""Kinds of events: four of a CPU; kernels of a GPU; its copies and fills."""

_KINDS = {
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
}
_IGNORED = ("gpu_user_annotation", "cuda_sync", "trace", "ac2g", "overhead", "cuda_profiler_range")
_MOST_EVENTS = 50_000_000  # on CPUs, and on GPUs: about 2 GB of columns
_MOST_LANES = 4096  # threads, or GPUs: each is looked at separately
_MOST_NAMES = 1_000_000
_LATEST = 1e18  # microseconds; NaN and infinity are beyond
_LONGEST_NAME = 1_000
_NONE = -1  # no correlation
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INSTANCE = re.compile(r"(?<=^nn\.Module: )(.+)_\d+$")
_STEP = re.compile(r"^ProfilerStep#\d+$")


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events of all GPUs, ordered by start, or of all threads, in the order of the file: one element per event.

    Args:
        lanes: names of the GPUs; threads as ``process/thread``, one number if they are equal.
        start, end: microseconds since the first event of the trace.
        name: indices into :attr:`Columns.names`.
        kind: KERNEL or COPY on GPUs; OPERATOR, RUNTIME, ANNOTATION or PYTHON on CPUs.
        lane: indices into ``lanes``.
        correlation: ids that a runtime call shares with what it launched; -1: none.
    """

    lanes: tuple[str, ...]
    start: Floats
    end: Floats
    name: Ints
    kind: Ints
    lane: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Columns:
    """All timed events of one trace.

    Args:
        gpu, cpu: the events.
        names: distinct names, without addresses and instance numbers.
        skipped: events without a usable time.
    """

    gpu: EventColumns
    cpu: EventColumns
    names: tuple[str, ...]
    skipped: int


@lru_cache(_MOST_LANES)
def _kind_of(category: str) -> int | None:
    """Return the kind of a category's events; None: they are not counted."""
    plain = category.lower()
    runtime = plain.endswith(("runtime", "_driver"))
    return None if plain in _IGNORED else _KINDS.get(plain, RUNTIME if runtime else OPERATOR)


class EventCollector:
    """Keeps events in columns as they are read."""

    def __init__(self) -> None:
        self._gpu: list[array[Any]] = [array(code) for code in "ddibiq"]
        self._cpu: list[array[Any]] = [array(code) for code in "ddibiq"]
        self._raw: dict[str, int] = {}
        # Distinct keys, numbered in the order of their first use.
        self._names, self._gpus, self._threads = (defaultdict[str, int](count().__next__) for _ in range(3))
        self._base: float | None = None
        self._skipped = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event in Chrome's format if it has a duration.

        Raises:
            InputError: there are more events, threads or GPUs than fit in memory.
        """
        if event.get("ph") != "X":
            return
        start, duration, arguments = event.get("ts"), event.get("dur", 0), event.get("args")
        if not (
            isinstance(start, int | float)
            and abs(start) < _LATEST
            and isinstance(duration, int | float)
            and 0 <= duration < _LATEST
        ):
            self._skipped += 1
            return
        kind = _kind_of(str(event.get("cat", "")))
        if kind is None:
            return
        arguments = arguments if isinstance(arguments, dict) else {}
        if kind in (KERNEL, COPY):
            columns, lanes, lane = self._gpu, self._gpus, str(arguments.get("device", event.get("pid")))
        else:
            process, thread = str(event.get("pid")), str(event.get("tid"))
            columns, lanes, lane = self._cpu, self._threads, process if process == thread else f"{process}/{thread}"
        if len(columns[0]) >= _MOST_EVENTS:
            raise InputError(f"the trace has more than {_MOST_EVENTS:,} timed events: profile fewer steps")
        if len(lanes) > _MOST_LANES:
            raise InputError(f"the trace has more than {_MOST_LANES:,} threads or GPUs: profile fewer processes")
        if self._base is None:
            self._base = start
        begin = start - self._base  # before the sum: absolute times have few digits to spare
        correlation = arguments.get("correlation")
        if kind == OPERATOR or not (isinstance(correlation, int) and 0 <= correlation < 2**63):
            correlation = _NONE
        row = begin, begin + duration, self._name(event.get("name")), kind, lanes[lane], correlation
        for column, value in zip(columns, row, strict=True):
            column.append(value)

    def _name(self, raw: object) -> int:
        """Return the index of a name without what differs between instances of one function."""
        text = str(raw)[:_LONGEST_NAME]
        index = self._raw.get(text)
        if index is None:
            if len(self._raw) >= _MOST_NAMES:
                text = "(other names)"
            plain = _INSTANCE.sub(r"\1", _ADDRESS.sub("", _STEP.sub("ProfilerStep", text)))
            self._raw[text] = index = self._names[plain]
        return index

    def columns(self) -> Columns:
        """Return what was kept, as arrays that share its memory."""
        gpu, cpu = (
            [np.frombuffer(column, column.typecode) if column else np.empty(0, column.typecode) for column in arrays]
            for arrays in (self._gpu, self._cpu)
        )
        first = min((float(columns[0].min()) for columns in (gpu, cpu) if len(columns[0])), default=0.0)
        order = np.argsort(gpu[0], kind="stable")
        gpu = [column[order] for column in gpu]
        return Columns(
            gpu=EventColumns(tuple(self._gpus), gpu[0] - first, gpu[1] - first, *gpu[2:]),
            cpu=EventColumns(tuple(self._threads), cpu[0] - first, cpu[1] - first, *cpu[2:]),
            names=tuple(self._names),
            skipped=self._skipped,
        )


def collect(events: Iterable[Mapping[str, Any]]) -> Columns:
    """Return the timed events of a trace, in Chrome's format, in columns.

    Raises:
        InputError: there are more events than fit in memory.
    """
    collector = EventCollector()
    for event in events:
        collector.add(event)
    return collector.columns()
