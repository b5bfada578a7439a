import contextlib
import gc
import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from tests.images.encoding import encode

from panscan.core import ImageError
from panscan.images.files import Page, expand_images, find_pages, open_image, page_digest


def draw(path: Path, *sides: int) -> Path:
    """A file with one square grey page per side, each as grey as it is wide."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = (Image.new("L", (side, side), side) for side in sides)
    several = {"resolution": 150, "save_all": True, "append_images": rest}
    first.save(path, **several) if rest or path.suffix == ".pdf" else first.save(path, "PNG")
    return path


def find(*patterns: str | Path) -> tuple[list[str], list[str]]:
    problems: list[ImageError] = []
    pages = find_pages(patterns, on_problem=problems.append)
    return [page.name for page in pages], [str(problem) for problem in problems]


def test_every_kind_of_pattern(folder):
    for name in ("one.png", "docs/2.png", "docs/10.PNG", "docs/deep/3.png", "docs/.hidden.png", "docs/.git/4.png"):
        draw(folder / name, 5)
    draw(folder / "docs/Eggs.png/5.png", 5)
    draw(folder / "docs/many.tiff", 5, 6)
    draw(folder / "docs/many.pdf", 5, 6, 7)
    (folder / "docs/notes.txt").write_text("no picture")
    pdf = [f"docs/many.pdf#page={number}" for number in (1, 2, 3)]
    tiff = [f"docs/many.tiff#page={number}" for number in (1, 2)]
    top = ["docs/2.png", "docs/10.PNG"]
    assert find("one.png") == (["one.png"], [])
    assert find(folder / "one.png") == ([str(folder / "one.png")], [])
    assert find("docs") == find("docs/") == ([*top, "docs/deep/3.png", "docs/Eggs.png/5.png", *pdf, *tiff], [])
    assert find("docs/*") == ([*top, *pdf, *tiff], [])
    assert find("**/*.png") == (["docs/2.png", "docs/deep/3.png", "docs/Eggs.png/5.png", "one.png"], [])
    assert find("docs/many.pdf#page=2", "docs/many.tiff#page=1") == ([pdf[1], tiff[0]], [])
    assert find("docs/many.*#page=2") == ([pdf[1], tiff[1]], [])
    assert find("one.png#page=1") == (["one.png"], [])
    assert find() == ([], [])


def test_a_file_named_outright_is_tried_by_content(folder):
    draw(folder / "scan", 5)
    draw(folder / "page_1.dat", 5)
    (folder / "page_2.dat").write_text("no picture")
    (folder / "empty.png").touch()
    names, problems = find("scan", "page_*.dat", "*", "empty.png")
    assert names == ["scan", "page_1.dat"]
    assert [problem.split(":")[0] for problem in problems] == ["page_2.dat", "empty.png"]
    assert problems[1] == "empty.png: empty file"


def test_names_with_special_characters_are_taken_literally_if_they_exist(folder):
    for name in ("a[1].png", "a1.png", "x#page=2.png", "b*.png", "bb.png"):
        draw(folder / name, 5)
    draw(folder / "y.pdf", 5, 6)
    draw(folder / "y.pdf#page=2", 8)
    draw(folder / "[d]/e.png", 5)
    assert find("a[1].png") == (["a[1].png"], [])
    assert find("b*.png") == (["b*.png"], [])
    assert find("[d]") == (["[d]/e.png"], [])
    assert find("x#page=2.png") == (["x#page=2.png"], [])
    assert find("y.pdf#page=2") == (["y.pdf#page=2"], [])
    assert open_image("y.pdf#page=2").size == (8, 8)
    assert find("y.pdf#page=1") == (["y.pdf#page=1"], [])
    (folder / "a[1].png").unlink()
    assert find("a[1].png") == (["a1.png"], [])


@settings(max_examples=25)
@given(st.sets(st.integers(0, 10**9), min_size=1, max_size=6), st.data())
def test_directories_and_globs_come_in_natural_order(tmp_path_factory, numbers, data):
    folder = tmp_path_factory.mktemp("order")
    for number in data.draw(st.permutations(sorted(numbers))):
        draw(folder / f"Page {number}.png", 1)
    expected = [str(folder / f"Page {number}.png") for number in sorted(numbers)]
    assert find(folder) == find(f"{folder}/*.png") == (expected, [])


SPELLINGS = {
    "a.png": ["a.png"],
    "./a.png": ["a.png"],
    "docs/../a.png": ["a.png"],
    "link.png": ["a.png"],
    "docs/m.pdf": ["docs/m.pdf#page=1", "docs/m.pdf#page=2"],
    "docs/m.pdf#page=2": ["docs/m.pdf#page=2"],
    "docs": ["docs/m.pdf#page=1", "docs/m.pdf#page=2"],
    "**/m.*": ["docs/m.pdf#page=1", "docs/m.pdf#page=2"],
}


@settings(max_examples=60)
@given(patterns=st.lists(st.sampled_from(sorted(SPELLINGS)), max_size=6))
def test_each_page_comes_once_where_it_was_first_named(tmp_path_factory, patterns):
    folder = tmp_path_factory.getbasetemp() / "once"
    if not folder.exists():
        draw(folder / "a.png", 5)
        draw(folder / "docs/m.pdf", 5, 6)
        (folder / "link.png").symlink_to("a.png")
    names, problems = find(*(folder / pattern for pattern in patterns))
    expected = list(dict.fromkeys(name for pattern in patterns for name in SPELLINGS[pattern]))
    assert problems == []
    pages = [f"{os.path.realpath(name.partition('#')[0])}{''.join(name.partition('#')[1:])}" for name in names]
    assert pages == [f"{os.path.realpath(folder)}/{name}" for name in expected]


def test_a_page_keeps_the_name_that_it_had_first(folder):
    draw(folder / "a.png", 5)
    assert find("./a.png", folder / "a.png", "a.png", "*.png") == (["./a.png"], [])


def test_each_problem_is_one_line_and_the_rest_goes_on(folder):
    draw(folder / "good.png", 5)
    draw(folder / "m.pdf", 5, 6)
    (folder / "empty").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad/torn.png").write_bytes(b"\x89PNG\r\n\x1a\nxx")
    (folder / "bad/gone.png").symlink_to("nowhere.png")
    for name in ("photo.HEIC", "photo.hif"):
        (folder / "bad" / name).write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    names, problems = find(
        *("missing.png", "missing.png", "empty", "empty", "none*.png", "bad", "./bad/torn.png#page=1", "bad/*.png"),
        *("loop.png", "pipe.png", "m.pdf#page=3", "m.pdf#page=0", "m.pdf#page=two", "", "nul\0.png", "x" * 300),
        "data:image/png;base64," + "A" * 9_000,
        "good.png",
    )
    assert names == ["good.png"]
    assert problems == [
        "missing.png: no such file or directory",
        "empty: no image or PDF file in this directory",
        "none*.png: no image or PDF file matches",
        "bad/gone.png: broken link to nowhere.png",
        "bad/photo.HEIC: HEIC images are not supported: convert it to JPEG or PNG",
        "bad/photo.hif: HEIC images are not supported: convert it to JPEG or PNG",
        "bad/torn.png: not a PNG, JPEG, WebP, AVIF, TIFF, GIF, BMP or PDF file, or its header is damaged",
        "loop.png: too many levels of symbolic links",
        "pipe.png: not a regular file",
        "m.pdf: no page 3; the file has 2, counted from 1",
        "m.pdf: no page 0; the file has 2, counted from 1",
        "m.pdf#page=two: no such file or directory",
        "'': an empty path names no image",
        "nul\\x00.png: not a path (embedded null byte)",
        "x" * 300 + ": file name too long",
        "'data:image/png;base64,AAAAA...AAAAAAAAAAAAAAAAAAAAAAAAAAAA': a data: URL is no path:"
        " decode it, and give its bytes",
    ]


@pytest.mark.parametrize("also", [0, 1])
def test_a_subdirectory_that_cannot_be_listed_is_one_line(folder, also):
    for number in range(also):
        draw(folder / f"top/{number}.png", 5)
    (folder / "top").mkdir(exist_ok=True)
    with contextlib.chdir(folder / "top"):
        for _ in range(20):  # deeper than any path can say, which stops root too
            Path("d" * 250).mkdir()
            os.chdir("d" * 250)
    names, problems = find("top")
    assert names == [f"top/{number}.png" for number in range(also)]
    (problem,) = problems
    assert problem.startswith("top/ddd")
    assert problem.endswith("d" * 100 + ": file name too long")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_one_line_each(folder):
    draw(folder / "docs/good.png", 5)
    draw(folder / "docs/secret.png", 5).chmod(0)
    draw(folder / "docs/closed/a.png", 5).parent.chmod(0)
    draw(folder / "shut/a.png", 5).parent.chmod(0)
    (folder / "into.png").symlink_to("shut/b.png")
    denied = ["docs/closed", "docs/secret.png", "shut", "shut/a.png", "into.png"]
    try:
        listing = find("docs", "shut", "shut/a.png", "into.png")
        assert listing == (["docs/good.png"], [f"{name}: permission denied" for name in denied])
    finally:
        (folder / "docs/closed").chmod(0o700)
        (folder / "shut").chmod(0o700)


def grey(image: Image.Image) -> int:
    """The grey of an image of :func:`draw`, after checking that all of it is that."""
    (value,) = set(np.asarray(image).ravel().tolist())
    assert (image.mode, image.size) == ("RGB", (value, value))
    return value


def test_what_is_found_is_what_loads(folder):
    draw(folder / "a.png", 30)
    draw(folder / "b.pdf", 40, 50)
    draw(folder / "c.tif", 60, 70)
    pages = find_pages(["."], on_problem=pytest.fail)
    assert pages == [Page("a.png"), Page("b.pdf", 1), Page("b.pdf", 2), Page("c.tif", 1), Page("c.tif", 2)]
    assert [grey(open_image(page)) for page in pages] == [30, 40, 50, 60, 70]
    digests = [page_digest(page) for page in pages]
    assert digests[0] == hashlib.sha256((folder / "a.png").read_bytes()).hexdigest()
    assert digests[2] == hashlib.sha256((folder / "b.pdf").read_bytes()).hexdigest() + "#page=2"
    assert len(set(digests)) == 5


def test_every_handle_is_closed(folder):
    draw(folder / "a.png", 5)
    draw(folder / "b.pdf", 5, 6)
    draw(folder / "c.tif", 5, 6)
    (folder / "d.png").write_bytes((folder / "a.png").read_bytes()[:-30])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for page in find_pages([folder], on_problem=pytest.fail):
            page_digest(page)
            if page.source.endswith("d.png"):
                with pytest.raises(ImageError, match=r"d\.png: truncated or corrupt \("):
                    open_image(page)
            else:
                open_image(page)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


UNUSABLE = [
    *((f"b.{end}", rf"^b\.{end}: has 2 pages; add #page=1 to #page=2") for end in ("tif", "pdf")),
    ("b.tif#page=3", r"^b\.tif#page=3: no page 3"),
    (Page("gone.png", None), r"^gone\.png: no such file"),
    (".", r"^\.: a directory$"),
    (b"rubbish", "^image bytes: not a PNG"),
    (Image.new("RGB", (0, 3)), "^PIL image: no pixels"),
    ([7], "^image: not a path, URL, page, PIL image, bytes, array or tensor but list$"),
]


@pytest.mark.parametrize(("image", "problem"), UNUSABLE)
def test_open_image_says_what_it_cannot_use(folder, image, problem):
    for name in ("b.tif", "b.pdf"):
        draw(folder / name, 5, 6)
    with pytest.raises(ImageError, match=problem):
        open_image(image)
    if isinstance(image, Page):
        with pytest.raises(ImageError, match=problem):
            page_digest(image)


def test_the_images_of_a_request_keep_their_order_and_number(folder):
    draw(folder / "a.png", 5)
    draw(folder / "b.tif", 5, 6)
    picture, page = Image.new("L", (3, 3)), Page("elsewhere.png")
    assert expand_images(["b.tif", picture, folder / "a.png", page, "b.tif#page=2", "a.png", "a.png"]) == [
        *(Page("b.tif", 1), Page("b.tif", 2), picture, Page(str(folder / "a.png")), page),
        *(Page("b.tif", 2), Page("a.png"), Page("a.png")),
    ]


@pytest.mark.parametrize("bad", ["gone.png", "b.tif#page=3", "*.tif", ".", 7])
def test_a_request_stops_at_its_first_bad_image(folder, bad):
    draw(folder / "b.tif", 5, 6)
    problem = "^image 2 of 3: .* but int$" if bad == 7 else f"^{bad.partition('#')[0]}: ".replace("*", r"\*")
    with pytest.raises(ImageError, match=problem):
        expand_images(["b.tif", bad, "also gone.png"])


# Images of a request that are no paths: bytes of files, arrays, tensors. The same picture, whatever it comes in.


Levels = np.ndarray[Any, np.dtype[np.uint8]]
sides = st.integers(1, 9)
colours = st.tuples(sides, sides, st.just(3))
levels = (colours | st.tuples(sides, sides)).flatmap(lambda shape: arrays.arrays(np.uint8, shape))


def opened(images: list[Any]) -> list[Levels]:
    """As a request's images are read."""
    pictures = [open_image(image) for image in expand_images(images)]
    assert all(image.mode == "RGB" for image in pictures)
    return [np.asarray(image) for image in pictures]


