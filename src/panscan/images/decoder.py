"""The decoding process: opens documents for its parent within limits on memory and time.

It holds nothing but the file that it is given: no credentials in its environment, no model. A document that makes a
decoder crash, allocate without end or never return therefore costs this process only; see :mod:`panscan.images.pool`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from panscan.core import ImageError
from panscan.core.child import JsonParent, unnamed_file
from panscan.images.decode import count_pages, page_size, page_sizes, read_page
from panscan.images.headers import MAX_PIXELS
from panscan.images.page_levels import copy_levels

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
"""Seals of a file with pixels, so that its size cannot change under the reader."""

_MOST_OPEN = 64  # files
_MOST_BYTES = 8 * MAX_PIXELS  # of a file; pixels have four bytes
_KEPT_FILES = 8
_KEPT_BYTES = 64 * 2**20  # of pixel files that are reused
_MOST_LARGER = 4  # times the size of a page: a larger file is not used for it


def main() -> None:
    """Answer requests until the parent closes the connection, which ends this process."""
    parent = JsonParent()
    _limit_process(**parent.receive().fields)
    parent.send({})
    pixels = _PixelFiles()
    while True:
        message = parent.receive()
        pixels.release(message.fields.pop("released"))
        with os.fdopen(message.files[0], "rb") as stream:
            stream.seek(0)  # the parent shares the position
            fields = _reply_to(message.fields, stream, pixels)
        parent.send(fields, files=pixels.new)
        pixels.close_new()


def _limit_process(memory: int | None, niceness: int) -> None:
    """Lower this process's priority and limit its memory, file sizes and open files; the kernel enforces the limits."""
    os.nice(niceness)
    if memory is not None:
        with suppress(OSError):  # where the kernel does not limit address spaces
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            _lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
            # If the host runs out of memory, the kernel should end this process first.
            Path("/proc/self/oom_score_adj").write_text("800", "ascii")
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_FSIZE, _MOST_BYTES)
    _lower_limit(resource.RLIMIT_NOFILE, _MOST_OPEN)


def _lower_limit(limit: int, wanted: int) -> None:
    present = resource.getrlimit(limit)[1]
    most = wanted if present == resource.RLIM_INFINITY else min(wanted, present)
    resource.setrlimit(limit, (most, most))


def _reply_to(fields: dict[str, Any], stream: BinaryIO, pixels: _PixelFiles) -> dict[str, Any]:
    """Return the reply to a request."""
    name = str(fields["name"])
    try:
        match fields["operation"]:
            case "count":
                return {"answer": count_pages(stream, name, fields["max_pages"])}
            case "size":
                return {"answer": page_size(stream, fields["page"], name)}
            case "sizes":
                return {"answer": page_sizes(stream, name, fields["max_pages"])}
            case _:
                expected = fields["expected"] and tuple(fields["expected"])
                image = read_page(stream, fields["page"], name, copy=False, expected=expected)
                width, height = image.size
                file, kept = pixels.take(4 * width * height)
                words = np.frombuffer(file.memory, np.uint32, width * height).reshape(height, width)
                digest = copy_levels(image, alone=fields["alone"], out=words)[1]
                return {
                    "size": [width, height],
                    "digest": digest.hex(),
                    "file": file.number,
                    "kept": kept,
                    "dropped": pixels.dropped(),
                }
    except ImageError as error:
        return {"error": str(error), "memory": isinstance(error.__cause__, MemoryError)}
    except MemoryError:  # the parent ends this process then, so a file that was not filled is not used again
        return {"error": f"{name}: not enough memory to decode it", "memory": True}


@dataclass(slots=True, eq=False)
class _PixelFile:
    """A file of pixels, which the parent maps too.

    Args:
        number: identifies the file in messages.
        size: bytes.
        memory: the file's mapping in this process.
        free: whether the parent has released the file.
    """

    number: int
    size: int
    memory: mmap.mmap
    free: bool = False


class _PixelFiles:
    """Files of pixels. They are reused, because allocating memory for a page takes longer than copying the page."""

    def __init__(self) -> None:
        self.new: list[int] = []
        """Descriptors of files that the parent does not have yet."""
        self._kept: list[_PixelFile] = []
        self._dropped: list[int] = []
        self._numbers = count()

    def take(self, size: int) -> tuple[_PixelFile, bool]:
        """Return a file of at least ``size`` bytes, and whether it will be reused once the parent has released it."""
        fitting = [file for file in self._kept if file.free and size <= file.size <= _MOST_LARGER * size]
        if fitting:
            file = min(fitting, key=lambda candidate: candidate.size)
            file.free = False
            return file, True
        descriptor = unnamed_file()
        os.ftruncate(descriptor, size)
        if SEALS:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.new.append(descriptor)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        file = _PixelFile(next(self._numbers), size, mmap.mmap(descriptor, size, flags=flags))
        fits = self._make_room(size)
        if fits:
            self._kept.append(file)
        return file, fits

    def release(self, numbers: Sequence[int]) -> None:
        """Mark files as free."""
        for file in self._kept:
            file.free |= file.number in numbers

    def _make_room(self, size: int) -> bool:
        """Drop free files until one of ``size`` bytes may be kept; return whether it may."""
        while len(self._kept) == _KEPT_FILES or sum(file.size for file in self._kept) + size > _KEPT_BYTES:
            free = next((file for file in self._kept if file.free), None)
            if free is None:
                return False
            self._kept.remove(free)
            self._dropped.append(free.number)
        return True

    def dropped(self) -> list[int]:
        """Return the numbers of files that were dropped since the last call: the parent need not map them any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def close_new(self) -> None:
        """Close the descriptors of new files: the parent has them."""
        for descriptor in self.new:
            os.close(descriptor)
        self.new.clear()
