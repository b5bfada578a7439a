"""Trace files as a stream of events: JSON, gzip and zip, read in pieces so that a file of any size fits in memory."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

from panscan.core import InputError

_CHUNK = 1 << 18  # bytes per read; the reader holds about twice as many characters
_LONGEST = 1 << 24  # characters of one event or metadata value
_TAIL = 32  # an error this close to the end of the text may only mean that a number or word is cut
_KEPT = ("deviceProperties", "distributedInfo", "with_stack", "record_shapes", "profile_memory", "schemaVersion")
_NAMES = (".json", ".json.gz", ".trace", ".trace.gz")
_SPACE = re.compile(r"[ \t\r\n]*")
_AGAIN = "copy the file again, or let the profiler finish writing it"
_FIX = "expected a trace that torch.profiler or Chrome wrote"


class TraceFile:
    """The events of one trace file, and the metadata beside them. Every iteration reads the file again.

    Args:
        path: a JSON file, plain or gzip, or a zip archive with one of these.

    Attributes:
        metadata: values beside the events, such as ``deviceProperties``; complete after an iteration.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each event as a dict, in the order of the file.

        Raises:
            InputError: the file cannot be read, is cut off, or holds no trace.
        """
        with ExitStack() as stack:
            try:
                yield from self._events(_Reader(self.path, _open(self.path, stack)))
            except InputError:
                raise
            except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile) as error:
                raise InputError(
                    f"{self.path}: the compressed data is cut off or damaged ({error}): {_AGAIN}"
                ) from error
            except OSError as error:
                raise InputError(f"{self.path}: {error.strerror or error}") from error

    def _events(self, reader: _Reader) -> Iterator[dict[str, Any]]:
        first = reader.peek()
        if first == "[":  # Chrome's array format, whose closing bracket is optional
            yield from reader.events(may_end=True)
        elif first == "{":
            yield from self._members(reader)
        else:
            raise InputError(f"{self.path}: {'the file is empty' if not first else 'not JSON'}: {_FIX}")

    def _members(self, reader: _Reader) -> Iterator[dict[str, Any]]:
        """Yield the events of the object format, and keep the metadata before and after them."""
        names, found = [], False
        for name in reader.names():
            if name == "traceEvents" and reader.peek() == "[":
                found = True
                yield from reader.events(may_end=False)
                continue
            value = reader.value(f"the value of {name[:40]!r}")
            names.append(name[:40])
            if name in _KEPT:
                self.metadata[name] = value
            if len(names) > 10_000:
                break
        if not found:
            has = f"it has {', '.join(names[:4])}" if names else "it is an empty object"
            raise InputError(f"{self.path}: JSON, but not a trace: no traceEvents ({has}): {_FIX}")


def open_trace(path: str | Path) -> TraceFile:
    """Return a trace file as a stream of events; the file is opened when these are read.

    Raises:
        InputError: the file does not exist, or is not a regular file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r}: not a path: {error}") from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{path} is a folder: name a trace file in it, such as trace.json.gz")
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file: save the trace to a file first")
    return TraceFile(path)


class _Reader:
    """Incremental JSON reader: decodes one value at a time from a text that it holds only a piece of."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._text, self._at, self._ended, self._count = "", 0, False, 0

    def peek(self) -> str:
        """Return the next non-space character without reading it; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def names(self) -> Iterator[str]:
        """Yield the names of an object's members; the caller reads each value before the next name."""
        self._expect("{")
        if self.peek() == "}":
            return
        while True:
            name = self.value("a name")
            if not isinstance(name, str):
                raise InputError(f"{self._path}: not JSON: a member's name is not a string: {_FIX}")
            self._expect(":")
            yield name
            if self._expect(",}") == "}":
                return

    def events(self, *, may_end: bool) -> Iterator[dict[str, Any]]:
        """Yield the elements of an array of objects.

        Args:
            may_end: whether the array may lack its closing bracket.
        """
        self._expect("[")
        while (first := self.peek()) != "]":
            if not first and may_end:
                return
            event = self.value("an event")
            if not isinstance(event, dict):
                raise InputError(f"{self._path}: JSON, but not a trace: element {self._count} is not an event: {_FIX}")
            self._count += 1
            yield event
            if may_end and not self.peek():
                return
            if self._expect(",]") == "]":
                return
        self._expect("]")

    def value(self, what: str) -> Any:
        """Decode the next value.

        Args:
            what: description for errors.

        Raises:
            InputError: no valid value follows, or a very long one.
        """
        if not self.peek():
            raise self._cut(what)
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _TAIL
                if not unfinished:
                    raise self._invalid(error.msg) from error
                if not self._fill():
                    raise (self._cut(what) if self._ended else self._invalid(error.msg)) from error
            except (ValueError, RecursionError) as error:  # an endless number, or brackets nested without end
                raise self._invalid(str(error)) from error
            else:
                if end < len(self._text) or not self._fill():  # a number at the very end may continue
                    self._at = end
                    return value
            if len(self._text) - self._at > _LONGEST:
                raise InputError(f"{self._path}: {what} is longer than {_LONGEST >> 20} MiB: {_FIX}")

    def _expect(self, allowed: str) -> str:
        found = self.peek()
        if not found:
            raise self._cut("the list of events" if self._count else "the file")
        if found not in allowed:
            raise self._invalid(f"expected {' or '.join(map(repr, allowed))}, got {found!r}")
        self._at += 1
        return found

    def _fill(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        size = max(_CHUNK, len(self._text) - self._at)  # doubles for a long value: linear time
        data = self._stream.read(size)
        self._ended = not data
        self._text = self._text[self._at :] + self._decode(data, final=not data)
        self._at = 0
        return not self._ended

    def _cut(self, what: str) -> InputError:
        where = f"inside {what} after {self._count} events" if self._count else f"inside {what}"
        return InputError(f"{self._path}: truncated: the file ends {where}: {_AGAIN}")

    def _invalid(self, problem: str) -> InputError:
        where = f"after event {self._count}" if self._count else "at its start"
        return InputError(f"{self._path}: not valid JSON {where}: {problem}: {_FIX}")


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    """Open a file by its first bytes, whatever its name: zip, gzip or plain."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", stack.enter_context(gzip.open(path, "rb")))
    if magic not in (b"PK\x03\x04", b"PK\x05\x06"):
        return stack.enter_context(path.open("rb"))
    archive = stack.enter_context(zipfile.ZipFile(path))
    try:
        stream = stack.enter_context(archive.open(_only_trace(path, archive)))
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or a rare compression
        raise InputError(f"{path}: {error}: unzip it and name the file inside") from error
    head = io.BufferedReader(cast("io.RawIOBase", stream))
    compressed = head.peek(2)[:2] == b"\x1f\x8b"
    return cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=head)) if compressed else head)


def _only_trace(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    files = [file for file in archive.infolist() if not file.is_dir()]
    traces = [file for file in files if file.filename.lower().endswith(_NAMES)] or files
    if not traces:
        raise InputError(f"{path}: the zip archive is empty: {_FIX}")
    if len(traces) > 1:
        some = ", ".join(file.filename[:60] for file in traces[:3])
        raise InputError(f"{path}: the zip archive holds {len(traces)} files ({some}, ...): unzip it and name one")
    return traces[0]
