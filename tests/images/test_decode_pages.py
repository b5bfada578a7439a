"""Pages of PDF and TIFF files, and damaged files: one error that names the file, nothing printed beside it."""

import io
import re
import struct
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from benchmarks.robustness.bombs import _png
from benchmarks.robustness.mutate import MUTATIONS, mutated
from benchmarks.robustness.seeds import SEEDS
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.images.encoding import CountingStream, encode, pixels, read

from panscan.core import ImageError
from panscan.images import decode, headers
from panscan.images.decode import count_pages, read_page, upright_rgb
from panscan.images.files import Page, expand_images, find_pages
from panscan.images.headers import MAX_PIXELS, find_directories


def pdf(pages: list[str], objects: tuple[str, ...] = (), catalog: str = "", trailer: str = "") -> bytes:
    """A PDF by hand: ``pages`` are the entries of the page dictionaries; more objects are numbered from 3 + pages."""
    kids = " ".join(f"{3 + index} 0 R" for index in range(len(pages)))
    bodies = [
        f"<</Type/Catalog/Pages 2 0 R{catalog}>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        *(f"<</Type/Page/Parent 2 0 R{entries}>>" for entries in pages),
        *objects,
    ]
    out, offsets = b"%PDF-1.7\n", []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    head = f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n{table}trailer\n"
    return out + f"{head}<</Size {len(bodies) + 1}/Root 1 0 R{trailer}>>\nstartxref\n{len(out)}\n%%EOF\n".encode()


def stream(content: str, entries: str = "") -> str:
    return f"<</Length {len(content)}{entries}>>\nstream\n{content}\nendstream"


RED_LEFT_BLUE_RIGHT = stream("1 0 0 rg 0 0 72 72 re f 0 0 1 rg 72 0 72 72 re f")
ENCRYPTED = f"/ID[<00><00>]/Encrypt<</Filter/Standard/V 1/R 2/O<{'ab' * 32}>/U<{'cd' * 32}>/P -4>>"


def test_pdf_pages_are_drawn_at_150_dpi_and_turned():
    box = "/MediaBox[0 0 144 72]"
    content = pdf([box + "/Contents 5 0 R", box + "/Rotate 90/Contents 5 0 R"], (RED_LEFT_BLUE_RIGHT,))
    assert count_pages(io.BytesIO(content), "file") == 2
    first, second = pixels(read(content, 1)), pixels(read(content, 2))
    assert (first.shape, second.shape) == ((150, 300, 3), (300, 150, 3))
    assert (first[75, 10].tolist(), first[75, 290].tolist()) == ([255, 0, 0], [0, 0, 255])
    assert (second[10, 75].tolist(), second[290, 75].tolist()) == ([255, 0, 0], [0, 0, 255])


def test_filled_form_fields_are_drawn():
    field = (
        "<</Type/Annot/Subtype/Widget/FT/Tx/T(total)/V(9)/F 4/Rect[0 0 72 72]/P 3 0 R/AP<</N 5 0 R>>"
        "/MK<<>>/DA(/Helv 12 Tf 0 g)>>"
    )
    look = stream("0 0.5 0 rg 0 0 72 72 re f", "/Type/XObject/Subtype/Form/BBox[0 0 72 72]")
    content = pdf(["/MediaBox[0 0 72 72]/Annots[4 0 R]"], (field, look), "/AcroForm<</Fields[4 0 R]>>")
    assert pixels(read(content))[75, 75].tolist() != [255, 255, 255]


CLAIMED_SIZES = [(144000, 144000), (1e6, 3), (1e30, 1e30), (100000, 0.001), (1, 1), (0, 0), (14400, 7200)]


@pytest.mark.parametrize(("width", "height"), CLAIMED_SIZES)
def test_a_pdf_page_of_any_claimed_size_stays_bounded(width, height, monkeypatch):
    monkeypatch.setattr(decode, "PDF_MAX_SIDE", 1000)  # the same rule, less to draw
    image = read(pdf([f"/MediaBox[0 0 {width:f} {height:f}]"]))
    # pdfium rounds each side up, and takes Letter for a box without an area.
    assert 1 <= max(image.size) <= 1276


WRONG_PDFS = [
    (pdf(["/MediaBox[0 0 9 9]"], trailer=ENCRYPTED), "encrypted PDF"),
    (pdf([]), "PDF without pages"),
    (b"%PDF-1.7\nrubbish", "truncated or corrupt PDF"),
    (pdf(["/MediaBox[0 0 9 9]"], trailer=ENCRYPTED.replace("Standard", "Unheard0")), "encrypted PDF"),
]


@pytest.mark.parametrize(("content", "problem"), WRONG_PDFS)
def test_what_is_wrong_with_a_pdf_is_said_whatever_was_wrong_before(content, problem):
    for earlier in (b"%PDF-1.7\nrubbish", pdf([], trailer=ENCRYPTED)):
        with pytest.raises(ImageError):
            read(earlier)
        with pytest.raises(ImageError, match=f"^file: {problem}"):
            count_pages(io.BytesIO(content), "file")


