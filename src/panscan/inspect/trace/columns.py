"""The events of a trace in columns: numbers and interned names, about 40 bytes per event."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

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
_NONE = -1  # no correlation or external id
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INSTANCE = re.compile(r"(?<=^nn\.Module: )(.+)_\d+$")
_STEP = re.compile(r"^ProfilerStep#\d+$")

# Types as the profiler writes them: bytes per element, and the name of the product rate in panscan.plan.gpus.
_TYPES = {
    "float": (4, "fp32"),
    "double": (8, "fp64"),
    "c10::BFloat16": (2, "bf16"),
    "c10::Half": (2, "fp16"),
    "c10::Float8_e4m3fn": (1, "fp8"),
    "c10::Float8_e5m2": (1, "fp8"),
    "signed char": (1, "int8"),
}
_OUTPUT_BYTES = {"aten::_int_mm": 4, "aten::_scaled_mm": 2}  # wider than the inputs
_LEFT = dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", *_OUTPUT_BYTES), 0)  # position of the left factor
_LEFT |= dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), 1)
_LARGEST = 2**40


class Product(NamedTuple):
    """One matrix multiplication.

    Args:
        label: operator, sizes and type: ``mm 1x2560 @ 2560x10240 bf16``.
        dtype: type of the inputs: bf16, fp16, fp32, fp64, fp8 or int8.
        flops: floating-point operations of one call, two per multiplication.
        bytes: bytes of the factors and the result, each counted once.
    """

    label: str
    dtype: str
    flops: float
    bytes: float


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
        external: ids that an operator shares with what it launched; -1: none.
    """

    lanes: tuple[str, ...]
    start: Floats
    end: Floats
    name: Ints
    kind: Ints
    lane: Ints
    correlation: Ints
    external: Ints


@dataclass(frozen=True, slots=True)
class Columns:
    """All timed events of one trace.

    Args:
        gpu, cpu: the events.
        names: distinct names, without addresses and instance numbers.
        products: distinct matrix multiplications with recorded shapes.
        product_of_external: index of the matrix multiplication by the operator's external id.
        skipped: events without a usable time.
    """

    gpu: EventColumns
    cpu: EventColumns
    names: tuple[str, ...]
    products: tuple[Product, ...]
    product_of_external: Mapping[int, int]
    skipped: int

    def product_indices(self, events: EventColumns) -> Ints:
        """Return the multiplication that each event belongs to; the number of multiplications if to none."""
        ids = np.array(sorted(self.product_of_external), dtype=np.int64)
        if not len(ids):
            return np.full(len(events.start), len(self.products), dtype=np.int64)
        products = np.array([self.product_of_external[id] for id in ids.tolist()], dtype=np.int64)
        nearest = np.minimum(np.searchsorted(ids, events.external), len(ids) - 1)
        return np.where(ids[nearest] == events.external, products[nearest], len(self.products))


class _Index(dict[Any, int]):
    """Distinct keys, numbered in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


@lru_cache(_MOST_LANES)
def _kind_of(category: str) -> int | None:
    """Return the kind of a category's events; None: they are not counted."""
    plain = category.lower()
    runtime = plain.endswith(("runtime", "_driver"))
    return None if plain in _IGNORED else _KINDS.get(plain, RUNTIME if runtime else OPERATOR)


