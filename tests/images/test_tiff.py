"""TIFFs with many pages: found in one pass, in either byte order, without end only as a number."""

import io
import struct

import numpy as np
import pytest
from tests.images.encoding import CountingStream

from panscan.core import ImageError
from panscan.images.decode import count_pages, read_page
from panscan.images.files import Page, expand_images, find_pages
from panscan.images.headers import find_directories

LAYOUTS = [("<", False), (">", False), ("<", True)]
"""Pillow reads no BigTIFF in Motorola's byte order."""


def chain(pages: int, order: str = "<", big: bool = False, last: int = 0) -> bytes:
    """A TIFF whose pages are 4 x 4 grey of level 1, 2, ...; ``last`` is the link of the last page (from 1) or 0."""
    word, half = order + ("Q" if big else "L"), order + ("Q" if big else "H")
    mark = b"II" if order == "<" else b"MM"
    out = bytearray(mark + (struct.pack(order + "HHH", 43, 8, 0) if big else struct.pack(order + "H", 42)))
    link, found = len(out), []
    out += struct.pack(word, 0)
    for page in range(1, pages + 1):
        strip = len(out)
        out += bytes([page % 256]) * 16
        found.append(len(out))
        struct.pack_into(word, out, link, len(out))
        tags = [(256, 4), (257, 4), (258, 8), (259, 1), (262, 1), (273, strip), (277, 1), (278, 4), (279, 16)]
        out += struct.pack(half, len(tags))
        for tag, value in tags:
            out += struct.pack(order + ("HHQQ" if big else "HHLL"), tag, 16 if big else 4, 1, value)
        link = len(out)
        out += struct.pack(word, found[last - 1] if last and page == pages else 0)
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


def test_the_directories_of_a_big_tiff_in_either_order_are_found():
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
