"""The events of a trace in columns: numbers and interned names, about 30 bytes per event."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from panscan.core import InputError
from panscan.inspect.trace.intervals import Floats, Ints
from panscan.inspect.trace.products import Product, product_of

OPERATOR, RUNTIME, ANNOTATION, PYTHON = range(4)
"""Kinds of CPU ranges."""

KERNEL, COPY = range(2)
"""Kinds of GPU activities: kernels, and copies or fills."""

_GPU_KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": COPY, "memset": COPY}
_CPU_KINDS = {"user_annotation": ANNOTATION, "python_function": PYTHON, "runtime": RUNTIME}
_IGNORED = ("gpu_user_annotation", "cuda_sync", "trace", "ac2g", "overhead", "cuda_profiler_range")
_MOST_EVENTS = 50_000_000  # on CPUs, and on GPUs: about 2 GB of columns
_TOO_MANY = f"the trace has more than {_MOST_EVENTS:,} timed events: profile fewer steps"
_MOST_LANES = 4096  # streams of GPUs, or threads: each is looked at on its own
_TOO_MANY_LANES = f"the trace has more than {_MOST_LANES:,} threads or streams: profile fewer processes"
_MOST_NAMES = 1_000_000
_DEEPEST = 10_000  # begin events without an end on one thread
_LATEST = 1e18  # microseconds; NaN and infinity are beyond
_LONGEST_NAME = 1_000
_NONE = -1  # no correlation or external id
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INSTANCE = re.compile(r"(?<=^nn\.Module: )(.+)_\d+$")
_STEP = re.compile(r"^ProfilerStep#\d+$")


@dataclass(frozen=True, slots=True)
class GpuColumns:
    """Kernels, copies and fills, ordered by start. All arrays have one element per activity.

    Args:
        start, end: microseconds since the first event of the trace.
        name: indices into :attr:`Columns.names`.
        kind: KERNEL or COPY.
        lane: indices into ``lanes``.
        correlation: ids that a runtime call shares with what it launched; -1: none.
        external: ids that an operator shares with what it launched; -1: none.
        bytes: size of a copy or fill; 0 for kernels.
        lanes: (device, stream) pairs.
    """

    start: Floats
    end: Floats
    name: Ints
    kind: Ints
    lane: Ints
    correlation: Ints
    external: Ints
    bytes: Floats
    lanes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CpuColumns:
    """Operators, runtime calls, annotations and Python functions, in the order of the file.

    Args:
        start, end: microseconds since the first event of the trace.
        name: indices into :attr:`Columns.names`.
        kind: OPERATOR, RUNTIME, ANNOTATION or PYTHON.
        thread: indices into ``threads``.
        correlation: ids that a runtime call shares with what it launched; -1: none.
        product: indices into :attr:`Columns.products`; -1: not a matrix multiplication with recorded shapes.
        threads: (process, thread) pairs.
    """

    start: Floats
    end: Floats
    name: Ints
    kind: Ints
    thread: Ints
    correlation: Ints
    product: Ints
    threads: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """All timed events of one trace.

    Args:
        gpu: activities of all GPUs.
        cpu: ranges of all threads.
        names: distinct names, without addresses and instance numbers.
        products: distinct matrix multiplications with recorded shapes.
        product_of_external: index of the matrix multiplication by the operator's external id.
        skipped: events without a usable time.
        unfinished: begin events without an end.
    """

    gpu: GpuColumns
    cpu: CpuColumns
    names: tuple[str, ...]
    products: tuple[Product, ...]
    product_of_external: Mapping[int, int]
    skipped: int
    unfinished: int


def collect(events: Iterable[Mapping[str, Any]]) -> Columns:
    """Return the timed events of a trace in columns.

    Args:
        events: events in Chrome's format; times in microseconds.

    Raises:
        InputError: an event has no usable fields, or there are more events than fit in memory.
    """
    collector = _Collector()
    for event in events:
        collector.add(event)
    return collector.columns()


class _Index(dict[Any, int]):
    """Distinct keys, numbered in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Categories(dict[Any, tuple[bool, int] | None]):
    """(whether on the GPU, kind) by category; None: not counted."""

    def __missing__(self, category: Any) -> tuple[bool, int] | None:
        plain = str(category).lower()
        found: tuple[bool, int] | None = None
        if plain in _GPU_KINDS:
            found = (True, _GPU_KINDS[plain])
        elif plain not in _IGNORED:
            runtime = plain.endswith(("_runtime", "_driver"))
            found = (False, _CPU_KINDS.get(plain, RUNTIME if runtime else OPERATOR))
        self[category] = found
        return found


