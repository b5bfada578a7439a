import io
import re
import struct
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from benchmarks.robustness.bombs import _png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.images.encoding import encode, read

from panscan.core import ImageError
from panscan.images import decode, headers
from panscan.images.decode import count_pages, read_page
from panscan.images.headers import MAX_PIXELS


@pytest.mark.parametrize("pillows_limit", ["as it is", None, 1000])
def test_a_header_that_claims_too_many_pixels_is_refused(pillows_limit, monkeypatch):
    if pillows_limit != "as it is":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows_limit)
    before = Image.MAX_IMAGE_PIXELS
    for attempt in (count_pages, lambda content, name: read_page(content, None, name)):
        with pytest.raises(ImageError, match=r"^big\.png: too large"):
            attempt(io.BytesIO(_png(100_000, 100_000, data=b"")), "big.png")
    assert before == Image.MAX_IMAGE_PIXELS


def test_large_but_allowed_headers_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_pages(io.BytesIO(_png(10_000, MAX_PIXELS // 10_000, data=b"")), "file") == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty file"),
        (b"Dear reader,\nthis is no picture.", "not a PNG, JPEG, WebP, TIFF, GIF, BMP or PDF file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a PNG"),
        (encode(Image.new("RGB", (64, 64)), "PNG", compress_level=0)[:-999], "truncated or corrupt"),
        (encode(Image.new("RGB", (64, 64)), "BMP")[:-999], "truncated or corrupt"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(content, problem):
    with pytest.raises(ImageError, match=rf"\Afile: {problem}.*\Z") as caught:
        read(content)
    assert not re.search(" object at |OSError", str(caught.value))


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8))
SAMPLES = {
    "PNG": encode(PHOTO, "PNG", 6),
    "PNG palette": encode(PHOTO.quantize(7), "PNG", transparency=bytes([0, 9])),
    "JPEG": encode(PHOTO, "JPEG", 6),
    "JPEG progressive": encode(PHOTO.convert("CMYK"), "JPEG", progressive=True),
    "WEBP": encode(PHOTO, "WEBP", 6),
    "GIF": encode(PHOTO, "GIF"),
    "BMP": encode(PHOTO, "BMP"),
    "PDF": encode(PHOTO, "PDF"),
    "TIFF": encode(PHOTO, "TIFF", 6),
    "TIFF pages": encode(PHOTO, "TIFF", more=[PHOTO], compression="tiff_lzw"),
}


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=80)
@given(st.data())
def test_damaged_files_raise_image_errors_and_nothing_else(kind, data):
    sample = SAMPLES[kind]
    damaged = bytearray(sample[: data.draw(st.integers(1, len(sample)) | st.just(len(sample)), label="cut")])
    # Most flips go where headers lie.
    last = len(damaged) - 1
    for position in data.draw(st.lists(st.integers(0, min(200, last)) | st.integers(0, last), max_size=8)):
        damaged[position] ^= data.draw(st.integers(1, 255))
    read_quietly(bytes(damaged))


def read_quietly(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(headers, "MAX_PIXELS", 2**18)  # a flipped size would otherwise fill the memory first
        patch.setattr(decode, "PDF_MAX_SIDE", 512)
        for attempt in (count_pages, lambda stream, name: read_page(stream, 1, name)):
            try:
                attempt(io.BytesIO(content), "file")
            except ImageError as error:
                assert str(error).startswith("file: ")
                assert str(error).isprintable()
    assert not caught


class Gate(io.BytesIO):
    """A stream whose first read announces itself and waits."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.reached, self.open = threading.Event(), threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        self.reached.set()
        assert self.open.wait(30)
        return super().read(size)


def test_overlapping_readers_leave_the_warning_filters_as_they_were():
    before = list(warnings.filters)
    gates = [Gate(SAMPLES["PNG"]), Gate(SAMPLES["PNG"])]
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for gate in gates:
            futures.append(pool.submit(read_page, gate, None, "file"))
            assert gate.reached.wait(30)
        for gate, future in zip(gates, futures, strict=True):
            assert warnings.filters != before
            gate.open.set()
            future.result()
    assert warnings.filters == before


def test_nothing_is_printed_beside_the_error():
    # The tag of samples per pixel set to a number that Pillow complains about in its log.
    content = bytearray(encode(Image.new("RGB", (4, 4)), "TIFF"))
    entry = content.index(struct.pack("<HHI", 277, 3, 1))
    content[entry + 8 : entry + 10] = struct.pack("<H", 60_000)
    code = (
        "import io, sys\nfrom panscan.core import ImageError\nfrom panscan.images.decode import count_pages\n"
        "try: count_pages(io.BytesIO(sys.stdin.buffer.read()), 'file')\nexcept ImageError: sys.exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=bytes(content), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (9, b"", b"")


def test_libtiff_prints_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Its messages come from C, past Python's standard error."""
    levels = np.arange(12_000, dtype=np.uint8).reshape(100, 40, 3)
    whole = bytearray(encode(Image.fromarray(levels), "TIFF", compression="tiff_lzw"))
    whole[400:1200] = b"\xff" * 800
    with pytest.raises(ImageError, match="decoder error"):
        read(bytes(whole))
    assert capfd.readouterr() == ("", "")
