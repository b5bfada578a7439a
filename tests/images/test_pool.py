"""Pages opened by child processes: the same pixels, limits that end one page only."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest
from benchmarks.robustness.bombs import _page, pdf_doubling_forms
from PIL import Image
from tests.conftest import until
from tests.images.encoding import encode

from panscan.core import ImageError
from panscan.core.deadline import Deadline
from panscan.images import decode, pool
from panscan.images.headers import ImageHeader
from panscan.images.page_levels import copy_levels

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of the Linux kernel")


@pytest.fixture(autouse=True)
def in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children decode cheap images too, as in a server."""
    monkeypatch.setattr(pool, "_inline", False)


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[pool.DecodingPool]:
    """A pool of one child, with the limits of the test."""
    limited = pool.DecodingPool(1, **getattr(request, "param", {}))
    monkeypatch.setattr(pool, "_DOCUMENTS", limited)
    yield limited
    limited.close()


def picture(seed: int, size: tuple[int, int] = (120, 90), mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(levels).convert(mode)


FILES = {
    "png": (encode(picture(0), "PNG"), None),
    "transparent": (encode(picture(0, mode="RGBA"), "PNG"), None),
    "jpeg": (encode(picture(0), "JPEG"), None),
    "rotated": (encode(picture(1), "JPEG", 6), None),
    "webp": (encode(picture(0), "WEBP"), None),
    "avif": (encode(picture(0), "AVIF"), None),
    "gif": (encode(picture(0), "GIF"), None),
    "pdf": (encode(picture(0), "PDF", more=[picture(1), picture(2)]), 2),
    "tiff": (encode(picture(0), "TIFF", more=[picture(1), picture(2)]), 3),
}


def check_read(kind: str) -> None:
    """Compare a page that a child reads with one that this process reads."""
    content, page = FILES[kind]
    assert pool.read_page(BytesIO(content), page, "page") == decode.read_page(BytesIO(content), page, "page")


@pytest.mark.parametrize("kind", FILES)
def test_a_child_reads_what_this_process_would(kind: str, tmp_path: Path) -> None:
    content, page = FILES[kind]
    expected = decode.read_page(BytesIO(content), page, "page")
    levels, digest = copy_levels(expected)
    decoded = pool.read_pixels(BytesIO(content), page, "page")
    assert isinstance(decoded, pool.PageLevels)
    assert (decoded.size, decoded.digest) == (expected.size, digest)
    assert np.array_equal(decoded.levels, levels)
    assert pool.read_page(BytesIO(content), page, "page") == expected
    (tmp_path / "page").write_bytes(content)
    with (tmp_path / "page").open("rb") as stream:
        assert pool.read_page(stream, page, "page") == expected
    assert pool.page_size(BytesIO(content), page, "page") == decode.page_size(BytesIO(content), page, "page")
    count = pool.count_pages(BytesIO(content), "page")
    assert count == decode.count_pages(BytesIO(content), "page")
    sizes = pool.page_sizes(BytesIO(content), "page")
    assert sizes == [decode.page_size(BytesIO(content), number, "page") for number in range(1, count + 1)]


def test_pixels_stay_while_other_pages_are_decoded_by_many_threads() -> None:
    """Files of pixels are reused, but not before their array is dropped."""
    pages = [picture(seed, (300 + seed, 200)) for seed in range(30)]
    contents = [encode(page, "PNG") for page in pages]

    def levels(number: int) -> np.ndarray:
        decoded = pool.read_pixels(BytesIO(contents[number % 30]), None, "page")
        assert isinstance(decoded, pool.PageLevels)
        return decoded.levels if number % 3 else decoded.levels[10:, 20:]

    with ThreadPoolExecutor(4) as threads:
        arrays = list(threads.map(levels, range(30)))
        for _ in threads.map(levels, range(60)):
            pass
    for number, array in enumerate(arrays):
        expected = np.asarray(pages[number])
        assert np.array_equal(array[..., :3], expected if number % 3 else expected[10:, 20:])


def test_files_of_pixels_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of alternating sizes evict each other's files, here and in the child."""
    contents = [encode(Image.new("RGB", size), "PNG") for size in ((3900, 3900), (1500, 1500))]

    def read() -> int:
        for content in contents:
            pool.read_pixels(BytesIO(content), None, "page")
        return psutil.Process().num_fds()

    with contextlib.closing(pool.DecodingPool(1)) as one:
        monkeypatch.setattr(pool, "_CHEAP", one)
        first = read()
        assert max(read() for _ in range(2)) <= first + 2


def test_a_size_that_contradicts_the_header_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a picture was judged by its header."""
    monkeypatch.setattr(pool, "read_header", lambda *_: ImageHeader("PNG", 9, 9, True))
    for inline in (True, False):
        monkeypatch.setattr(pool, "_inline", inline)
        for content in (FILES["png"][0], FILES["pdf"][0]):
            with pytest.raises(ImageError, match=r"^page: its headers contradict each other"):
                pool.read_page(BytesIO(content), None, "page")


def slow_pdf() -> bytes:
    """A page that takes minutes: a stroke per operator, over the whole page."""
    return _page(contents=b"0 0 m 600 800 l 0 800 m 600 0 l S " * 2_000_000, filters=1)


TOO_MUCH = r"bomb\.pdf: .*(crashed or needed more than 0\.2 GB|not enough memory)"
EXCEEDED = [
    ({"memory": 200_000_000, "watch": False}, lambda: pdf_doubling_forms(Random(0)), TOO_MUCH),
    ({"memory": 200_000_000, "watch": True}, lambda: pdf_doubling_forms(Random(0)), TOO_MUCH),
    ({"seconds": 1.0}, slow_pdf, r"bomb\.pdf: opening it took longer than 1 s$"),
]


@pytest.mark.parametrize(("documents", "file", "message"), EXCEEDED, indirect=["documents"])
@pytest.mark.usefixtures("documents")
def test_a_page_that_exceeds_a_limit_is_one_error(file: Callable[[], bytes], message: str) -> None:
    with pytest.raises(ImageError, match=f"^{message}"):
        pool.read_page(BytesIO(file()), None, "bomb.pdf")
    check_read("pdf")


def test_an_abandoned_page_ends_its_child(documents: pool.DecodingPool) -> None:
    deadline, waiting = Deadline(), Deadline()
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(pool.read_page, BytesIO(slow_pdf()), None, "slow.pdf", deadline=deadline)
        until(lambda: documents._children)
        [child] = documents._children
        behind = threads.submit(pool.page_size, BytesIO(FILES["pdf"][0]), 1, "page", deadline=waiting)
        waiting.abandon()
        with pytest.raises(TimeoutError):
            behind.result(60)
        assert not slow.done()
        deadline.abandon()
        with pytest.raises(TimeoutError):
            slow.result(60)
    assert not psutil.pid_exists(child.pid)
    check_read("pdf")


def test_a_child_that_is_killed_while_idle_fails_no_page(documents: pool.DecodingPool) -> None:
    for _ in range(3):
        check_read("tiff")
        [child] = documents._children
        psutil.Process(child.pid).kill()
        until(partial(child.readable, 1))  # its connection has ended; the process may still have threads


def test_a_child_that_is_killed_fails_its_page_only(documents: pool.DecodingPool) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.read_page, BytesIO(slow_pdf()), None, "slow.pdf")
        until(lambda: documents._children)
        [child] = documents._children
        psutil.Process(child.pid).kill()
        with pytest.raises(ImageError, match=r"^slow\.pdf: the decoder crashed .*SIGKILL"):
            slow.result(60)
    check_read("tiff")


def test_a_child_has_no_credentials(monkeypatch: pytest.MonkeyPatch, documents: pool.DecodingPool) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    pool.page_size(BytesIO(FILES["pdf"][0]), 1, "page")
    [child] = documents._children
    assert b"secret-of-the-test" not in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_a_forked_process_starts_children_of_its_own() -> None:
    content, page = FILES["pdf"]
    expected = pool.read_page(BytesIO(content), page, "page")
    before = {child.pid for child in pool._DOCUMENTS._children}
    pid = os.fork()
    if pid == 0:
        same = pool.read_page(BytesIO(content), page, "page") == expected
        os._exit(0 if same and not before & {child.pid for child in pool._DOCUMENTS._children} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.read_page(BytesIO(content), page, "page") == expected


def test_errors_of_a_child_are_those_of_this_process() -> None:
    content = FILES["tiff"][0]
    damages = [(damaged, None) for damaged in (content[:60], b"%PDF-1.4 nothing", b"junk")]
    for damaged, page in (*damages, (content, 9), (content, None)):
        with pytest.raises(ImageError) as expected:
            decode.read_page(BytesIO(damaged), page, "page")
        with pytest.raises(ImageError) as raised:
            pool.read_page(BytesIO(damaged), page, "page")
        assert str(raised.value) == str(expected.value)
