"""Damage to bytes: what transmission, broken writers and attackers do to files."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from random import Random

_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TOKENS = re.compile(rb"/[A-Za-z]+|\d+ \d+ R|\d+|<<|>>|\[|\]|[A-Z]{4}|endobj|stream")
_HEADER = 128
_PNG = b"\x89PNG\r\n\x1a\n"


def _flip(data: bytearray, random: Random) -> None:
    """Flip 1 to 32 bits anywhere."""
    for _ in range(random.choice((1, 2, 8, 32))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _truncate(data: bytearray, random: Random) -> None:
    """Cut the end off, and sometimes fill it with zeros, as an interrupted download does."""
    end = random.randrange(len(data))
    lost = len(data) - end
    del data[end:]
    if random.random() < 0.3:
        data += bytes(lost)


def _header(data: bytearray, random: Random) -> None:
    """Replace bytes of the header, where sizes, depths and counts are."""
    for _ in range(random.choice((1, 2, 4))):
        data[random.randrange(min(_HEADER, len(data)))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _length(data: bytearray, random: Random) -> None:
    """Write an extreme number of 2 or 4 bytes, in either order, over any field."""
    form = random.choice(("<H", ">H", "<I", ">I"))
    size = struct.calcsize(form)
    offset = random.randrange(max(1, min(len(data), random.choice((_HEADER, len(data)))) - size))
    limit = 256**size - 1
    data[offset : offset + size] = struct.pack(form, random.choice(_EXTREMES) & limit)


def _splice(data: bytearray, random: Random) -> None:
    """Copy, drop or repeat a chunk."""
    size = random.randrange(1, max(2, len(data) // 4))
    source, target = (random.randrange(len(data)) for _ in range(2))
    chunk = data[source : source + size]
    method = random.randrange(3)
    if method == 0:
        data[target:target] = chunk * random.choice((1, 2, 16))
    elif method == 1:
        data[target : target + size] = chunk
    else:
        del data[source : source + size]


def _token(data: bytearray, random: Random) -> None:
    """Swap names, numbers, references and chunk types of the file for each other, or for hostile ones."""
    tokens = list(_TOKENS.finditer(data))
    if not tokens:
        _flip(data, random)
        return
    for _ in range(random.choice((1, 2, 5))):
        token = random.choice(tokens)
        hostile = (
            b"0",
            b"-1",
            b"99999999999999999999",
            b"2 0 R",
            b"3 0 R",
            b"<<" * 200,
            b"[" * 2000,
            b"/Kids",
            b"IDAT",
        )
        data[token.start() : token.end()] = random.choice((bytes(random.choice(tokens)[0]), random.choice(hostile)))


MUTATIONS: dict[str, Callable[[bytearray, Random], None]] = {
    "bit flips": _flip,
    "truncation": _truncate,
    "header fields": _header,
    "length fields": _length,
    "splicing": _splice,
    "tokens": _token,
}


def mutated(data: bytes, name: str, random: Random) -> bytes:
    """Damage a copy of a file; a quarter of them twice, so that one check does not hide the next."""
    copy = bytearray(data)
    MUTATIONS[name](copy, random)
    if copy and random.random() < 0.25:
        MUTATIONS[random.choice(list(MUTATIONS))](copy, random)
    return with_checksums(copy) if copy[:8] == _PNG and random.random() < 0.5 else bytes(copy)


def with_checksums(data: bytearray) -> bytes:
    """Make the checksums of a PNG's chunks right, or every damage would end at them."""
    offset = len(_PNG)
    while offset + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        end = offset + 8 + length
        if end + 4 > len(data):
            break
        struct.pack_into(">I", data, end, zlib.crc32(data[offset + 4 : end]))
        offset = end + 4
    return bytes(data)
