"""The records of a run: one append-only file of JSON lines that survives ``kill -9`` and outlives the code.

A run directory holds ``records.jsonl``. Its first line is the run (settings, environment, cells); then come ``cell``
lines (what became of a cell), ``request`` lines (raw time stamps and counts) and ``repeat`` lines. A repeat line says
that every request of that repeat has been written; requests without it were in flight when the run was stopped.
``load``, ``truth`` and ``verdict`` lines say what was loaded, and how its answers compare with the reference. Load runs
have ``probe`` and ``search`` lines, and ``cells`` lines that add levels.
:mod:`panscan.records.schema` and the modules ``*_records`` have the fields.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from panscan.core import RecordsError
from panscan.core.files import LONGEST_LINE, JsonLog, WriteLock, complete_size, read_bytes, write_errors, write_file
from panscan.core.foreign import parse_json
from panscan.core.option import shorten
from panscan.records.load_records import LevelSettings, ProbeRecord, SearchRecord
from panscan.records.request_records import RepeatRecord, RequestRecord
from panscan.records.schema import SCHEMA, SCHEMAS_READ, CellRecord, CellsRecord, LoadRecord, RecordedCell, RunRecord
from panscan.records.verdict_records import TruthRecord, VerdictRecord

FILE_NAME = "records.jsonl"
UNFINISHED = "unfinished"

_MOST_BYTES = 2**33  # four million requests of 100 tokens
_LONGEST_LINE = LONGEST_LINE  # a run line has 1,000 bytes for each cell
_MOST_PARTS = 64_000_000  # a request has 10
_LONGEST_MESSAGE = 300

AnyRecord = (
    RunRecord
    | CellsRecord
    | CellRecord
    | RequestRecord
    | RepeatRecord
    | LoadRecord
    | TruthRecord
    | VerdictRecord
    | ProbeRecord
    | SearchRecord
)
"""Every type of line, of :mod:`panscan.records.schema` and the modules ``*_records``."""

CellSettings = Mapping[str, Any]
"""Settings of a cell by name. Those of other versions may be anything."""

Repeat = tuple[RepeatRecord, Sequence[RequestRecord]]
"""A repeat and the requests of its window."""


@dataclass(slots=True)
class Run:
    """What a run directory says, without the requests that were in flight when it was stopped.

    Args:
        path: the file that was read.
        header: the run line.
        cells: each cell by its id, in the order of the run line and of ``cells`` lines.
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
    header: RunRecord
    cells: dict[str, RecordedCell] = field(default_factory=dict)
    outcomes: dict[str, CellRecord] = field(default_factory=dict)
    repeats: dict[tuple[str, int], RepeatRecord] = field(default_factory=dict)
    requests: dict[tuple[str, int], list[RequestRecord]] = field(default_factory=dict)
    loads: dict[str, LoadRecord] = field(default_factory=dict)
    truths: dict[str, TruthRecord] = field(default_factory=dict)
    verdicts: dict[str, VerdictRecord] = field(default_factory=dict)
    probe: ProbeRecord | None = None
    search: SearchRecord | None = None
    notes: list[str] = field(default_factory=list)

    def finished(self) -> set[tuple[str, int | None]]:
        """Return the finished work that a resumed run skips: (cell id, repeat), and (cell id, None) for a verdict."""
        return {*self.repeats, *((cell, None) for cell, verdict in self.verdicts.items() if verdict.concluded)}

    def repeats_of(self, cell: str) -> list[Repeat]:
        """Return the complete repeats of a cell, in order."""
        return [
            (self.repeats[key], self.requests[key]) for key in sorted(key for key in self.repeats if key[0] == cell)
        ]

    def requests_of(self, cell: str) -> list[RequestRecord]:
        """Return the requests of a cell's complete repeats, also those that failed."""
        keys = sorted(key for key in self.requests if key[0] == cell)
        return [request for key in keys for request in self.requests[key]]

    def answered(self, cell: str) -> list[RequestRecord]:
        """Return the requests of a cell's complete repeats that did not fail."""
        return [request for request in self.requests_of(cell) if request.error is None]

    def level(self, cell: str) -> LevelSettings:
        """Return the settings of a load level."""
        return msgspec.convert(self.cells[cell].settings, LevelSettings)

    def add_cells(self, cells: Sequence[RecordedCell]) -> str | None:
        """Add cells. Return what is wrong if one of them is there already."""
        for cell in cells:
            if cell.cell in self.cells:
                return f"there are two cells {cell.cell!r}"
            self.cells[cell.cell] = cell
        return None


