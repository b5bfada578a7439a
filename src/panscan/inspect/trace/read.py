"""Trace files as a stream of events: JSON, plain or gzip, read in pieces so that a file of any size fits in memory."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path
from typing import IO, Any

from panscan.core import InputError
from panscan.core.foreign import JsonObject

_CHUNK = 1 << 18  # bytes per read; the reader holds about twice as many characters
_LONGEST = 1 << 24  # characters of one event or metadata value
_TAIL = 32  # an error this close to the end of the text may only mean that a number or word is cut
_SPACE = re.compile(r"[ \t\r\n]*")
_AGAIN = "copy the file again, or let the profiler finish writing it"
_FIX = "expected a trace that torch.profiler wrote"


class TraceFile:
    """The events of one trace file, and the devices beside them. Every iteration reads the file again.

    Args:
        path: a JSON file, plain or gzip.

    Attributes:
        devices: the value of ``deviceProperties``; complete after an iteration.

    Raises:
        InputError: the file does not exist, is a folder, or is not a regular file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.devices: object = None
        if isdir(path):  # noqa: PTH112 - is_dir() and is_file() raise where a folder cannot be searched
            raise InputError(f"{path} is a folder: name a trace in it, such as trace.json.gz")
        if not isfile(path):  # noqa: PTH113
            raise InputError(f"{path}: No such file, or not a regular file: name a trace, such as trace.json.gz")

    def __iter__(self) -> Iterator[JsonObject]:
        """Yield each event as a dict, in the order of the file.

        Raises:
            InputError: the file cannot be read, is cut off, or holds no trace.
        """
        try:
            with self.path.open("rb") as file:
                magic = file.read(2)
                if magic == b"PK":
                    raise InputError(f"{self.path} is a zip archive: unzip it and name the file inside")
                file.seek(0)
                stream = gzip.GzipFile(fileobj=file) if magic == b"\x1f\x8b" else file
                try:
                    yield from self._events(_Reader(stream))
                except InputError as error:
                    raise InputError(f"{self.path}: {error}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{self.path}: the compressed data is cut off or damaged ({error}): {_AGAIN}") from error
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from error

    def _events(self, reader: _Reader) -> Iterator[JsonObject]:
        """Yield the events, and keep the devices before or after them."""
        if (first := reader.peek()) != "{":
            problem = "JSON, but not a trace: an array" if first == "[" else "not JSON"
            raise InputError(f"{problem if first else 'the file is empty'}: {_FIX}")
        reader.expect("{")
        names, has_events = list[str](), False
        while (names or reader.peek() != "}") and len(names) < 10_000:
            name = reader.value("a name")
            if not isinstance(name, str):
                raise InputError(f"not JSON: a member's name is not a string: {_FIX}")
            reader.expect(":")
            names.append(name[:40])
            if name == "traceEvents" and reader.peek() == "[":
                has_events = True
                yield from reader.events()
            else:
                value = reader.value(f"the value of {name[:40]!r}")
                self.devices = value if name == "deviceProperties" else self.devices
            if reader.expect(",}") == "}":
                break
        if not has_events:
            has = f"it has {', '.join(names[:4])}" if names else "it is an empty object"
            raise InputError(f"JSON, but not a trace: no traceEvents ({has}): {_FIX}")


class _Reader:
    """Incremental JSON reader: decodes one value at a time from a text that it holds only a piece of."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._text, self._position, self._ended, self._count = "", 0, False, 0

    def peek(self) -> str:
        """Return the next non-space character without reading it; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._fill():
                return ""

    def events(self) -> Iterator[JsonObject]:
        """Yield the elements of an array of objects."""
        self.expect("[")
        if self.peek() == "]":
            self.expect("]")
            return
        while True:
            event = self.value("an event")
            if not isinstance(event, dict):
                raise InputError(f"JSON, but not a trace: element {self._count} is not an event: {_FIX}")
            self._count += 1
            yield event
            if self.expect(",]") == "]":
                return

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
                value, end = self._scan(self._text, self._position)
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
                    self._position = end
                    return value
            if len(self._text) - self._position > _LONGEST:
                raise InputError(f"{what} is longer than {_LONGEST >> 20} MiB: {_FIX}")

    def expect(self, allowed: str) -> str:
        """Read one of some characters.

        Raises:
            InputError: another one follows.
        """
        character = self.peek()
        if not character:
            raise self._cut("the list of events" if self._count else "the file")
        if character not in allowed:
            raise self._invalid(f"expected {' or '.join(map(repr, allowed))}, got {character!r}")
        self._position += 1
        return character

    def _fill(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        size = max(_CHUNK, len(self._text) - self._position)  # doubles for a long value: linear time
        data = self._stream.read(size)
        self._ended = not data
        self._text = self._text[self._position :] + self._decode(data, final=not data)
        self._position = 0
        return not self._ended

    def _cut(self, what: str) -> InputError:
        where = f"inside {what} after {self._count} events" if self._count else f"inside {what}"
        return InputError(f"truncated: the file ends {where}: {_AGAIN}")

    def _invalid(self, problem: str) -> InputError:
        where = f"after event {self._count}" if self._count else "at its start"
        return InputError(f"not valid JSON {where}: {problem}: {_FIX}")
