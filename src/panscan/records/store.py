"""The records of a run: one append-only file of JSON lines that survives ``kill -9`` and outlives the code.

A run directory holds ``records.jsonl``. Its first line is the run (settings, environment, cells); then come ``cell``
lines (what became of a cell), ``request`` lines (raw time stamps and counts) and ``repeat`` lines. A repeat line says
that every request of that repeat has been written; requests without it were in flight when the run was stopped.
``load``, ``truth`` and ``verdict`` lines say what was loaded, and how its answers compare with the reference. Load runs
have ``probe`` and ``search`` lines, and ``cells`` lines that add levels.
:mod:`panscan.records.schema` has the fields.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from panscan.core import RecordsError
from panscan.core.files import sync_directory, write_file
from panscan.core.foreign import parse_json
from panscan.core.ranges import shorten
from panscan.records.schema import SCHEMA, SCHEMAS_READ, Record, problem_of

__all__ = [
    "FILE_NAME",
    "SCHEMA",
    "Record",
    "RecordWriter",
    "Run",
    "outcome_of",
    "read_run",
]

FILE_NAME = "records.jsonl"
UNFINISHED = "unfinished"

_MOST_BYTES = 2**33  # four million requests of 100 tokens
_LONGEST_LINE = 64 * 2**20  # bytes; a run line has 1,000 for each cell
_MOST_PARTS = 64_000_000  # a request has 10


@dataclass(slots=True)
class Run:
    """What a run directory says, without the requests that were in flight when it was stopped.

    Args:
        path: the file that was read.
        header: the run line.
        cells: settings of each cell by its id, in the order of the run line and of ``cells`` lines.
        presets: the preset of each cell that began with one.
        aliases: by cell, others (``cell``, ``settings``, ``preset``) that do the same work, so that one was measured.
        outcomes: the last ``cell`` line of each cell that has one.
        repeats: the ``repeat`` line of each complete (cell id, repeat).
        requests: the ``request`` lines of each complete (cell id, repeat), in the order of writing.
        loads: the last ``load`` line of each cell that has one.
        truths: the ``truth`` lines by the truth's id.
        verdicts: the last ``verdict`` line of each cell that has one.
        probe: the last ``probe`` line of a load run.
        search: the last ``search`` line of a load run.
        notes: one line for each thing that reading left out.
    """

    path: Path
    header: Record
    cells: dict[str, Record]
    presets: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, list[Record]] = field(default_factory=dict)
    outcomes: dict[str, Record] = field(default_factory=dict)
    repeats: dict[tuple[str, int], Record] = field(default_factory=dict)
    requests: dict[tuple[str, int], list[Record]] = field(default_factory=dict)
    loads: dict[str, Record] = field(default_factory=dict)
    truths: dict[str, Record] = field(default_factory=dict)
    verdicts: dict[str, Record] = field(default_factory=dict)
    probe: Record | None = None
    search: Record | None = None
    notes: list[str] = field(default_factory=list)

    def finished(self) -> set[tuple[str, int | None]]:
        """Return the finished work that a resumed run skips: (cell id, repeat), and (cell id, None) for a verdict."""
        concluded = (cell for cell, verdict in self.verdicts.items() if verdict.get("concluded", True))
        return {*self.repeats, *((cell, None) for cell in concluded)}


def outcome_of(run: Run, cell_id: str) -> tuple[str, str]:
    """Return (outcome, reason) of a cell; the outcome is ``unfinished`` until its run records one."""
    record = run.outcomes.get(cell_id)
    return (record["outcome"], record["reason"] or "") if record else (UNFINISHED, "")


class RecordWriter:
    """Appends to the records of a run directory, which is made if need be. One writer at a time holds it.

    Args:
        directory: the run directory. Without records in it, the first record written must be the run line.

    Attributes:
        path: the records file.
        previous: the run as it was found, None for a new one.
        torn: the file that an unfinished last line was moved to, None if there was none.

    Raises:
        RecordsError: another writer holds the directory, or its records cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.previous: Run | None = None
        self.torn: Path | None = None
        self._file: int | None = None
        self._lock = FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise RecordsError(
                f"{self.path} is being written by another panscan; give this run its own folder"
            ) from error
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            if self.path.exists():
                self.previous = read_run(self.path)
                self._open()
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records, all of them in one write that is on the disk when this returns.

        Raises:
            RecordsError: a record is not what :func:`read_run` reads, or the disk does not take it; the file is
                then as it was before.
        """
        data = b"".join(self._line(record, first=self._file is None and i == 0) for i, record in enumerate(records))
        if not data:
            return
        if self._file is None:
            write_file(self.path, data, RecordsError)
            self._open()
            return
        before = os.fstat(self._file).st_size
        try:
            _write_all(self._file, data)
        except BaseException as error:  # Ctrl-C, too: the next line must not join half a line
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            if isinstance(error, OSError):
                raise _unwritable(self.path, error) from error
            raise

    def close(self) -> None:
        """Release the directory. A closed writer cannot be used again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
            data = _bytes_of(self.path)
            whole = _whole(data)
            if whole < len(data):
                self.torn = self.path.with_name(f"{FILE_NAME}.torn")
                with self.torn.open("ab") as torn:
                    _write_all(torn.fileno(), data[whole:].rstrip(b"\n") + b"\n")
                sync_directory(self.path.parent)
                os.ftruncate(self._file, whole)
                os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _line(self, record: Mapping[str, Any], *, first: bool) -> bytes:
        problem = problem_of(record)
        if problem is None and (record["type"] == "run") != first:
            problem = "the run line comes first, and once"
        if problem is not None:
            raise RecordsError(f"{self.path}: not written: {problem}")
        try:
            return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RecordsError(f"{self.path}: not written: a {record['type']} record is not JSON: {error}") from error


