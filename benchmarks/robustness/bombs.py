"""Part ``bombs``: well-formed pages that are small as files and expensive to open, from recipes.

Each case runs ``panscan crops`` on one file. Refused in one line, or drawn, within the limits on memory and time.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from random import Random

from PIL import Image

from benchmarks.robustness.cases import Case, Part, random_of
from benchmarks.robustness.children import panscan, run_child
from benchmarks.robustness.commands import outcome_of

DEADLINE = 90.0  # seconds: two operations on a page, each at most 20, and the starts of processes on a busy machine
MOST_MB = 2_500


def _pdf(objects: Sequence[bytes]) -> bytes:
    """Return a PDF of numbered objects; the first one is the catalog."""
    content, offsets = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return content + trailer % (len(objects) + 1, table, len(objects) + 1, len(content))


def _stream(content: bytes, entries: bytes = b"", filters: int = 0) -> bytes:
    """Return a stream object, compressed ``filters`` times."""
    for _ in range(filters):
        content = zlib.compress(content, 9)
    names = b"/Filter [" + b"/FlateDecode " * filters + b"]" if filters else b""
    return b"<< /Length %d %s %s >>\nstream\n%s\nendstream" % (len(content), names, entries, content)


def _page(*others: bytes, contents: bytes = b"/X Do", filters: int = 0) -> bytes:
    """Return a PDF of one page; ``others`` are its objects from number 5."""
    return _pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R"
            b" /Resources << /XObject << /X 5 0 R >> >> >>",
            _stream(contents, filters=filters),
            *others,
        ]
    )


_FORM = b"/Type /XObject /Subtype /Form /BBox [0 0 600 800]"


def pdf_form_draws_itself(random: Random) -> bytes:
    """Forms that draw the next one twice, and the last one the first."""
    count = random.choice((1, 2, 5, 12))
    forms = []
    for index in range(count):
        following = 5 + (index + 1) % count
        forms.append(_stream(b"/X Do /X Do", _FORM + b" /Resources << /XObject << /X %d 0 R >> >>" % following))
    return _page(*forms)


def pdf_doubling_forms(random: Random) -> bytes:
    """Forms without a cycle, each of which draws the next one several times: 2^25 to 10^9 rectangles."""
    count, times = random.choice(((25, 2), (30, 2), (18, 3), (9, 10)))
    forms = []
    for index in range(count):
        inner = b"0 0 9 9 re f " if index == count - 1 else b"/X Do " * times
        forms.append(_stream(inner, _FORM + b" /Resources << /XObject << /X %d 0 R >> >>" % (6 + index)))
    return _page(*forms)


def pdf_nested_flate(random: Random) -> bytes:
    """A content stream that is compressed several times: kilobytes become gigabytes."""
    times = random.choice((2, 3, 4))
    return _page(contents=bytes(random.choice((10**8, 3 * 10**8))), filters=times)


def pdf_many_operators(random: Random) -> bytes:
    """Millions of drawing operators in a compressed stream."""
    operator = random.choice((b"0 0 600 800 re f ", b"0 0 m 600 800 l S ", b"q Q ", b"[1 2 3] 0 d "))
    return _page(contents=operator * 4_000_000, filters=1)


def pdf_huge_image(random: Random) -> bytes:
    """An image of up to a billion pixels, compressed to a megabyte or less."""
    side = random.choice((10_000, 20_000, 30_000))
    entries = b"/Type /XObject /Subtype /Image /Width %d /Height %d /ColorSpace /DeviceGray /BitsPerComponent 8" % (
        side,
        side,
    )
    packer = zlib.compressobj(9)
    row = bytes(side)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    image = b"<< /Length %d /Filter /FlateDecode %s >>\nstream\n%s\nendstream" % (len(packed), entries, packed)
    return _page(image, contents=b"600 0 0 800 0 0 cm /X Do")


def pdf_deep_tree(random: Random) -> bytes:
    """Nested arrays, dictionaries or page trees."""
    depth = random.choice((10_000, 100_000, 1_000_000))
    return _page(random.choice((b"[" * depth + b"]" * depth, b"<< /A " * depth + b"1" + b" >>" * depth)))


def pdf_many_pages(random: Random) -> bytes:
    """A page tree that claims, or has, very many pages."""
    count = random.choice((2_000, 50_000, 10**9))
    kids = b"3 0 R " * min(count, 100_000)
    return _pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] >>",
        ]
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, data: bytes | None = None) -> bytes:
    """Return a PNG with extra chunks; its pixels are black unless ``data`` has their compressed bytes."""
    if data is None:
        channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
        packer = zlib.compressobj(9)
        row = bytes(1 + width * channels * depth // 8)
        data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"".join((b"\x89PNG\r\n\x1a\n", head, *chunks, _chunk(b"IDAT", data), _chunk(b"IEND", b"")))


def png_long_side(random: Random) -> bytes:
    """One pixel wide or high, and up to 178 million pixels long."""
    sides = random.choice(((1, 178_000_000), (178_000_000, 1), (2, 89_000_000), (300, 500_000)))
    return _png(*sides, data=zlib.compress(bytes(778)))


def png_many_chunks(random: Random) -> bytes:
    """Hundreds of thousands of empty chunks."""
    kind = random.choice((b"tEXt", b"prVt", b"IDAT"))
    return _png(32, 32, _chunk(kind, b"") * random.choice((100_000, 500_000)))


def png_packed_text(random: Random) -> bytes:
    """Compressed text or colour profiles of gigabytes."""
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(10**7)) for _ in range(100)) + packer.flush()
    chunk = random.choice((_chunk(b"zTXt", b"k\0\0" + packed), _chunk(b"iCCP", b"k\0\0" + packed)))
    return _png(32, 32, *[chunk] * random.choice((1, 3)))


def png_flat(random: Random) -> bytes:
    """As many pixels as are allowed, all equal, with and without transparency."""
    depth, colour = random.choice(((8, 2), (8, 6), (16, 0), (16, 6)))
    return _png(13_000, 13_700, depth=depth, colour=colour)


def jpeg_many_scans(random: Random) -> bytes:
    """A progressive file whose last scan is repeated up to 3,000 times."""
    file = BytesIO()
    Image.effect_noise((1000, 1000), 50).convert("RGB").save(file, "JPEG", progressive=True, quality=30)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * random.choice((30, 90, 500, 3_000)) + content[-2:]


def jpeg_large(random: Random) -> bytes:
    """A header that claims as many pixels as are allowed, on few bytes of data."""
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=random.random() < 0.5)
    content = bytearray(file.getvalue())
    frame = next(
        offset for offset in range(len(content)) if content[offset] == 0xFF and content[offset + 1] in (0xC0, 0xC2)
    )
    struct.pack_into(">HH", content, frame + 5, *random.choice(((13_000, 13_000), (65_000, 2_700), (65_500, 65_500))))
    return bytes(content)


def jpeg_many_segments(random: Random) -> bytes:
    """Hundreds of thousands of empty comments or fill bytes before the picture."""
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    content = file.getvalue()
    filling = random.choice((b"\xff\xfe\x00\x02", b"\xff\xe1\x00\x02", b"\xff"))
    return content[:2] + filling * random.choice((200_000, 1_000_000)) + content[2:]


def webp_large(random: Random) -> bytes:
    """A canvas of up to 178 million pixels."""
    file = BytesIO()
    side = random.choice((5_000, 13_000))
    frames = [Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "red")]
    frames[0].save(file, "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    content = bytearray(file.getvalue())
    content[24:27] = content[27:30] = (side - 1).to_bytes(3, "little")
    return bytes(content)


def tiff_odd(random: Random) -> bytes:
    """A directory with huge counts, very many pages, or a picture of one strip of a gigabyte."""
    entries = {256: (4, 1, 13_000), 257: (4, 1, 13_000), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1)}
    entries |= {273: (4, 1, 8), 277: (3, 1, 1), 278: (4, 1, 13_000), 279: (4, 1, 13_000**2)}
    match random.randrange(3):
        case 0:
            entries |= {tag: (random.choice((1, 4, 12)), 2**31 - 1, 8) for tag in range(40_000, 40_200)}
        case 1:
            entries[273] = entries[279] = (4, 100_000_000, 8)
    count = len(entries)
    body = b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(entries.items()))
    directory = struct.pack("<H", count) + body
    size = len(directory) + 4
    pages = 100_000 if random.random() < 0.3 else 1
    links = (0 if page == pages - 1 else 8 + (page + 1) * size for page in range(pages))
    return b"II*\0" + struct.pack("<I", 8) + b"".join(directory + struct.pack("<I", link) for link in links)


def gif_large_frame(random: Random) -> bytes:
    """A screen of one pixel with a frame of up to four billion."""
    width, height = random.choice(((65_535, 65_535), (13_000, 13_700), (65_535, 2_700), (1, 65_535)))
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"


RECIPES: dict[str, Callable[[Random], bytes]] = {
    recipe.__name__.replace("_", " "): recipe
    for recipe in (
        pdf_form_draws_itself,
        pdf_doubling_forms,
        pdf_nested_flate,
        pdf_many_operators,
        pdf_huge_image,
        pdf_deep_tree,
        pdf_many_pages,
        png_long_side,
        png_many_chunks,
        png_packed_text,
        png_flat,
        jpeg_many_scans,
        jpeg_large,
        jpeg_many_segments,
        webp_large,
        tiff_odd,
        gif_large_frame,
    )
}
"""Recipes by name. Each draws its parameters."""


def bomb(seed: int, index: int) -> tuple[str, bytes]:
    """Return the recipe and the content of a case."""
    name = list(RECIPES)[index % len(RECIPES)]
    return name, RECIPES[name](random_of(seed, "bombs", index))


def run_bombs(part: Part, seed: int, scratch: Path) -> None:
    """Open every case's file with ``panscan crops``."""
    for index in part.cases:
        name, content = bomb(seed, index)
        folder = scratch / "bomb"
        folder.mkdir()
        (folder / "page").write_bytes(content)
        ended = run_child(panscan(["crops", "page", "-o", "crops.png"]), folder, deadline=DEADLINE)
        shutil.rmtree(folder)
        case = Case(
            index,
            name,
            f"{len(content):,} bytes",
            "memory" if ended.peak_mb > MOST_MB else outcome_of(ended),
            ended.message or ended.err.strip()[-300:],
            ended.code,
            round(ended.seconds, 2),
            round(ended.peak_mb),
        )
        part.add(case, {"page": content} if case.failed else None)
