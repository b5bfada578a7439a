"""The kernel that cuts and resizes the views of a page: Pillow's bits, and pages that it leaves to the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.images.encoding import page
from tests.triton_here import DEVICE

from panscan.core import PanAndScan, View
from panscan.images.pixels import PixelSpec, resized_pil
from panscan.images.resize import Resize, by_kernel, by_pillow, by_torch, choose_resize
from panscan.images.resize_kernels import resized
from panscan.images.views import plan_views
from panscan.model.machine import limit_process_memory, release_memory

CROPS = PanAndScan(min_crop_size=2, max_num_crops=5)
SIZES = [(48, 144), (144, 48), (1, 90), (90, 1), (48, 48), (90, 60), (60, 90), (70, 73)]
SIZES += [(190, 420)]  # rows of several tiles


def check(levels: NDArray[np.uint8], views: list[View], size: int) -> None:
    pixels = resized(torch.from_numpy(levels).to(DEVICE), views, size).cpu().numpy()
    assert np.array_equal(pixels, resized_pil(Image.fromarray(levels), views, PixelSpec(size))), (levels.shape, size)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_views_equal_pillow_bit_for_bit(shape: tuple[int, int]) -> None:
    check(page(*shape), list(plan_views(*shape, CROPS).views), 48)
    check(page(*shape), [View("whole", (0, 0, *shape))], 16)


@settings(max_examples=10)
@given(st.data())
def test_any_box_equals_pillow_bit_for_bit(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    check(page(width, height), [View("crop", box)], data.draw(st.integers(1, 40)))


def test_pixels_of_the_kernel_are_those_of_the_host() -> None:
    """Also of a side that is too long for the kernel, which Pillow resizes."""
    spec = PixelSpec(32, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    for size in ((70, 130), (200_000, 1)):
        levels, views = page(*size), plan_views(*size, CROPS).views
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
        pixels = resize(levels, views, PixelSpec(), DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(pixels, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("resize", "on_host"), [(by_kernel, by_pillow), (by_torch, by_torch)])
def test_a_page_that_does_not_fit_into_gpu_memory_is_resized_on_the_host(resize: Resize, on_host: Resize) -> None:
    levels, views = page(6000, 5000), [View("whole", (0, 0, 6000, 5000))]  # 120 MB with padding
    expected = on_host(levels, views, PixelSpec(), torch.device("cpu"))
    release_memory()
    undo = limit_process_memory(DEVICE, torch.cuda.memory_reserved(DEVICE) + 80_000_000)
    try:
        pixels = resize(levels, views, PixelSpec(), DEVICE)
    finally:
        undo()
    assert pixels.device.type == DEVICE.type and torch.equal(pixels.cpu(), expected)
