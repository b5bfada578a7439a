"""Copies of an image's levels from Pillow's memory, against Pillow's own packing."""

import os
import select
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import noise
from tests.forked_workers import program

from panscan.images.copying import copy_in_pieces
from panscan.images.page_levels import copy_levels


def check(image: Image.Image) -> None:
    levels, digest = copy_levels(image)
    assert levels.dtype == np.uint8 and levels.flags.c_contiguous
    assert np.array_equal(levels[..., :3], np.asarray(image))
    assert not levels[..., 3].any()
    by_threads = copy_levels(image, alone=True)
    assert np.array_equal(by_threads[0], levels) and by_threads[1] == digest


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["RGBA", "L", "P", "CMYK", "RGB"]), st.data())
@settings(max_examples=100)
def test_levels_are_those_that_pillow_packs(width: int, height: int, mode: str, data: st.DataObject) -> None:
    """The fourth byte in Pillow's memory depends on the mode that an image was converted from."""
    image = noise(width, height).convert(mode).convert("RGB")
    right, bottom = data.draw(st.integers(1, width)), data.draw(st.integers(1, height))
    check(image)
    check(image.crop((data.draw(st.integers(0, right - 1)), data.draw(st.integers(0, bottom - 1)), right, bottom)))


@pytest.mark.parametrize("size", [(3000, 3001), (4_000_001, 2), (5, 3_200_000)])
def test_pages_of_several_blocks_of_pillows_memory(size: tuple[int, int]) -> None:
    check(noise(50, 61).resize(size, Image.Resampling.NEAREST))


def test_pixels_that_pillow_cannot_share() -> None:
    """With gaps between the rows in Pillow's memory. The digest is the same."""
    image = noise(61, 40).convert("RGBA").convert("RGB")
    before = Image.core.get_alignment()
    Image.core.set_alignment(64)
    try:
        apart = image.copy()
    finally:
        Image.core.set_alignment(before)
    with pytest.raises(ValueError, match="contiguous"):
        apart.__arrow_c_array__()
    check(apart)
    assert copy_levels(apart)[1] == copy_levels(image)[1]


def test_digests_differ_with_the_size_and_every_pixel() -> None:
    picture = noise(40, 30)
    pages = [picture, noise(40, 30, 1), picture.crop((0, 0, 40, 29))]
    pages += [Image.new("RGB", size) for size in ((2, 3), (3, 2))]
    large = noise(50, 40).resize((1000, 900))  # hashed by several threads
    for at in (None, (0, 0), (999, 0), (0, 449), (999, 899)):
        pages.append(large.copy())
        if at is not None:
            red, *others = large.getpixel(at)
            pages[-1].putpixel(at, (red ^ 1, *others))
    assert len({copy_levels(page)[1] for page in pages}) == len(pages)
    assert [copy_levels(page.copy())[1] for page in pages] == [copy_levels(page)[1] for page in pages]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_hashes_like_its_parent() -> None:
    """It has none of its parent's threads, and must not wait for them."""
    image = noise(1000, 900)
    expected = copy_levels(image, alone=True)[1]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, copy_levels(image, alone=True)[1])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        try:
            assert select.select([stream], [], [], 20)[0], "the child hangs"
            assert stream.read() == expected
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Copies in pieces: every row once, by whatever threads, also in a process whose main thread has ended.


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8, 9, 1000, 1001])
def test_the_pieces_are_all_rows_once_in_order(rows: int) -> None:
    pieces: list[slice] = []
    copy_in_pieces(pieces.append, rows)
    covered = [row for piece in sorted(pieces, key=lambda piece: piece.start) for row in range(rows)[piece]]
    assert covered == list(range(rows))


def test_callers_copy_themselves_while_another_has_the_threads() -> None:
    """All rows are copied when the call returns, and no call waits for another."""
    started, finish = Event(), Event()

    def block(_: slice) -> None:
        started.set()
        assert finish.wait(60)

    with ThreadPoolExecutor(1) as others:
        blocked = others.submit(copy_in_pieces, block, 100)
        assert started.wait(60)
        source, to = np.arange(100), np.zeros(100, int)
        copy_in_pieces(lambda rows: np.copyto(to[rows], source[rows]), 100)
        assert np.array_equal(to, source)
        assert not blocked.done()
        finish.set()
        blocked.result(60)


def test_an_error_is_raised_after_all_pieces_and_the_threads_are_free_again() -> None:
    done: list[int] = []

    def fail(rows: slice) -> None:
        done.append(rows.start or 0)
        raise ValueError("bad piece")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad piece"):
            copy_in_pieces(fail, 1000)
    assert len(done) == 2 * len(set(done))


def test_threads_that_outlive_the_main_thread_still_copy() -> None:
    """Python closes all thread pools when the main thread ends."""
    code = """
import threading
from panscan.images.copying import copy_in_pieces
def late():
    threading.main_thread().join()
    found = []
    copy_in_pieces(lambda rows: found.extend(range(100)[rows]), 100)
    print(sorted(found) == list(range(100)), flush=True)
copy_in_pieces(lambda rows: None, 100)
threading.Thread(target=late).start()
"""
    finished = subprocess.run(program(code), capture_output=True, text=True, timeout=120)
    assert (finished.stdout, finished.returncode) == ("True\n", 0), finished.stderr[-2000:]