def test_pdf_support_is_loaded_for_pdfs_only(monkeypatch):
    code = "import sys, panscan.images.files; sys.exit('pypdfium2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    assert read(encode(Image.new("L", (2, 3)), "PNG")).size == (2, 3)
    with pytest.raises(ImageError, match=r"^file: PDF files need the package pypdfium2"):
        read(pdf(["/MediaBox[0 0 9 9]"]))


class Probe(io.BytesIO):
    """Notes whether pdfium was locked whenever it read."""

    def readinto(self, buffer: Any, /) -> int:
        self.locked = [*getattr(self, "locked", []), decode._PDFIUM.locked()]
        return super().readinto(buffer)


def test_pdfium_works_under_its_lock_only():
    probe = Probe(pdf(["/MediaBox[0 0 144 72]/Contents 4 0 R"], (RED_LEFT_BLUE_RIGHT,)))
    assert read_page(probe, None, "file").size == (300, 150)
    assert set(probe.locked) == {True}
    assert not decode._PDFIUM.locked()


def tiff_pages(*sizes: int, **options: object) -> bytes:
    first, *rest = (Image.new("L", (side, side), side) for side in sizes)
    return encode(first, "TIFF", more=rest, **options)


def test_pages_of_a_compressed_tiff_are_chosen() -> None:
    scan = tiff_pages(5, 7, 9, compression="tiff_lzw")
    assert [int(pixels(read(scan, page)).mean()) for page in (1, 2, 3)] == [5, 7, 9]


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_animation_is_its_first_frame(form):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    content = encode(frames[0], form, more=frames[1:], lossless=True)
    assert Image.open(io.BytesIO(content)).n_frames == 3
    assert count_pages(io.BytesIO(content), "file") == 1
    assert np.abs(pixels(read(content)).astype(int) - (255, 0, 0)).max() <= (form == "AVIF")  # which rounds


def test_the_limit_counts_for_every_page_and_pil_image(monkeypatch):
    monkeypatch.setattr(headers, "MAX_PIXELS", 100)
    content = tiff_pages(10, 11)
    assert read(content, 1).size == (10, 10)
    with pytest.raises(ImageError, match="too large: 11x11 pixels, the limit is 100"):
        read(content, 2)
    with pytest.raises(ImageError, match="too large"):
        upright_rgb(Image.new("L", (101, 1)), "x")


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


WRONG_IMAGES = [
    (b"", "empty file"),
    (b"Dear reader,\nthis is no picture.", "not a PNG, JPEG, WebP, AVIF, TIFF, GIF, BMP or PDF file"),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "HEIC images are not supported: convert it to JPEG"),
    (encode(Image.new("RGB", (64, 64)), "AVIF")[:-9], "truncated or corrupt"),
    (encode(Image.new("RGB", (64, 64)), "JPEG2000"), "JPEG 2000 images are not supported"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL images are not supported"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a PNG"),
    (encode(Image.new("RGB", (64, 64)), "PNG", compress_level=0)[:-999], "truncated or corrupt"),
    (encode(Image.new("RGB", (64, 64)), "BMP")[:-999], "truncated or corrupt"),
]


@pytest.mark.parametrize(("content", "problem"), WRONG_IMAGES)
def test_what_is_wrong_is_said_in_one_line(content, problem):
    with pytest.raises(ImageError, match=rf"\Afile: {problem}.*\Z") as caught:
        read(content)
    assert not re.search(" object at |OSError", str(caught.value))


@settings(max_examples=600)
@given(st.sampled_from(sorted(SEEDS)), st.sampled_from(sorted(MUTATIONS)), st.integers(0, 2**32))
def test_damaged_files_raise_image_errors_and_nothing_else(kind: str, mutation: str, seed: int) -> None:
    """Where a header is read without a decoder, it is that of Pillow."""
    content, result = mutated(SEEDS[kind](), mutation, Random(seed)), None
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(headers, "MAX_PIXELS", 2**18)  # a flipped size would otherwise fill the memory first
        patch.setattr(decode, "PDF_MAX_SIDE", 512)
        for attempt in (count_pages, lambda stream, name: read_page(stream, 1, name), headers.read_header):
            try:
                result = attempt(io.BytesIO(content), "file")
            except ImageError as error:
                assert str(error).startswith("file: ")
                assert str(error).isprintable()
    assert not caught
    if isinstance(result, headers.ImageHeader) and result.ordinary:
        with suppress(OSError, SyntaxError, ValueError), Image.open(io.BytesIO(content)) as image:
            assert (image.format, image.size) == (result.format, (result.width, result.height))


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
    gates = [Gate(SEEDS["png"]()), Gate(SEEDS["png"]())]
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
    content = bytearray(encode(Image.fromarray(levels), "TIFF", compression="tiff_lzw"))
    content[400:1200] = b"\xff" * 800
    with pytest.raises(ImageError, match="decoder error"):
        read(bytes(content))
    assert capfd.readouterr() == ("", "")