class _Collector:
    def __init__(self) -> None:
        self._gpu: list[array[Any]] = [array(code) for code in "ddibiqqd"]
        self._cpu: list[array[Any]] = [array(code) for code in "ddibiqi"]
        self._raw: dict[str, int] = {}
        self._categories = _Categories()
        self._names, self._lanes, self._threads, self._products = _Index(), _Index(), _Index(), _Index()
        self._external: dict[int, int] = {}
        self._open: dict[tuple[str, str], list[tuple[float, Mapping[str, Any]]]] = {}
        self._base: float | None = None
        self._skipped = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event if it has a duration."""
        phase = event.get("ph")
        if phase not in ("X", "B", "E"):
            return
        start = event.get("ts")
        if not isinstance(start, int | float) or not -_LATEST < start < _LATEST:
            self._skipped += 1
            return
        if self._base is None:
            self._base = start
        start -= self._base  # before the sum: absolute times have few digits to spare
        if phase == "X":
            duration = event.get("dur", 0)
            if isinstance(duration, int | float) and 0 <= duration < _LATEST:
                self._keep(event, start, start + duration)
            else:
                self._skipped += 1
        else:
            self._pair(event, start, begins=phase == "B")

    def _pair(self, event: Mapping[str, Any], time: float, *, begins: bool) -> None:
        """Keep a begin event until its end event: they nest within a thread."""
        begun = self._open.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
        if len(self._open) > _MOST_LANES:
            raise InputError(_TOO_MANY_LANES)
        if begins and len(begun) < _DEEPEST:
            begun.append((time, {name: event.get(name) for name in ("cat", "name", "pid", "tid")}))
        elif not begins and begun:
            begin, opening = begun.pop()
            self._keep(opening, begin, max(begin, time))
        else:
            self._skipped += 1

    def _keep(self, event: Mapping[str, Any], start: float, end: float) -> None:
        category = event.get("cat", "")
        found = self._categories[category if isinstance(category, str) else str(category)]
        if found is None:
            return
        on_gpu, kind = found
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        name = self._name(event.get("name"))
        if on_gpu:
            self._keep_activity(event, arguments, (start, end, name, kind))
            return
        if len(self._cpu[0]) >= _MOST_EVENTS:
            raise InputError(_TOO_MANY)
        if len(self._threads) > _MOST_LANES:
            raise InputError(_TOO_MANY_LANES)
        starts, ends, names, kinds, threads, correlations, products = self._cpu
        starts.append(start)
        ends.append(end)
        names.append(name)
        kinds.append(kind)
        threads.append(self._threads[str(event.get("pid")), str(event.get("tid"))])
        correlations.append(_id(arguments, "correlation") if kind == RUNTIME else _NONE)
        products.append(self._product(event, arguments) if "Input Dims" in arguments else _NONE)

    def _keep_activity(
        self, event: Mapping[str, Any], arguments: Mapping[str, Any], values: tuple[float, float, int, int]
    ) -> None:
        if len(self._gpu[0]) >= _MOST_EVENTS:
            raise InputError(_TOO_MANY)
        if len(self._lanes) > _MOST_LANES:
            raise InputError(_TOO_MANY_LANES)
        device, stream = arguments.get("device", event.get("pid")), arguments.get("stream", event.get("tid"))
        size = arguments.get("bytes", 0)
        rest = (
            self._lanes[str(device), str(stream)],
            _id(arguments, "correlation"),
            _id(arguments, "External id"),
            float(size) if isinstance(size, int | float) and 0 <= size < _LATEST else 0.0,
        )
        for column, value in zip(self._gpu, (*values, *rest), strict=True):
            column.append(value)

    def _name(self, raw: object) -> int:
        """Return the index of a name without what differs between instances of one function."""
        text = (raw if isinstance(raw, str) else str(raw))[:_LONGEST_NAME]
        found = self._raw.get(text)
        if found is None:
            if len(self._raw) >= _MOST_NAMES:
                text = "(other names)"
            plain = _INSTANCE.sub(r"\1", _ADDRESS.sub("", _STEP.sub("ProfilerStep", text)))
            self._raw[text] = found = self._names[plain]
        return found

    def _product(self, event: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
        product = product_of(str(event.get("name")), arguments.get("Input Dims"), arguments.get("Input type"))
        if product is None:
            return _NONE
        index = self._products[product]
        external = _id(arguments, "External id")
        if external != _NONE:
            self._external[external] = index
        return index

    def columns(self) -> Columns:
        """Return what was kept, as arrays."""
        gpu, cpu = ([_array(column) for column in kept] for kept in (self._gpu, self._cpu))
        first = min((float(column[0].min()) for column in (gpu, cpu) if len(column[0])), default=0.0)
        order = np.argsort(gpu[0], kind="stable")
        start, end, name, kind, lane, correlation, external, size = (column[order] for column in gpu)
        lanes, threads = tuple(self._lanes), tuple(self._threads)
        return Columns(
            gpu=GpuColumns(start - first, end - first, name, kind, lane, correlation, external, size, lanes),
            cpu=CpuColumns(cpu[0] - first, cpu[1] - first, cpu[2], cpu[3], cpu[4], cpu[5], cpu[6], threads),
            names=tuple(self._names),
            products=tuple(self._products),
            product_of_external=self._external,
            skipped=self._skipped,
            unfinished=sum(map(len, self._open.values())),
        )


def _array(column: array[Any]) -> npt.NDArray[Any]:
    """Return a column as an array that shares its memory."""
    return np.frombuffer(column, dtype=column.typecode) if column else np.empty(0, dtype=column.typecode)


def _id(arguments: Mapping[str, Any], name: str) -> int:
    """Return an id that links events; -1 if it is absent or no 64-bit integer."""
    value = arguments.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**63 else _NONE