class EventCollector:
    """Keeps events in columns as they are read."""

    def __init__(self) -> None:
        self._gpu: list[array[Any]] = [array(code) for code in "ddibiqq"]
        self._cpu: list[array[Any]] = [array(code) for code in "ddibiqq"]
        self._raw: dict[str, int] = {}
        self._names, self._gpus, self._threads, self._products = _Index(), _Index(), _Index(), _Index()
        self._external: dict[int, int] = {}
        self._base: float | None = None
        self._skipped = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event in Chrome's format if it has a duration.

        Raises:
            InputError: there are more events, threads or GPUs than fit in memory.
        """
        start, duration = event.get("ts"), event.get("dur", 0)
        if event.get("ph") != "X":
            return
        if not (isinstance(start, int | float) and -_LATEST < start < _LATEST):
            start = None
        if start is None or not (isinstance(duration, int | float) and 0 <= duration < _LATEST):
            self._skipped += 1
            return
        category = event.get("cat", "")
        kind = _kind_of(category if isinstance(category, str) else str(category))
        if kind is None:
            return
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        if kind in (KERNEL, COPY):
            columns, lanes, lane = self._gpu, self._gpus, str(arguments.get("device", event.get("pid")))
        else:
            process, thread = str(event.get("pid")), str(event.get("tid"))
            columns, lanes, lane = self._cpu, self._threads, process if process == thread else f"{process}/{thread}"
            if "Input Dims" in arguments:
                self._add_product(event, arguments)
        if len(columns[0]) >= _MOST_EVENTS:
            raise InputError(f"the trace has more than {_MOST_EVENTS:,} timed events: profile fewer steps")
        if len(lanes) > _MOST_LANES:
            raise InputError(f"the trace has more than {_MOST_LANES:,} threads or GPUs: profile fewer processes")
        if self._base is None:
            self._base = start
        begin = start - self._base  # before the sum: absolute times have few digits to spare
        correlation = _NONE if kind == OPERATOR else _id(arguments, "correlation")
        row = begin, begin + duration, self._name(event.get("name")), kind, lanes[lane], correlation
        for column, value in zip(columns, (*row, _id(arguments, "External id")), strict=True):
            column.append(value)

    def _name(self, raw: object) -> int:
        """Return the index of a name without what differs between instances of one function."""
        text = (raw if isinstance(raw, str) else str(raw))[:_LONGEST_NAME]
        index = self._raw.get(text)
        if index is None:
            if len(self._raw) >= _MOST_NAMES:
                text = "(other names)"
            plain = _INSTANCE.sub(r"\1", _ADDRESS.sub("", _STEP.sub("ProfilerStep", text)))
            self._raw[text] = index = self._names[plain]
        return index

    def _add_product(self, event: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        product = _product_of(str(event.get("name")), arguments.get("Input Dims"), arguments.get("Input type"))
        if product is not None and (external := _id(arguments, "External id")) != _NONE:
            self._external[external] = self._products[product]

    def columns(self) -> Columns:
        """Return what was kept, as arrays that share its memory."""
        gpu, cpu = (
            [np.frombuffer(column, column.typecode) if column else np.empty(0, column.typecode) for column in kept]
            for kept in (self._gpu, self._cpu)
        )
        first = min((float(kept[0].min()) for kept in (gpu, cpu) if len(kept[0])), default=0.0)
        order = np.argsort(gpu[0], kind="stable")
        gpu = [column[order] for column in gpu]
        return Columns(
            gpu=EventColumns(tuple(self._gpus), gpu[0] - first, gpu[1] - first, *gpu[2:]),
            cpu=EventColumns(tuple(self._threads), cpu[0] - first, cpu[1] - first, *cpu[2:]),
            names=tuple(self._names),
            products=tuple(self._products),
            product_of_external=self._external,
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


def _id(arguments: Mapping[str, Any], name: str) -> int:
    """Return an id that links events; -1 if it is absent or no 64-bit integer."""
    value = arguments.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**63 else _NONE


def _product_of(operator: str, shapes: object, types: object) -> Product | None:
    """Return the matrix multiplication of an operator call; None if it is none, or was not recorded completely."""
    left = _LEFT.get(operator)
    if left is None or not isinstance(shapes, list) or not isinstance(types, list):
        return None
    if len(shapes) < left + 2 or len(types) < left + 2 or str(types[left]) not in _TYPES:
        return None
    a, b = _shape(shapes[left]), _shape(shapes[left + 1])
    if len(b) == 1:
        b = (*b, 1)  # a vector is a matrix with one column
    if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    (batch, rows, inner), columns = (prod(a[:-2]), *a[-2:]), b[-1]
    width, dtype = _TYPES[str(types[left])]
    result = _OUTPUT_BYTES.get(operator, width) * rows * columns
    moved = batch * (width * (rows * inner + inner * columns) + result)
    several = f"{batch}x " if batch > 1 else ""
    label = f"{operator.rpartition('::')[2]} {several}{rows}x{inner} @ {inner}x{columns} {dtype}"
    return Product(label, dtype, flops=2.0 * batch * rows * inner * columns, bytes=float(moved))


def _shape(sizes: object) -> tuple[int, ...]:
    """Return a shape; empty if it is none, or a size is 0 or absurd."""
    if not isinstance(sizes, list) or len(sizes) > 3:
        return ()
    return tuple(sizes) if all(type(size) is int and 0 < size < _LARGEST for size in sizes) else ()
