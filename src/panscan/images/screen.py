"""The header of a PNG, JPEG or WebP image, read without a decoder: its size, and whether decoding it is cheap.

Decoders allocate memory and spend time by what a header claims: 74 bytes can claim 178 million rows. This module reads
only headers and marker positions, in one pass over the file, and refuses what no decoder should be asked to do.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

from panscan.images.decode import MAX_PIXELS, image_error

__all__ = ["MAX_CHUNKS", "MAX_SCANS", "MAX_SIDE", "ORDINARY_BYTES", "ImageHeader", "read_header"]

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
_BLOCK_BYTES = 2**20

# Bytes per pixel at the peak, as measured: decoded and converted pixels at four each, and what a decoder needs besides:
# coefficients of a progressive JPEG, two canvases of a WebP.
_BYTES_PER_PIXEL = {"PNG": 10, "JPEG": 10, "WEBP": 20}


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
    try:
        head = stream.read(12)
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            header = _png(stream, name)
        elif head.startswith(b"\xff\xd8\xff"):
            header = _jpeg(stream, name)
        elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
            header = _webp(stream)
        else:
            header = None
    except struct.error:  # the file ends within the header
        header = None
    finally:
        stream.seek(0)
    if header is not None:
        _check_size(header, name)
    return header


def _check_size(header: ImageHeader, name: str) -> None:
    width, height = header.width, header.height
    if width * height > MAX_PIXELS:
        raise image_error(name, f"too large: {width}x{height} pixels, the limit is {MAX_PIXELS} in all")
    if max(width, height) > MAX_SIDE:
        raise image_error(name, f"too large: {width}x{height} pixels, the limit is {MAX_SIDE} on a side")


def _header(format: str, width: int, height: int, *, ordinary: bool) -> ImageHeader | None:
    if width == 0 or height == 0:
        return None
    cheap = width * height * _BYTES_PER_PIXEL[format] <= ORDINARY_BYTES
    return ImageHeader(format, width, height, ordinary and cheap)


def _png(stream: BinaryIO, name: str) -> ImageHeader | None:
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
        if kind == b"IDAT":
            pixels += 1
        else:
            others += 1
            animated |= kind == b"acTL"
        if others > MAX_CHUNKS:
            raise image_error(name, f"more than {MAX_CHUNKS} PNG chunks besides those of pixels")
        stream.seek(length + 4, os.SEEK_CUR)
    ordinary = not animated and others <= _ORDINARY_CHUNKS and pixels <= _PIXEL_CHUNKS
    return _header("PNG", width, height, ordinary=ordinary)


def _jpeg(stream: BinaryIO, name: str) -> ImageHeader | None:
    stream.seek(2)
    size: tuple[int, int] | None = None
    segments = components = 0
    progressive = False
    while True:
        mark, marker, length = struct.unpack(">BBH", stream.read(4))
        if mark != 0xFF or not 0xC0 <= marker <= 0xFE or length < 2:  # fill bytes and junk are a decoder's business
            return None
        if marker == 0xDA:  # the first scan
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if size is not None or marker > 0xC2:  # lossless, hierarchical or arithmetic coding
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
    scans = 1 if not progressive and stream.read(1) == bytes([components]) else _scans(stream)
    if scans > MAX_SCANS:
        raise image_error(name, f"more than {MAX_SCANS} JPEG scans")
    ordinary = scans <= _ORDINARY_SCANS and segments <= _ORDINARY_CHUNKS
    return _header("JPEG", *size, ordinary=ordinary)


def _scans(stream: BinaryIO) -> int:
    """Return the number of scans, of which the first has been read; compressed data contain no such marker."""
    scans, before = 1, b""
    while block := stream.read(_BLOCK_BYTES):
        scans += block.count(b"\xff\xda") + (before == b"\xff" and block[:1] == b"\xda")
        before = block[-1:]
    return scans


def _webp(stream: BinaryIO) -> ImageHeader | None:
    stream.seek(12)
    kind, head = stream.read(4), stream.read(14)
    if len(head) < 14:
        return None
    if kind == b"VP8X":
        animated = head[4] & 2
        width, height = (1 + int.from_bytes(head[start : start + 3], "little") for start in (8, 11))
        return None if animated else _header("WEBP", width, height, ordinary=True)
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[5:9])
        return _header("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), ordinary=head[4] == 0x2F)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[10:14])
        return _header("WEBP", width & 0x3FFF, height & 0x3FFF, ordinary=head[7:10] == b"\x9d\x01\x2a")
    return None