def read_run(path: Path) -> Run:
    """Read a run directory, or its records file.

    Of repeats that were measured twice the last complete one counts. A torn last line is left out with a note.

    Raises:
        RecordsError: no records there, a garbled line, an unknown type of record, or another schema.
    """
    path = path / FILE_NAME if path.is_dir() else path
    data = _bytes_of(path)
    whole = _whole(data)
    lines = _lines(path, data, whole)
    first = next(lines, None)
    if first is None:
        raise RecordsError(f"{path} holds no records")
    run = _header(path, _parse(first))
    if whole < len(data):
        run.notes.append(f"the last line is torn and left out ({len(data) - whole} bytes)")
    in_flight: _InFlight = defaultdict(dict)
    for number, line in enumerate(lines, 2):
        record = _parse(line)
        problem = "not a JSON object of 64-bit numbers" if record is None else problem_of(record, run.cells)
        if record is not None and record.get("type") == "cells" and problem is None:
            problem = _add_cells(run.cells, record["cells"])
        if record is None or problem is not None:
            raise RecordsError(f"{path}, line {number}: {problem}")
        _take(run, in_flight, record)
    left = sum(map(len, in_flight.values()))
    if left:
        run.notes.append(f"{left} requests of repeats that were in flight when the run was stopped are left out")
    return run


