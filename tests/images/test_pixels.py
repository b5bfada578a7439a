"""Pixels against Transformers' image processors."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Gemma3ImageProcessorPil

from panscan.core import PanAndScan
from panscan.images.pixels import PixelSpec, levels_of, levels_to_device, pixels_pil, pixels_torch
from panscan.images.views import plan_views

SPEC = PixelSpec(size=112)
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 112, "width": 112}}
CHOSEN = PanAndScan(min_crop_size=16, max_num_crops=5, min_ratio_to_activate=1.5)  # none is the default
SIDES = st.integers(8, 400)


def noise(width: int, height: int, seed: int) -> Image.Image:
    """Random levels with large flat areas, as documents have."""
    draw = np.random.default_rng(seed)
    levels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    levels[draw.random((height, width)) < 0.5] = 255
    return Image.fromarray(levels)


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_pil_backend_equals_transformers_bit_for_bit(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed)
    theirs = Gemma3ImageProcessorPil(**HALF)(image, return_tensors="pt", **CHOSEN.processor_kwargs())
    ours = pixels_pil(image, plan_views(width, height, CHOSEN).views, SPEC)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs["pixel_values"])


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_torch_backend_is_within_two_levels_of_pillow(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed)
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
        image = noise(*size, seed)
        theirs = theirs_of(image, return_tensors="pt", device=device, **CHOSEN.processor_kwargs())["pixel_values"]
        ours = pixels_torch(levels_to_device(levels_of(image), device), plan_views(*size, CHOSEN).views, SPEC)
        level = 2 / 255
        # torchvision resizes uint8 on a CPU with integer weights of its own: a level of difference there.
        assert (ours - theirs).abs().max() <= (level + 1e-6 if device == "cpu" else 1e-6)
