"""Views as pixels: resized by kernels, weights and PyTorch as by Pillow, and normalised as by Transformers."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.triton_here import DEVICE
from transformers import Gemma3ImageProcessorPil

from panscan.core import PanAndScan, View
from panscan.images.pixels import PixelSpec, levels_of, levels_to_device, pixels_pil, pixels_torch, resized_pil
from panscan.images.resample import WEIGHT_BITS, columns_first, filter_weights, has_weights
from panscan.images.resize import Resize, by_kernel, by_pillow, by_torch, choose_resize
from panscan.images.resize_kernels import resized
from panscan.images.transfer import upload
from panscan.images.views import plan_views
from panscan.model.machine import limit_process_memory, release_memory

CROPS = PanAndScan(min_crop_size=2, max_num_crops=5)
SIZES = [(48, 144), (144, 48), (1, 90), (90, 1), (48, 48), (90, 60), (60, 90), (70, 73)]


def page(width: int, height: int, seed: int | None = None) -> NDArray[np.uint8]:
    """Return random levels with large flat areas, as documents have."""
    draw = np.random.default_rng(width * height if seed is None else seed)
    levels = draw.integers(0, 256, (height, width, 3), np.uint8)
    levels[draw.random((height, width)) < 0.5] = 255
    return levels


def check(levels: NDArray[np.uint8], views: list[View], size: int) -> None:
    found = resized(torch.from_numpy(levels).to(DEVICE), views, size).cpu().numpy()
    assert np.array_equal(found, resized_pil(Image.fromarray(levels), views, PixelSpec(size))), (levels.shape, size)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_views_equal_pillow_bit_for_bit(shape: tuple[int, int]) -> None:
    check(page(*shape), list(plan_views(*shape, CROPS).views), 48)


@pytest.mark.parametrize("shape", [(190, 420), (200, 17)], ids=str)
def test_rows_of_several_tiles_equal_pillow(shape: tuple[int, int]) -> None:
    check(page(*shape), [View("whole", (0, 0, *shape))], 16)


@settings(max_examples=10)
@given(st.data())
def test_any_box_equals_pillow_bit_for_bit(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    check(page(width, height), [View("crop", box)], data.draw(st.integers(1, 40)))


def test_pixels_of_the_kernel_are_those_of_the_host() -> None:
    spec = PixelSpec(32, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    levels, views = page(70, 130), plan_views(70, 130, CROPS).views
    assert torch.equal(by_kernel(levels, views, spec, DEVICE), by_pillow(levels, views, spec, DEVICE))


def test_a_side_that_is_too_long_for_the_kernel_is_resized_by_pillow() -> None:
    levels, views = page(200_000, 1), [View("whole", (0, 0, 200_000, 1))]
    spec = PixelSpec(16)
    assert torch.equal(by_kernel(levels, views, spec, DEVICE), by_pillow(levels, views, spec, DEVICE))


def test_the_host_resizes_where_the_device_is_no_gpu() -> None:
    resize, how = choose_resize("cpu", PixelSpec(32), torch.device("cpu"))
    assert resize is by_pillow
    assert "Pillow on the host (not on an NVIDIA GPU)" in how


@pytest.mark.gpu
def test_a_gpu_equals_pillow_on_pages_of_hundreds_of_sizes() -> None:
    resize, _ = choose_resize("cpu", PixelSpec(), DEVICE)
    assert resize is by_kernel
    draw = np.random.default_rng(0)
    sides = [1, 2, 895, 896, 897, 1240, 1344, 1754, 1792, 2480, 2688, 3508]
    for number in range(200):
        width, height = (int(draw.choice(sides)) if number % 2 else int(draw.integers(1, 2000)) for _ in range(2))
        check(page(width, height), list(plan_views(width, height, PanAndScan()).views), 896)
    for _ in range(300):
        width, height, size = (int(draw.integers(1, most)) for most in (400, 400, 100))
        check(page(width, height), list(plan_views(width, height, CROPS).views), size)


@pytest.mark.gpu
@pytest.mark.parametrize("resize", [by_kernel, by_torch])
def test_the_host_does_not_wait_for_a_gpu_that_resizes(resize: Resize) -> None:
    levels, views = page(900, 1300), [View("whole", (0, 0, 900, 1300)), View("crop", (0, 0, 896, 650))]
    expected = resize(levels, views, PixelSpec(), DEVICE)  # compiles, and fills caches
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = resize(levels, views, PixelSpec(), DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("resize", "on_host"), [(by_kernel, by_pillow), (by_torch, by_torch)])
def test_a_page_that_does_not_fit_into_gpu_memory_is_resized_on_the_host(resize: Resize, on_host: Resize) -> None:
    levels, views = page(6000, 5000), [View("whole", (0, 0, 6000, 5000))]  # 120 MB with padding
    expected = on_host(levels, views, PixelSpec(), torch.device("cpu"))
    release_memory()
    undo = limit_process_memory(DEVICE, torch.cuda.memory_reserved(DEVICE) + 80_000_000)
    try:
        found = resize(levels, views, PixelSpec(), DEVICE)
    finally:
        undo()
    assert found.device.type == DEVICE.type and torch.equal(found.cpu(), expected)


# Pixels against Transformers' image processors.


SPEC = PixelSpec(size=112)
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 112, "width": 112}}
CHOSEN = PanAndScan(min_crop_size=16, max_num_crops=5, min_ratio_to_activate=1.5)  # none is the default
SIDES = st.integers(8, 400)


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_pil_backend_equals_transformers_bit_for_bit(width: int, height: int, seed: int) -> None:
    image = Image.fromarray(page(width, height, seed))
    theirs = Gemma3ImageProcessorPil(**HALF)(image, return_tensors="pt", **CHOSEN.processor_kwargs())
    ours = pixels_pil(image, plan_views(width, height, CHOSEN).views, SPEC)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs["pixel_values"])


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_torch_backend_is_within_two_levels_of_pillow(width: int, height: int, seed: int) -> None:
    image = Image.fromarray(page(width, height, seed))
    views = plan_views(width, height, CHOSEN).views
    ours = pixels_torch(levels_to_device(levels_of(image), "cpu"), views, SPEC)
    theirs = pixels_pil(image, views, SPEC)
    level = 2 / 255  # of the normalised range -1..1
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 2 * level + 1e-6
    assert (ours - theirs).abs().mean() <= 0.6 * level


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_backend_equals_transformers_torchvision_backend(device: str) -> None:
    from transformers import Gemma3ImageProcessor

    theirs_of = Gemma3ImageProcessor(**HALF)
    for seed, size in enumerate([(300, 90), (90, 300), (224, 224), (113, 400), (112, 112)]):
        image = Image.fromarray(page(*size, seed))
        theirs = theirs_of(image, return_tensors="pt", device=device, **CHOSEN.processor_kwargs())["pixel_values"]
        ours = pixels_torch(levels_to_device(levels_of(image), device), plan_views(*size, CHOSEN).views, SPEC)
        level = 2 / 255
        # torchvision resizes uint8 on a CPU with integer weights of its own: a level of difference there.
        assert (ours - theirs).abs().max() <= (level + 1e-6 if device == "cpu" else 1e-6)


# Copies of host arrays to a device.


SHAPES = [(), (0, 3), (3, 1_000_000), (1_000_003,), (5, 400_000), (900, 900, 4)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_threads_upload_at_once_and_reuse_their_arrays(device: str) -> None:
    def uploaded(seed: int) -> bool:
        array = np.random.default_rng(seed).integers(0, 256, SHAPES[seed % len(SHAPES)], np.uint8)
        array = np.asarray(array, np.uint8)
        found, before = upload(array, torch.device(device)), array.copy()
        array[...] = 0
        return np.array_equal(found.cpu().numpy(), before)

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
    found = (total >> WEIGHT_BITS).clip(0, 255).astype(np.uint8)
    return found.T if axis == 0 else found


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
        found = filtered(filtered(levels, size, first), size, 1 - first)
        assert np.array_equal(found, resized_by_pillow(levels, size, size)), (width, height, size)
