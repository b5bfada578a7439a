"""Offsets of a TIFF's page directories, found without parsing them.

To open a page, Pillow parses all directories up to it and compares each with all earlier ones. Counting the pages of a
small file with thousands of pages therefore takes minutes.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from io import SEEK_END, BytesIO
from typing import Any, BinaryIO

__all__ = ["PageStream", "find_directories"]

_KEPT = 8  # documents whose offsets are cached; their pages are usually read one after the other

_KNOWN: OrderedDict[Any, _Directories] = OrderedDict()
_LOCK = threading.Lock()


class PageStream:
    """A TIFF stream whose header points to another page, which readers take for the first one.

    Args:
        stream: the file.
        directory: offset of the page's directory, from :func:`find_directories`.
    """

    def __init__(self, stream: BinaryIO, directory: int) -> None:
        self._stream = stream
        stream.seek(0)
        head = stream.read(16)
        order, big = _layout(head)
        width = "Q" if big else "L"
        at = 8 if big else 4
        self._head = head[:at] + struct.pack(order + width, directory)
        stream.seek(0)

    def read(self, size: int = -1) -> bytes:
        """Read from the stream, with the changed header."""
        at = self._stream.tell()
        content = self._stream.read(size)
        changed = self._head[at : at + len(content)]
        return changed + content[len(changed) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def find_directories(stream: BinaryIO, most: int) -> list[int]:
    """Return the offsets of the directories of a TIFF's first pages. A circular chain ends where it closes.

    Offsets are cached per file, so that reading page after page takes linear time.

    Args:
        stream: a seekable stream of the whole file; its position changes.
        most: maximum number of pages to find.

    Raises:
        OSError: the file is not a TIFF, or the chain of directories leaves it.
    """
    stream.seek(0)
    key = _identity(stream, stream.read(16))
    with _LOCK:
        found = _KNOWN.pop(key, None) or _Directories(stream)
        _KNOWN[key] = found
        while len(_KNOWN) > _KEPT:
            _KNOWN.popitem(last=False)
    return found.first(stream, most)


class _Directories:
    """The directories of one file that have been found so far."""

    def __init__(self, stream: BinaryIO) -> None:
        stream.seek(0)
        head = stream.read(16)
        order, big = _layout(head)
        self._count = struct.Struct(order + ("Q" if big else "H"))
        self._link = struct.Struct(order + ("Q" if big else "L"))
        self._entry = 20 if big else 12
        self._next = _unpack(self._link, head[8 if big else 4 :])
        self._found: list[int] = []
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def first(self, stream: BinaryIO, most: int) -> list[int]:
        with self._lock:
            size = stream.seek(0, SEEK_END)
            while self._next and len(self._found) < most:
                if self._next + self._count.size > size:
                    raise OSError(f"the directory of page {len(self._found) + 1} lies outside the file")
                link = self._after(stream, self._next)
                self._found.append(self._next)
                self._seen.add(self._next)
                self._next = 0 if link in self._seen else link
            return self._found[:most]

    def _after(self, stream: BinaryIO, directory: int) -> int:
        """Return the link after a directory's entries; 0 if the file ends before it: the page may still be readable."""
        stream.seek(directory)
        entries = _unpack(self._count, stream.read(self._count.size))
        end = directory + self._count.size + entries * self._entry
        if end >= 2**63:
            return 0
        stream.seek(end)
        link = stream.read(self._link.size)
        return _unpack(self._link, link) if len(link) == self._link.size else 0


def _unpack(form: struct.Struct, content: bytes) -> int:
    if len(content) < form.size:
        raise OSError("the file is cut off")
    number: int = form.unpack_from(content)[0]
    return number


def _layout(head: bytes) -> tuple[str, bool]:
    """Return the byte order for :mod:`struct`, and whether the file is a BigTIFF."""
    order = {b"II": "<", b"MM": ">"}.get(head[:2])
    if order is None or len(head) < 8:
        raise OSError("not a TIFF header")
    return order, 43 in head[2:4]  # Pillow also takes a version in the other byte order


def _identity(stream: BinaryIO, head: bytes) -> Any:
    """Return a key of the file's content, computed without reading all of it."""
    if isinstance(stream, BytesIO):
        content = stream.getvalue()  # shared with the stream, and bytes keep their hash: once per download
        return len(content), hash(content)
    found = os.fstat(stream.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, head
