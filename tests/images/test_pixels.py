"""A page's pixels: levels copied from Pillow's memory, resized as by Pillow, normalised as by Transformers."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.conftest import noise
from tests.forked_workers import program
from tests.images.encoding import page
from transformers import Gemma3ImageProcessorPil

from panscan.core import PanAndScan
from panscan.images.copying import copy_in_pieces
from panscan.images.page_levels import copy_levels
from panscan.images.pixels import PixelSpec, levels_of, levels_to_device, pixels_pil, pixels_torch
from panscan.images.resample import WEIGHT_BITS, columns_first, filter_weights, has_weights
from panscan.images.transfer import upload
from panscan.images.views import plan_views

# Pixels against Transformers' image processors.


SPEC = PixelSpec(size=112)
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 112, "width": 112}}
CHOSEN = PanAndScan(min_crop_size=16, max_num_crops=5, min_ratio_to_activate=1.5)  # none is the default
SIDES = st.integers(8, 400)


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_pil_backend_equals_transformers_bit_for_bit(width: int, height: int, seed: int) -> None:
    image = Image.fromarray(page(width, height, seed))
    expected = Gemma3ImageProcessorPil(**HALF)(image, return_tensors="pt", **CHOSEN.processor_kwargs())
    actual = pixels_pil(image, plan_views(width, height, CHOSEN).views, SPEC)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected["pixel_values"])


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_torch_backend_is_within_two_levels_of_pillow(width: int, height: int, seed: int) -> None:
    image = Image.fromarray(page(width, height, seed))
    views = plan_views(width, height, CHOSEN).views
    actual = pixels_torch(levels_to_device(levels_of(image), "cpu"), views, SPEC)
    expected = pixels_pil(image, views, SPEC)
    level = 2 / 255  # of the normalised range -1..1
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2 * level + 1e-6
    assert (actual - expected).abs().mean() <= 0.6 * level


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_backend_equals_transformers_torchvision_backend(device: str) -> None:
    from transformers import Gemma3ImageProcessor

    theirs_of = Gemma3ImageProcessor(**HALF)
    for seed, size in enumerate([(300, 90), (90, 300), (224, 224), (113, 400), (112, 112)]):
        image = Image.fromarray(page(*size, seed))
        expected = theirs_of(image, return_tensors="pt", device=device, **CHOSEN.processor_kwargs())["pixel_values"]
        actual = pixels_torch(levels_to_device(levels_of(image), device), plan_views(*size, CHOSEN).views, SPEC)
        level = 2 / 255
        # torchvision resizes uint8 on a CPU with integer weights of its own: a level of difference there.
        assert (actual - expected).abs().max() <= (level + 1e-6 if device == "cpu" else 1e-6)


# Copies of host arrays to a device.


SHAPES = [(), (0, 3), (3, 1_000_000), (1_000_003,), (5, 400_000), (900, 900, 4)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_threads_upload_at_once_and_reuse_their_arrays(device: str) -> None:
    def uploaded(seed: int) -> bool:
        array = np.random.default_rng(seed).integers(0, 256, SHAPES[seed % len(SHAPES)], np.uint8)
        array = np.asarray(array, np.uint8)
        tensor, before = upload(array, torch.device(device)), array.copy()
        array[...] = 0
        return np.array_equal(tensor.cpu().numpy(), before)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(uploaded, range(24)))


# Pillow's weights and order of axes as integers, against Pillow itself.


LENGTHS = st.integers(1, 300) | st.sampled_from([1, 2, 896])
SOURCES = st.integers(1, 40) | st.integers(1, 3000) | st.sampled_from([1, 2, 895, 896, 897, 1344, 2688, 40_000])
SMALL = st.integers(1, 150) | st.integers(1, 20)
TURNS = [(1, 400), (400, 1), (2, 401), (60, 72), (60, 73), (97, 146), (97, 147)]  # where Pillow's order of axes turns


def resized_by_pillow(levels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return what Pillow makes of an image, in one call."""
    return np.asarray(Image.fromarray(levels).resize((width, height), Image.Resampling.BILINEAR))


def filtered(levels: NDArray[np.uint8], size: int, axis: int) -> NDArray[np.uint8]:
    """Return ``levels [height, width]`` with one axis resized_by_pillow, by integers alone."""
    weights = filter_weights(levels.shape[axis], size)
    source = levels.T if axis == 0 else levels
    taps = source[:, weights[:, :1] + np.arange(weights.shape[1] - 1)].astype(np.int32)
    total = np.einsum("rst,st->rs", taps, weights[:, 1:], dtype=np.int32) + (1 << (WEIGHT_BITS - 1))
    resized = (total >> WEIGHT_BITS).clip(0, 255).astype(np.uint8)
    return resized.T if axis == 0 else resized


@settings(max_examples=120)
@given(st.lists(st.tuples(SOURCES, LENGTHS), min_size=25, max_size=25), st.integers(0, 2**32 - 1))
def test_one_axis_equals_pillow_bit_for_bit(cases: list[tuple[int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for length, size in cases:
        if not has_weights(length, size):
            continue
        levels = draw.integers(0, 256, (2, length), np.uint8)
        levels[1] = np.where(levels[1] < 128, 0, 255)  # black and white, where sums are largest
        assert np.array_equal(filtered(levels, size, 1), resized_by_pillow(levels, size, 2)), (length, size)


@settings(max_examples=60)
@given(st.lists(st.tuples(SMALL, SMALL, st.integers(1, 60)), min_size=10, max_size=10), st.integers(0, 2**32 - 1))
@example([(width, height, 48) for width, height in TURNS], 0)
def test_both_axes_equal_pillow_bit_for_bit(cases: list[tuple[int, int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for width, height, size in cases:
        levels = draw.integers(0, 256, (height, width), np.uint8)
        first = 0 if columns_first(width, height, size) else 1
        resized = filtered(filtered(levels, size, first), size, 1 - first)
        assert np.array_equal(resized, resized_by_pillow(levels, size, size)), (width, height, size)


# Copies of an image's levels from Pillow's memory, against Pillow's own packing.


def check_copy(image: Image.Image) -> None:
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
    check_copy(image)
    check_copy(image.crop((data.draw(st.integers(0, right - 1)), data.draw(st.integers(0, bottom - 1)), right, bottom)))


@pytest.mark.parametrize("size", [(3000, 3001), (4_000_001, 2), (5, 3_200_000)])
def test_pages_of_several_blocks_of_pillows_memory(size: tuple[int, int]) -> None:
    check_copy(noise(50, 61).resize(size, Image.Resampling.NEAREST))


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
    check_copy(apart)
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
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)  # ends it if it hangs
            code = int(copy_levels(image, alone=True)[1] != expected)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
