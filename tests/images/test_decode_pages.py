import io
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image
from tests.images.encoding import encode, pixels, read

from panscan.core import ImageError
from panscan.images import decode, headers
from panscan.images.decode import count_pages, read_page, upright_rgb


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


@pytest.mark.parametrize(
    ("width", "height"), [(144000, 144000), (1e6, 3), (1e30, 1e30), (100000, 0.001), (1, 1), (0, 0), (14400, 7200)]
)
def test_a_pdf_page_of_any_claimed_size_stays_bounded(width, height, monkeypatch):
    monkeypatch.setattr(decode, "PDF_MAX_SIDE", 1000)  # the same rule, less to draw
    image = read(pdf([f"/MediaBox[0 0 {width:f} {height:f}]"]))
    # pdfium rounds each side up, and takes Letter for a box without an area.
    assert 1 <= max(image.size) <= 1276


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pdf(["/MediaBox[0 0 9 9]"], trailer=ENCRYPTED), "encrypted PDF"),
        (pdf([]), "PDF without pages"),
        (b"%PDF-1.7\nrubbish", "truncated or corrupt PDF"),
        (pdf(["/MediaBox[0 0 9 9]"], trailer=ENCRYPTED.replace("Standard", "Unheard0")), "encrypted PDF"),
    ],
)
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


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(form):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    content = encode(frames[0], form, more=frames[1:], lossless=True)
    assert Image.open(io.BytesIO(content)).n_frames == 3
    assert count_pages(io.BytesIO(content), "file") == 1
    assert (pixels(read(content)) == (255, 0, 0)).all()


def test_the_limit_counts_for_every_page_and_pil_image(monkeypatch):
    monkeypatch.setattr(headers, "MAX_PIXELS", 100)
    content = tiff_pages(10, 11)
    assert read(content, 1).size == (10, 10)
    with pytest.raises(ImageError, match="too large: 11x11 pixels, the limit is 100"):
        read(content, 2)
    with pytest.raises(ImageError, match="too large"):
        upright_rgb(Image.new("L", (101, 1)), "x")
