"""What a file's headers say, read without a decoder: size and cost of an image, and the pages of a TIFF.

Decoders allocate memory and spend time by what a header claims: 74 bytes can claim 178 million rows. This module reads
only headers and marker positions, in one pass over the file, and refuses what no decoder should be asked to do.

To open a page of a TIFF, Pillow parses all directories up to it and compares each with all earlier ones: counting the
pages of a small file with thousands of pages would take minutes.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from panscan.core import ImageError
from panscan.core.errors import one_line

Size = tuple[int, int]
"""(width, height) in pixels."""

MAX_PIXELS = 178_956_970
"""More pixels than this are refused from the header alone: the limit at which Pillow itself raises (1/2 GiB of RGB)."""

MAX_SIDE = 262_144
"""Longest side of an image, pixels: decoders keep a pointer and more for every row."""

MAX_SCANS = 100
"""Scans of a JPEG. Encoders write about 10 in a progressive file, and each scan costs a pass over all pixels."""

MAX_CHUNKS = 10_000
"""Chunks of a PNG besides those of pixels, or segments of a JPEG: Pillow spends 10 microseconds on each."""

ORDINARY_BYTES = 400_000_000
"""Memory that decoding an ordinary image may take: 40 megapixels of PNG or JPEG, 20 of WebP."""

_ORDINARY_SCANS = 20
_ORDINARY_CHUNKS = 1_000
_PIXEL_CHUNKS = 50_000  # of an ordinary PNG; at libpng's 8 KiB each, 400 MB
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # sequential and progressive Huffman coding
_PLAIN_MARKERS = _FRAMES | {0xC4, 0xDA, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # not stuffed, no restart, no fill byte
_MARKER_BLOCK = 4096

_UNSUPPORTED = {
    "HEIC": re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|(mif1|msf1)(?!.{4,56}avi[fs]))", re.DOTALL),
    "JPEG 2000": re.compile(rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51"),
    "JPEG XL": re.compile(rb"\x00\x00\x00\x0cJXL |\xff\x0a"),
}

# Bytes per pixel at the peak, as measured: decoded and converted pixels at four each, and what a decoder needs besides:
# coefficients of a progressive JPEG, two canvases of a WebP.
_BYTES_PER_PIXEL = {"PNG": 10, "JPEG": 10, "WEBP": 20}


def image_error(name: str, problem: str) -> ImageError:
    """An ImageError of one printable line, ``name: problem``; control characters in either are written escaped."""
    return ImageError(one_line(f"{name}: {problem}"))


def check_size(width: int, height: int, name: str) -> None:
    """Refuse an image of more than :data:`MAX_PIXELS`.

    Raises:
        ImageError: it has more.
    """
    if width * height > MAX_PIXELS:
        raise image_error(name, f"too large: {width}x{height} pixels, the limit is {MAX_PIXELS} in all")


def check_supported(head: bytes, name: str) -> None:
    """Refuse an image of a known format that is not supported.

    Args:
        head: the first bytes of the file.
        name: name of the file in messages.

    Raises:
        ImageError: it is one.
    """
    for form, magic in _UNSUPPORTED.items():
        if magic.match(head):
            raise image_error(name, f"{form} images are not supported: convert it to JPEG or PNG")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header of an image says.

    Args:
        format: ``PNG``, ``JPEG`` or ``WEBP``.
        width: in pixels, before any rotation.
        height: in pixels.
        ordinary: whether decoding takes little memory and time for its size.
    """

    format: str
    width: int
    height: int
    ordinary: bool


def read_header(stream: BinaryIO, name: str) -> ImageHeader | None:
    """Return the header of a PNG, JPEG or still WebP image; None for all other files, and for damaged headers.

    Args:
        stream: a seekable stream of the file, at its start, where it is left.
        name: name of the file in messages.

    Raises:
        ImageError: the image exceeds :data:`MAX_PIXELS`, :data:`MAX_SIDE`, :data:`MAX_SCANS` or :data:`MAX_CHUNKS`.
    """
    facts = None
    try:
        head = stream.read(1024)
        if b"%PDF-" in head:  # PDFium reads what follows the mark, whatever precedes it
            return None
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            form, facts = "PNG", _png(stream, name)
        elif head.startswith(b"\xff\xd8\xff"):
            form, facts = "JPEG", _jpeg(stream, name)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            form, facts = "WEBP", _webp(stream)
    except struct.error:  # the file ends within the header
        return None
    finally:
        stream.seek(0)
    if facts is None or 0 in facts[:2]:
        return None
    width, height, ordinary = facts
    check_size(width, height, name)
    if max(width, height) > MAX_SIDE:
        raise image_error(name, f"too large: {width}x{height} pixels, the limit is {MAX_SIDE} on a side")
    return ImageHeader(form, width, height, ordinary and width * height * _BYTES_PER_PIXEL[form] <= ORDINARY_BYTES)


_Facts = tuple[int, int, bool]
"""Width, height, and whether the file is ordinary but for its size."""


def _png(stream: BinaryIO, name: str) -> _Facts | None:
    stream.seek(8)
    length, kind, width, height = struct.unpack(">I4sII", stream.read(16))
    if kind != b"IHDR" or length != 13:
        return None
    stream.seek(8 + 12 + length)
    pixels = others = 0
    animated = False
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IEND":
            break
        if kind == b"IHDR":  # Pillow would take this one
            return None
        if kind == b"IDAT":
            pixels += 1
            if pixels > _PIXEL_CHUNKS:
                break
        else:
            others += 1
            animated |= kind == b"acTL"
        if others > MAX_CHUNKS:
            raise image_error(name, f"more than {MAX_CHUNKS} PNG chunks besides those of pixels")
        stream.seek(length + 4, os.SEEK_CUR)
    return width, height, not animated and others <= _ORDINARY_CHUNKS and pixels <= _PIXEL_CHUNKS