def outcome_of(run: Run, cell_id: str) -> tuple[str, str]:
    """Return (outcome, reason) of a cell; the outcome is ``unfinished`` until its run records one."""
    record = run.outcomes.get(cell_id)
    return (record.outcome, record.reason or "") if record else (UNFINISHED, "")


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
        self._log: JsonLog | None = None
        self._lock = WriteLock(
            directory / f"{FILE_NAME}.lock",
            lambda holder: RecordsError(f"{self.path} is being written by {holder}; give this run its own folder"),
        )
        with write_errors(self.path, RecordsError):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        try:
            if self.path.exists():
                self.previous = read_run(self.path)
                self._log = JsonLog(self.path)
                self.torn = self._log.torn if self._log.cut() else None
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Append records, all of them in one write that is on the disk when this returns.

        Raises:
            RecordsError: a record is not what :func:`read_run` reads, or the disk does not take it; the file is
                then as it was before.
        """
        data = b"".join(self._line(record, first=self._log is None and i == 0) for i, record in enumerate(records))
        if self._log is not None:
            self._log.append(data)
        elif data:
            write_file(self.path, data, RecordsError)
            self._log = JsonLog(self.path)

    def close(self) -> None:
        """Release the directory. A closed writer cannot be used again."""
        if self._log is not None:
            self._log.close()
            self._log = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, record: AnyRecord, *, first: bool) -> bytes:
        kind = type(record).__struct_config__.tag
        if isinstance(record, RunRecord) != first:
            raise RecordsError(f"{self.path}: not written: the run line comes first, and once")
        try:
            line = json.dumps(
                msgspec.to_builtins(record, enc_hook=_plain_value), separators=(",", ":"), allow_nan=False
            ).encode()
        except (TypeError, ValueError) as error:
            raise RecordsError(f"{self.path}: not written: a {kind} record is not JSON: {error}") from error
        try:
            parse_record(line)
        except ValueError as error:
            raise RecordsError(f"{self.path}: not written: {error}") from error
        return line + b"\n"


def _plain_value(value: object) -> str | int | float:
    """Return a text or number of a subclass, such as a URL without its credentials, as one of its base class."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def read_run(path: Path) -> Run:
    """Read a run directory, or its records file.

    Of repeats that were measured twice the last complete one counts. A torn last line is left out with a note.

    Raises:
        RecordsError: no records there, a garbled line, an unknown type of record, or another schema.
    """
    path = path / FILE_NAME if path.is_dir() else path
    data = _bytes_of(path)
    collects = gc.isenabled()
    gc.disable()  # hundreds of thousands of new objects, none of them garbage: each search would be in vain
    try:
        return parse_run(path, data)
    finally:
        if collects:
            gc.enable()


def parse_run(path: Path, data: bytes) -> Run:
    """Return the run that the bytes of a records file hold; see :func:`read_run`."""
    end = complete_size(io.BytesIO(data))
    lines = _lines_of(path, data, end)
    first = next(lines, None)
    if first is None:
        raise RecordsError(f"{path} holds no records")
    run = _new_run(path, first)
    if end < len(data):
        run.notes.append(f"the last line is torn and left out ({len(data) - end} bytes)")
    in_flight: dict[tuple[str, int], dict[tuple[int, str], RequestRecord]] = defaultdict(dict)
    for number, line in enumerate(lines, 2):
        try:
            record = parse_record(line)
            if isinstance(record, RequestRecord) and record.cell in run.cells:
                in_flight[record.cell, record.repeat][record.replica, record.request] = record
                continue
            problem = _take(run, record)
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            raise RecordsError(f"{path}, line {number}: {problem}")
        if isinstance(record, RepeatRecord):
            run.requests[record.cell, record.repeat] = list(in_flight.pop((record.cell, record.repeat), {}).values())
    if left := sum(map(len, in_flight.values())):
        run.notes.append(f"{left} requests of repeats that were in flight when the run was stopped are left out")
    return run


