"""Image files that differ in a few pixels, made without encoding the image again.

A server caches an image by the hash of its file or of its pixels, so a load that repeats images measures the cache. A
:class:`VariantImage` is encoded once. Each variant replaces only the part of the file that holds the top edge of the
image, a few kilobytes, and shares the other bytes with all variants.

PNG: the deflate stream is cut after the first row of pixels. JPEG: restart markers make the first row of 16-pixel
blocks independent of the others.
"""

from __future__ import annotations

import base64
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from panscan.core import ImageError

Pixels = NDArray[np.uint8]

_SEGMENT = 16  # pixels: the width of a JPEG block with subsampled colours
_LEVELS = 8  # values of one digit
_STEP = 4  # levels between two values: they survive JPEG's rounding
_QUALITY = 90
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"  # deflate: a stored block without bytes
_LAST_BLOCK = b"\x01\x00\x00\xff\xff"
_ADLER = 65521


class VariantImage:
    """An image whose variants differ in their top edge by at most 28 of 256 levels.

    Args:
        image: the image, RGB. A JPEG file as Pillow opened it keeps its quantization tables.
        jpeg: the file that ``image`` was read from, if that is a JPEG; variants are then JPEG files, else PNG.

    Attributes:
        media_type: media type of every variant, such as ``image/png``.
        count: number of different variants.
        shared_bytes: size of the part that all variants share, in base64.

    Raises:
        ImageError: the image cannot be encoded.
    """

    def __init__(self, image: Image.Image, jpeg: Image.Image | None = None) -> None:
        pixels = np.ascontiguousarray(image)
        segments = -(-image.width // _SEGMENT)
        self.count = _LEVELS ** min(3 * segments, 20)  # at most 2^60
        self.media_type = "image/png" if jpeg is None else "image/jpeg"
        self._file = _Png(pixels) if jpeg is None else _Jpeg(image, jpeg)
        self._edge = pixels[: self._file.rows].copy()
        self._shared = base64.b64encode(self._file.shared)
        self.shared_bytes = len(self._shared)

    def base64(self, variant: int) -> tuple[bytes, ...]:
        """Return a variant's file in base64, as segments; the long one is the same object in every variant.

        Args:
            variant: its number, from 0; variants whose numbers are equal modulo ``count`` are equal.
        """
        edge = marked(self._edge, variant % self.count)
        head, tail = self._file.around(edge, variant)
        return base64.b64encode(head), self._shared, base64.b64encode(tail)


def marked(rows: Pixels, number: int) -> Pixels:
    """Return rows of pixels with a number written into them, one digit per channel of 16 columns.

    Args:
        rows: pixels, uint8 ``[rows, width, 3]``.
        number: from 0.
    """
    width = rows.shape[1]
    digits = np.zeros((-(-width // _SEGMENT), 3), np.int16)
    for place in range(min(digits.size, 20)):
        number, digits.flat[place] = divmod(number, _LEVELS)
    change = np.repeat(digits * _STEP, _SEGMENT, axis=0)[:width]
    levels = rows.astype(np.int16)
    changed: Pixels = np.where(levels > 127, levels - change, levels + change).astype(np.uint8)
    return changed


class _Png:
    """A PNG file in three parts: the first row, the other rows (shared), and the checksum."""

    rows = 1

    def __init__(self, pixels: Pixels) -> None:
        height, width, _ = pixels.shape
        fields = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
        self._header = _SIGNATURE + _chunk(b"IHDR", fields)
        # All rows but the first, filtered: the difference to the row above. The second is unchanged, since the first
        # one varies.
        filtered = np.empty((height - 1, 1 + 3 * width), np.uint8)
        rows = pixels.reshape(height, 3 * width)
        filtered[:1, 0], filtered[:1, 1:] = 0, rows[1:2]
        filtered[1:, 0], filtered[1:, 1:] = 2, rows[2:] - rows[1:-1]
        rest = filtered.tobytes()
        self._rest_length, self._rest_sum = len(rest), zlib.adler32(rest)
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        stream = packer.compress(rest) + packer.flush(zlib.Z_SYNC_FLUSH)
        stream += _EMPTY_BLOCK * ((-(len(stream) + 12) * 2) % 3)  # 12: the chunk's own bytes; 5 = 2 (mod 3)
        self.shared = _chunk(b"IDAT", stream)

    def around(self, edge: Pixels, variant: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the shared part; the first are a multiple of 3."""
        first = b"\x00" + edge.tobytes()
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        stream = b"\x78\x9c" + packer.compress(first) + packer.flush(zlib.Z_SYNC_FLUSH)
        data = _chunk(b"IDAT", stream)
        text = b"Comment\x00" + str(variant).encode()
        text += b" " * (-(len(self._header) + len(text) + 12 + len(data)) % 3)
        # The Adler-32 of two joined byte strings from those of each.
        sums = zlib.adler32(first), self._rest_sum
        low = sum(value & 0xFFFF for value in sums) - 1
        high = sum(value >> 16 for value in sums) + self._rest_length * ((sums[0] & 0xFFFF) - 1)
        total = high % _ADLER << 16 | low % _ADLER
        tail = _chunk(b"IDAT", _LAST_BLOCK + total.to_bytes(4, "big")) + _chunk(b"IEND", b"")
        return self._header + _chunk(b"tEXt", text) + data, tail


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


class _Jpeg:
    """A JPEG file in three parts: headers and the first row of blocks, the other rows (shared), and nothing."""

    def __init__(self, image: Image.Image, source: Image.Image) -> None:
        tables = getattr(source, "quantization", None)
        self._options: dict[str, Any] = {"quality": _QUALITY, "subsampling": 2}
        if tables and len(source.getbands()) == 3:
            sampling = JpegImagePlugin.get_sampling(source)
            self._options = {"qtables": tables, "subsampling": 2 if sampling < 0 else sampling}
        encoded = _jpeg(image, self._options)
        self.rows = min(image.height, 16)
        start, end = _scan(encoded)
        first = encoded.find(b"\xff\xd0", start, end)  # RST0: the end of the first row of blocks
        self._head, self.shared = encoded[2:start], encoded[first:] if first >= 0 else b"\xff\xd9"

    def around(self, edge: Pixels, variant: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the shared part; the first are a multiple of 3."""
        file = _jpeg(Image.fromarray(edge), self._options)
        start, end = _scan(file)
        text = str(variant).encode()
        data = self._head + file[start:end]
        text += b" " * (-(6 + len(text) + len(data)) % 3)
        comment = b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text
        return b"\xff\xd8" + comment + data, b""


def _jpeg(image: Image.Image, options: dict[str, Any]) -> bytes:
    buffer = BytesIO()
    try:
        image.save(buffer, "JPEG", restart_marker_rows=1, optimize=False, progressive=False, **options)
    except (OSError, ValueError) as error:
        raise ImageError(f"the image cannot be encoded as JPEG: {error}") from error
    return buffer.getvalue()


def _scan(file: bytes) -> tuple[int, int]:
    """Return where the entropy-coded data of a JPEG file of one scan starts and ends."""
    at = 2
    while file[at + 1] != 0xDA:
        at += 2 + int.from_bytes(file[at + 2 : at + 4], "big")
    return at + 2 + int.from_bytes(file[at + 2 : at + 4], "big"), len(file) - 2