def _jpeg(stream: BinaryIO, name: str) -> _Facts | None:
    stream.seek(2)
    size: Size | None = None
    segments = components = 0
    progressive = False
    while True:
        mark, marker, length = struct.unpack(">BBH", stream.read(4))
        # Others have no length, or belong to rare codings; fill bytes and junk are a decoder's business, too.
        if mark != 0xFF or marker not in _PLAIN_MARKERS or length < 2:
            return None
        if marker == 0xDA:  # the first scan
            break
        if marker in _FRAMES:
            if size is not None:
                return None
            _, height, width, components = struct.unpack(">BHHB", stream.read(6))
            size, progressive = (width, height), marker == 0xC2
            stream.seek(-6, os.SEEK_CUR)
        segments += 1
        if segments > MAX_CHUNKS:
            raise image_error(name, f"more than {MAX_CHUNKS} JPEG segments")
        stream.seek(length - 2, os.SEEK_CUR)
    if size is None:
        return None
    # A sequential picture whose first scan has all components ends with it, whatever follows.
    scans = 1
    if progressive or stream.read(1) != bytes([components]):
        stream.seek(-1 if not progressive else 0, os.SEEK_CUR)
        scans, segments = _scans(stream, length, segments, name)
    if scans > MAX_SCANS:
        raise image_error(name, f"more than {MAX_SCANS} JPEG scans")
    return *size, scans <= _ORDINARY_SCANS and segments <= _ORDINARY_CHUNKS


def _scans(stream: BinaryIO, length: int, segments: int, name: str) -> tuple[int, int]:
    """Return the numbers of scans and of segments of a picture, up to its end; many scans if that is not clear.

    Args:
        stream: the file, after the length of the first scan's header.
        length: that length.
        segments: number of segments so far.
        name: name of the file in messages.

    Raises:
        ImageError: there are more than :data:`MAX_CHUNKS` segments.
    """
    scans = 1
    while scans <= MAX_SCANS:
        stream.seek(length - 2, os.SEEK_CUR)
        marker = _next_marker(stream)
        if marker == 0xD9:
            break
        length = int.from_bytes(stream.read(2), "big")
        if marker not in _PLAIN_MARKERS or length < 2:
            return max(scans, _ORDINARY_SCANS + 1), segments
        scans += marker == 0xDA
        segments += 1
        if segments > MAX_CHUNKS:
            raise image_error(name, f"more than {MAX_CHUNKS} JPEG segments")
    return scans, segments


def _next_marker(stream: BinaryIO) -> int:
    """Return the next marker after compressed data, and leave the stream behind it; the end of the image if none is."""
    while block := stream.read(_MARKER_BLOCK):
        if (marker := _MARKER.search(block)) is not None:
            stream.seek(marker.end() - len(block), os.SEEK_CUR)
            return block[marker.end() - 1]
        if block.endswith(b"\xff") and len(block) == _MARKER_BLOCK:
            stream.seek(-1, os.SEEK_CUR)
    return 0xD9


def _webp(stream: BinaryIO) -> _Facts | None:
    stream.seek(12)
    kind, head = stream.read(4), stream.read(14)
    if len(head) < 14:
        return None
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(head[start : start + 3], "little") for start in (8, 11))
        return None if head[4] & 2 else (width, height, True)  # animated
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[5:9])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), head[4] == 0x2F
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[10:14])
        return width & 0x3FFF, height & 0x3FFF, head[7:10] == b"\x9d\x01\x2a"
    return None


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
        _, link, start, _ = _layout(head)
        self._head = head[:start] + link.pack(directory)
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

    Args:
        stream: a seekable stream of the whole file; its position changes.
        most: maximum number of pages to find.

    Raises:
        OSError: the file is not a TIFF, or the chain of directories leaves it.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(16)
    count, link, start, entry = _layout(head)
    directories: dict[int, None] = {}
    directory = _unpack(link, head[start:])
    while directory and directory not in directories and len(directories) < most:
        if directory + count.size > size:
            raise OSError(f"the directory of page {len(directories) + 1} lies outside the file")
        directories[directory] = None
        stream.seek(directory)
        entries = _unpack(count, stream.read(count.size))
        stream.seek(min(size, directory + count.size + entries * entry))
        following = stream.read(link.size)
        # The file may end before the link: the page may still be readable.
        directory = _unpack(link, following) if len(following) == link.size else 0
    return list(directories)


def _unpack(form: struct.Struct, content: bytes) -> int:
    if len(content) < form.size:
        raise OSError("the file is cut off")
    number: int = form.unpack_from(content)[0]
    return number


def _layout(head: bytes) -> tuple[struct.Struct, struct.Struct, int, int]:
    """Return the form of a directory's count and of a link, where the first link lies, and the bytes of an entry."""
    order = {b"II": "<", b"MM": ">"}.get(head[:2])
    if order is None or len(head) < 8:
        raise OSError("not a TIFF header")
    if 43 in head[2:4]:  # a BigTIFF; Pillow also takes a version in the other byte order
        return struct.Struct(order + "Q"), struct.Struct(order + "Q"), 8, 20
    return struct.Struct(order + "H"), struct.Struct(order + "L"), 4, 12