_MEASURED: msgspec.json.Decoder[RequestRecord | RepeatRecord] = msgspec.json.Decoder(RequestRecord | RepeatRecord)
_ONE_OF = re.compile(r"`str` matching regex '\^\(([^)]*)\).*'")
_KINDS: dict[str, type[AnyRecord]] = {str(kind.__struct_config__.tag): kind for kind in AnyRecord.__args__}


def parse_record(line: bytes) -> AnyRecord:
    """Return the record of a line.

    Requests and repeats, which are nearly all lines, are decoded at once. Everything else, and whatever that refuses,
    is parsed within the limits of :func:`panscan.core.foreign.parse_json` first.

    Raises:
        ValueError: what is wrong with which field, in printable text.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _MEASURED.decode(line)
    value = _json_object(line)
    if value is None:
        raise ValueError("not a JSON object of 64-bit numbers")
    name = value.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown type of record {shorten(name)} (schema {SCHEMA} has {', '.join(_KINDS)})")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        problem, _, place = str(error).partition(" - at ")
        problem = _ONE_OF.sub(lambda match: f"one of {match[1].replace('|', ', ')}", problem)
        where = f"field {place.replace('`', '').replace('$.', '')!r} of " if place else ""
        text = f"{problem[:1].lower()}{problem[1:]}"[:_LONGEST_MESSAGE]  # it may quote the record
        printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
        raise ValueError(f"{where}a {name} record: {printable}") from error


def _bytes_of(path: Path) -> bytes:
    """Return the bytes of a records file.

    Raises:
        RecordsError: it does not exist, cannot be read, or is larger than :data:`_MOST_BYTES`.
    """
    try:
        return read_bytes(path, _MOST_BYTES, str(path), RecordsError, fix="measure fewer requests per run")
    except RecordsError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            text = f"{path} does not exist: not a run directory, or nothing was measured yet"
            raise RecordsError(text) from error
        raise


def _lines_of(path: Path, data: bytes, end: int) -> Iterator[bytes]:
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


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, parse_int=_integer, most=_LONGEST_LINE)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _integer(digits: str) -> int:
    """Integers that 64 bits hold: no time, count or size is larger, and larger ones overflow in a division."""
    if not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(digits)
    return number


def _new_run(path: Path, line: bytes) -> Run:
    value = _json_object(line)
    if value is None or value.get("type") != "run":
        raise RecordsError(f"{path}, line 1: not the run line that records begin with")
    schema = value.get("schema")
    if not isinstance(schema, int) or schema not in SCHEMAS_READ:
        newer = isinstance(schema, int) and schema > SCHEMA
        fix = "upgrade panscan" if newer else "measure again, or use the panscan that wrote it"
        known = ", ".join(map(str, SCHEMAS_READ))
        raise RecordsError(f"{path} has schema {shorten(schema)}, this panscan reads schemas {known}: {fix}")
    try:
        header = parse_record(line)
    except ValueError as error:
        raise RecordsError(f"{path}, line 1: {error}") from error
    assert isinstance(header, RunRecord)
    run = Run(path, header)
    if problem := run.add_cells(header.cells):
        raise RecordsError(f"{path}, line 1: {problem}")
    return run


def _take(run: Run, record: AnyRecord) -> str | None:
    """Add a record other than a request to a run. Return what is wrong with it, if anything."""
    cell = getattr(record, "cell", None)
    if cell is not None and cell not in run.cells:
        return f"the run has no cell {cell!r}"
    match record:
        case RepeatRecord():
            run.repeats[record.cell, record.repeat] = record
        case CellRecord():
            run.outcomes[record.cell] = record
        case VerdictRecord():
            run.verdicts[record.cell] = record
        case LoadRecord():
            run.loads |= dict.fromkeys(record.cells, record)
        case TruthRecord():
            run.truths[record.truth] = record
        case ProbeRecord():
            run.probe = record
        case SearchRecord():
            run.search = record
        case CellsRecord():
            return run.add_cells(record.cells)
        case _:
            return "a second run line"
    return None
