"""Headers read without a decoder agree with Pillow, refuse what costs too much, and take linear work."""

import struct
from contextlib import suppress
from io import BytesIO
from random import Random
from typing import Any

import pytest
from benchmarks.robustness.bombs import _chunk, _png
from benchmarks.robustness.mutate import MUTATIONS, mutated
from benchmarks.robustness.seeds import SEEDS
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.images.encoding import CountingStream, encode

from panscan.core import ImageError
from panscan.images.headers import MAX_CHUNKS, MAX_SCANS, MAX_SIDE, ImageHeader, read_header


def saved(mode: str, kind: str, size: tuple[int, int] = (33, 57), **options: Any) -> bytes:
    return encode(Image.new(mode, size), kind, **options)


def header_of(content: bytes) -> ImageHeader | None:
    stream = BytesIO(content)
    header = read_header(stream, "page")
    assert stream.tell() == 0
    return header


ORDINARY = [
    *(saved(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    *(saved(mode, "JPEG") for mode in ("L", "RGB", "CMYK")),
    saved("RGB", "JPEG", progressive=True),
    saved("RGB", "WEBP"),
    saved("RGB", "WEBP", lossless=True),
    saved("RGBA", "WEBP"),
    saved("RGBA", "WEBP", lossless=True),
]


@pytest.mark.parametrize("content", ORDINARY)
def test_the_size_is_that_of_pillow(content: bytes) -> None:
    header = header_of(content)
    assert header is not None and header.ordinary
    with Image.open(BytesIO(content)) as image:
        assert (header.width, header.height) == image.size
        assert header.format == image.format


@pytest.mark.parametrize("kind", ["PDF", "TIFF", "GIF", "BMP"])
def test_other_formats_have_no_header_here(kind: str) -> None:
    assert header_of(saved("RGB", kind)) is None


def test_an_animation_has_no_header_here() -> None:
    frames = {"more": [Image.new("RGB", (33, 57), "red")]}
    assert header_of(saved("RGB", "WEBP", **frames)) is None
    animated = header_of(saved("RGB", "PNG", **frames))
    assert animated is not None and not animated.ordinary


def test_a_large_image_is_not_ordinary_and_one_beyond_a_limit_is_refused() -> None:
    assert header_of(_png(6_000, 6_000, data=b"")) == ImageHeader("PNG", 6_000, 6_000, True)
    assert header_of(_png(7_000, 7_000, data=b"")) == ImageHeader("PNG", 7_000, 7_000, False)
    with pytest.raises(ImageError, match=r"^page: too large: 1x178000000 pixels, the limit is 262144 on a side$"):
        header_of(_png(1, 178_000_000, data=b""))
    assert header_of(_png(1, MAX_SIDE, data=b"")) is not None
    with pytest.raises(ImageError, match=r"^page: too large: 20000x20000 pixels"):
        header_of(_png(20_000, 20_000, data=b""))


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    content = saved("RGB", "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    scans = content.count(b"\xff\xda")
    return content[:last] + content[last:-2] * (1 + count - scans) + content[-2:]


def with_segments(count: int) -> bytes:
    content = saved("RGB", "JPEG")
    return content[:2] + b"\xff\xfe\x00\x02" * count + content[2:]


def with_chunks(count: int) -> bytes:
    return _png(32, 32, _chunk(b"tEXt", b"") * count)


LIMITS = [(with_scans, MAX_SCANS), (with_segments, MAX_CHUNKS - 20), (with_chunks, MAX_CHUNKS - 1)]


@pytest.mark.parametrize(("file", "limit"), LIMITS)
def test_scans_segments_and_chunks_are_bounded(file: Any, limit: int) -> None:
    header = header_of(file(limit))
    assert header is not None and not header.ordinary
    with pytest.raises(ImageError, match=r"^page: more than "):
        header_of(file(limit + 30))


def test_a_header_that_could_mislead_is_none() -> None:
    """Pillow takes the last size of a PNG, PDFium whatever follows its mark, and both skip markers without a length."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 100_000_000, 8, 2, 0, 0, 0))
    assert header_of(_png(10, 10, head)) is None
    assert header_of(_png(10, 10, _chunk(b"tEXt", b"k\0" + saved("RGB", "PDF")))) is None
    jpeg = saved("RGB", "JPEG")
    for marker in (b"\xff\xd0", b"\xff\xd8", b"\xff\xdc", b"\xff\xc8", b"\xff\xf0"):
        assert header_of(jpeg[:2] + marker + b"\x00\x04\x00\x00" + jpeg[2:]) is None


def test_what_follows_a_picture_is_not_scanned() -> None:
    content = saved("RGB", "JPEG", progressive=True)
    assert header_of(content + b"\xff\xda" * 1_000) == header_of(content)
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xda"  # an end that is none
    last = content.rindex(b"\xff\xda")
    assert header_of(content[:last] + comment + content[last:]) == header_of(content)
    unclear = content[:last] + b"\xff\x01" + content[last:]
    assert (header := header_of(unclear)) is not None and not header.ordinary


@pytest.mark.parametrize("file", [with_segments, with_chunks, lambda count: with_segments(3) + bytes(100 * count)])
def test_work_is_linear(file: Any) -> None:
    def work(count: int) -> int:
        stream = CountingStream(file(count))
        read_header(stream, "page")
        return stream.work

    assert work(9_000) <= 15 * work(900)


@settings(max_examples=150)
@given(st.sampled_from(sorted(SEEDS)), st.sampled_from(sorted(MUTATIONS)), st.integers(0, 2**32))
def test_a_damaged_file_has_a_header_none_or_one_error(kind: str, mutation: str, seed: int) -> None:
    content = mutated(SEEDS[kind](), mutation, Random(seed))
    try:
        header = header_of(content)
    except ImageError as error:
        assert str(error).startswith("page: ") and "\n" not in str(error)
        return
    if header is not None and header.ordinary:
        with suppress(OSError, SyntaxError, ValueError), Image.open(BytesIO(content)) as image:
            assert (image.format, image.size) == (header.format, (header.width, header.height))