def _bytes_of(path: Path) -> bytes:
    """Return the bytes of a records file.

    Raises:
        RecordsError: it does not exist, cannot be read, or is larger than :data:`_MOST_BYTES`.
    """
    try:
        if path.exists() and not path.is_file():  # a FIFO would wait for a writer
            raise RecordsError(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise RecordsError(f"{path} does not exist: not a run directory, or nothing was measured yet") from error
    except OSError as error:
        raise RecordsError(f"{path} could not be read: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise RecordsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: measure fewer requests per run")
    return data


def _lines(path: Path, data: bytes, end: int) -> Iterator[bytes]:
    """Yield the lines of records without their line breaks.

    Raises:
        RecordsError: a line is too long, or all have too many lists and objects, each of which takes up to 250 bytes.
    """
    start = parts = 0
    while start < end:
        stop = data.index(b"\n", start, end)
        if stop - start > _LONGEST_LINE:
            raise RecordsError(f"{path}: a line of {stop - start:,} bytes, at most {_LONGEST_LINE:,}")
        parts += data.count(b"[", start, stop) + data.count(b"{", start, stop)
        if parts > _MOST_PARTS:
            raise RecordsError(
                f"{path} has more than {_MOST_PARTS:,} lists and objects: measure fewer requests per run"
            )
        yield data[start:stop]
        start = stop + 1


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _unwritable(path: Path, error: OSError) -> RecordsError:
    return RecordsError(f"{path} could not be written: {error.strerror or error}")


def _whole(data: bytes) -> int:
    """Length of the part that ends with a whole line; what follows is a torn tail."""
    end = data.rfind(b"\n") + 1
    last = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return last if end == len(data) and _parse(data[last:end]) is None else end


def _parse(line: bytes) -> Record | None:
    try:
        record = parse_json(line, parse_int=_integer, most=_LONGEST_LINE)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _integer(digits: str) -> int:
    """Integers that 64 bits hold: no time, count or size is larger, and larger ones overflow in a division."""
    if not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(digits)
    return number


def _header(path: Path, record: Record | None) -> Run:
    if record is None or record.get("type") != "run":
        raise RecordsError(f"{path}, line 1: not the run line that records begin with")
    schema = record.get("schema")
    if not isinstance(schema, int) or schema not in SCHEMAS_READ:
        newer = isinstance(schema, int) and schema > SCHEMA
        fix = "upgrade panscan" if newer else "measure again, or use the panscan that wrote it"
        known = ", ".join(map(str, SCHEMAS_READ))
        raise RecordsError(f"{path} has schema {shorten(schema)}, this panscan reads schemas {known}: {fix}")
    problem = problem_of(record)
    if problem is not None:
        raise RecordsError(f"{path}, line 1: {problem}")
    cells: dict[str, Record] = {}
    if problem := _add_cells(cells, record["cells"]):
        raise RecordsError(f"{path}, line 1: {problem}")
    presets = {str(cell["cell"]): str(cell["preset"]) for cell in record["cells"] if cell.get("preset")}
    aliases = {str(cell["cell"]): _aliases(path, cell["aliases"]) for cell in record["cells"] if cell.get("aliases")}
    return Run(path, record, cells, presets, aliases)


def _add_cells(cells: dict[str, Record], more: Sequence[Record]) -> str | None:
    """Add cells to those of a run. Return what is wrong if one of them is there already."""
    for cell in more:
        if cell["cell"] in cells:
            return f"there are two cells {cell['cell']!r}"
        cells[cell["cell"]] = cell["settings"]
    return None


def _aliases(path: Path, found: Any) -> list[Record]:
    for alias in found if isinstance(found, list) else [found]:
        if not isinstance(alias, dict) or not isinstance(alias.get("settings"), dict) or "cell" not in alias:
            raise RecordsError(f"{path}, line 1: each of a cell's aliases needs an id and settings")
    return [{"preset": None, **alias} for alias in found]


_InFlight = dict[tuple[str, int], dict[tuple[int, str], Record]]


def _take(run: Run, in_flight: _InFlight, record: Record) -> None:
    kind = record["type"]
    if kind == "request":
        in_flight[record["cell"], record["repeat"]][record.get("replica", 0), record["request"]] = record
    elif kind == "repeat":
        key = record["cell"], record["repeat"]
        run.repeats[key] = record
        run.requests[key] = list(in_flight.pop(key, {}).values())
    elif kind == "load":
        run.loads |= dict.fromkeys(record["cells"], record)
    elif kind == "truth":
        run.truths[record["truth"]] = record
    elif kind == "probe":
        run.probe = record
    elif kind == "search":
        run.search = record
    elif kind != "cells":
        (run.outcomes if kind == "cell" else run.verdicts)[record["cell"]] = record