@given(levels, st.booleans())
def test_a_picture_is_the_same_in_every_form(values: Levels, turned: bool) -> None:
    """Views that lie otherwise in memory, too."""
    values = values[::-1, ::2] if turned else values
    picture = Image.fromarray(values)
    expected = np.asarray(picture.convert("RGB"))
    forms = [picture, encode(picture, "PNG"), values, torch.from_numpy(values.copy())]
    for actual in opened(forms):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.asarray(open_image(values)), expected)


def test_an_image_of_an_array_is_a_copy() -> None:
    values = np.full((4, 5, 3), 7, np.uint8)
    [image] = expand_images([values])
    values[:] = 9
    assert set(np.asarray(image).ravel().tolist()) == {7}


UNUSABLE_IN_MEMORY = [
    (b"rubbish", "not a PNG, "),
    (b"", "empty file"),
    (lambda: encode(Image.new("L", (90, 90)), "PNG")[:-30], "truncated or corrupt"),
    (np.zeros((4, 5, 3)), "an array must be uint8, levels from 0 to 255, got float64$"),
    (np.zeros((4, 5), bool), "an array must be uint8, .*, got bool$"),
    (torch.zeros(4, 5, 3), "an array must be uint8, .*, got float32$"),
    (torch.zeros(3, 4, 5, dtype=torch.uint8), r"\[height, width\], got \[3, 4, 5\]: move its channels last$"),
    (np.zeros((4, 5, 4), np.uint8), r"an array must be \[height, width, 3\] or .*, got \[4, 5, 4\]$"),
    (np.zeros((1, 4, 5, 3), np.uint8), r"got \[1, 4, 5, 3\]$"),
    (np.zeros((5,), np.uint8), r"got \[5\]$"),
    (np.zeros((0, 5, 3), np.uint8), "no pixels: its size is 5x0$"),
    (torch.zeros(4, 5, 3, dtype=torch.uint8, device="meta"), "no array can be made of it .*Tensor.cpu"),
]


@pytest.mark.parametrize(("bad", "problem"), UNUSABLE_IN_MEMORY)
def test_what_cannot_be_used_is_named_by_its_place(bad: Any, problem: str) -> None:
    bad = bad() if callable(bad) else bad
    with pytest.raises(ImageError, match=rf"\A(?=image 2 of 3: .*{problem}).*\Z"):  # one line
        for image in expand_images([np.zeros((3, 3, 3), np.uint8), bad, np.zeros((4, 4), np.uint8)]):
            open_image(image)


def test_arrays_are_read_without_torch() -> None:
    code = (
        "import sys, numpy; from panscan.images.files import expand_images;"
        "expand_images([numpy.zeros((4, 5, 3), numpy.uint8)]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
