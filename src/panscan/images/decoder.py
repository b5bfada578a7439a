"""The decoding process: opens documents for its parent within limits on memory and time.

It holds nothing but the file that it is given: no credentials in its environment, no model. A document that makes a
decoder crash, allocate without end or never return therefore costs this process only; see :mod:`panscan.images.pool`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import tempfile
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from panscan.core import ImageError
from panscan.core.child import Parent
from panscan.images.decode import count_pages, page_size, page_sizes, read_page
from panscan.images.page_levels import copy_levels

__all__ = ["MEMORY_BYTES", "SEALS", "main"]

MEMORY_BYTES = 2_000_000_000
"""Memory that one decoding process may take for a document, in addition to its own."""

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
"""Seals of a file with pixels, so that its size cannot change under the reader."""

_MOST_OPEN = 64  # files


def main() -> None:
    """Answer requests until the parent closes the connection."""
    parent = Parent()
    parent.end_with_parent()
    _limit_process()
    while (message := parent.receive()) is not None:
        with os.fdopen(message.files[0], "rb") as stream:
            stream.seek(0)  # the parent shares the position
            fields, files = _answer(message.fields, stream)
        parent.send(fields, files=files)
        for file in files:
            os.close(file)


def _limit_process() -> None:
    """Limit memory, file sizes and open files of this process, which the kernel then enforces."""
    used = _address_space()
    if used is not None:
        resource.setrlimit(resource.RLIMIT_AS, _within(resource.RLIMIT_AS, used + MEMORY_BYTES))
        with suppress(OSError):  # if the host runs out of memory, the kernel should end this process first
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - not a file on disk
                file.write("800")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, _within(resource.RLIMIT_FSIZE, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, _within(resource.RLIMIT_NOFILE, _MOST_OPEN))


def _within(limit: int, wanted: int) -> tuple[int, int]:
    """Return a limit that does not exceed the present one."""
    present = resource.getrlimit(limit)[1]
    most = wanted if present == resource.RLIM_INFINITY else min(wanted, present)
    return most, most


def _address_space() -> int | None:
    """Return the bytes of this process's address space; None where the kernel does not limit them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a file on disk
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _answer(fields: dict[str, Any], stream: BinaryIO) -> tuple[dict[str, Any], list[int]]:
    """Return the reply to a request, with the file of the pixels if it asks for them."""
    name = str(fields["name"])
    try:
        match fields["operation"]:
            case "count":
                return {"count": count_pages(stream, name, fields["max_pages"])}, []
            case "size":
                return {"size": page_size(stream, fields["page"], name)}, []
            case "sizes":
                return {"sizes": page_sizes(stream, name, fields["max_pages"])}, []
            case _:
                return _levels(stream, fields, name)
    except ImageError as error:
        return {"error": str(error), "memory": isinstance(error.__cause__, MemoryError)}, []
    except MemoryError:
        return {"error": f"{name}: not enough memory to decode it", "memory": True}, []


def _levels(stream: BinaryIO, fields: dict[str, Any], name: str) -> tuple[dict[str, Any], list[int]]:
    """Decode a page into a new file of pixels: uint8 ``[height, width, 4]``."""
    image = read_page(stream, fields["page"], name, copy=False)
    width, height = image.size
    file = _pixel_file(4 * width * height)
    with mmap.mmap(file, 4 * width * height, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)) as memory:
        words = np.frombuffer(memory, np.uint32).reshape(height, width)
        digest = copy_levels(image, alone=fields["alone"], out=words)[1]
        del words  # else the mapping cannot be closed
    if SEALS:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return {"size": [width, height], "digest": digest.hex()}, [file]


def _pixel_file(size: int) -> int:
    """Return a descriptor of a new file without a name: in memory on Linux, temporary elsewhere."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("panscan-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