# TIFFs with many pages: found in one pass, in either byte order, without end only as a number.


LAYOUTS = [("<", False), (">", False), ("<", True)]
"""Pillow reads no BigTIFF in Motorola's byte order."""


def chain(pages: int, order: str = "<", big: bool = False, last: int = 0) -> bytes:
    """A TIFF whose pages are 4 x 4 grey of level 1, 2, ...; ``last`` is the link of the last page (from 1) or 0."""
    word, half = order + ("Q" if big else "L"), order + ("Q" if big else "H")
    mark = b"II" if order == "<" else b"MM"
    out = bytearray(mark + (struct.pack(order + "HHH", 43, 8, 0) if big else struct.pack(order + "H", 42)))
    link, offsets = len(out), []
    out += struct.pack(word, 0)
    for page in range(1, pages + 1):
        strip = len(out)
        out += bytes([page % 256]) * 16
        offsets.append(len(out))
        struct.pack_into(word, out, link, len(out))
        tags = [(256, 4), (257, 4), (258, 8), (259, 1), (262, 1), (273, strip), (277, 1), (278, 4), (279, 16)]
        out += struct.pack(half, len(tags))
        for tag, value in tags:
            out += struct.pack(order + ("HHQQ" if big else "HHLL"), tag, 16 if big else 4, 1, value)
        link = len(out)
        out += struct.pack(word, offsets[last - 1] if last and page == pages else 0)
    return bytes(out)


def count(content: bytes, most: int = 100_000) -> int:
    return count_pages(io.BytesIO(content), "file", most)


@pytest.mark.parametrize(("order", "big"), LAYOUTS)
def test_every_page_is_found_and_read(order, big):
    content = chain(300, order, big)
    assert count(content) == 300
    for page in (1, 2, 255, 299):
        assert (np.asarray(read_page(io.BytesIO(content), page, "file")) == page % 256).all()
    with pytest.raises(ImageError, match="no page 301; the file has 300"):
        read_page(io.BytesIO(content), 301, "file")
    assert len(find_directories(io.BytesIO(chain(7, ">", big=True)), 100)) == 7


def test_work_grows_with_the_pages_and_not_with_their_square(tmp_path):
    spent = {}
    for pages in (500, 4000):
        stream = CountingStream(chain(pages))
        assert count_pages(stream, "file", 10_000) == pages
        for page in range(1, pages + 1, pages // 10):
            stream.seek(0)
            read_page(stream, page, "file")
        spent[pages] = stream.work
    assert spent[4000] < 16 * spent[500]  # a walk from the start for each page costs 64 times as much


def test_a_circle_of_pages_ends(tmp_path):
    assert count(chain(5, last=1)) == 5
    assert count(chain(5, last=5)) == 5
    assert (np.asarray(read_page(io.BytesIO(chain(5, last=3)), 5, "file")) == 5).all()


def test_a_page_outside_the_file_is_damage_and_the_ones_before_it_can_be_read():
    content = bytearray(chain(3))
    struct.pack_into("<L", content, len(content) - 4, 2**31)
    with pytest.raises(ImageError, match=r"^file: truncated or corrupt \(the directory of page 4 lies outside"):
        count(bytes(content))
    assert (np.asarray(read_page(io.BytesIO(bytes(content)), 3, "file")) == 3).all()


def test_a_replaced_file_is_counted_again(tmp_path):
    place = tmp_path / "scan.tif"
    for pages in (3, 5):
        place.write_bytes(chain(pages))
        assert len(expand_images([place])) == pages


def test_documents_with_too_many_pages_are_refused_by_name(tmp_path):
    place = tmp_path / "long.tif"
    place.write_bytes(chain(1001))
    refused = r"long.tif: has more than 1000 pages: raise --max-pages, or choose one with #page=1 to #page=1000$"
    with pytest.raises(ImageError, match=refused):
        expand_images([place])
    with pytest.raises(ImageError, match="image 1 of 1: has more than 1000 pages: raise --max-pages"):
        expand_images([place.read_bytes()])
    with pytest.raises(ImageError, match="page 1001 is beyond the first 1000: raise --max-pages"):
        expand_images([f"{place}#page=1001"])
    assert expand_images([f"{place}#page=1000"]) == [Page(str(place), 1000)]
    assert len(expand_images([place], max_pages=1001)) == 1001
    problems: list[str] = []
    assert find_pages([place], on_problem=lambda error: problems.append(str(error)), max_pages=7) == []
    assert "has more than 7 pages" in problems[0]
