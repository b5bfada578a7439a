"""What cuts and resizes the views of a page: Pillow on the host, a kernel with Pillow's bits, or PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from panscan.core import View
from panscan.images.pixels import PixelSpec, levels_to_device, normalised, pixels_pil, pixels_torch, resized_pil
from panscan.images.resample import has_weights
from panscan.images.transfer import upload

log = logging.getLogger(__name__)

Resize = Callable[[NDArray[np.uint8], Sequence[View], PixelSpec, torch.device], torch.Tensor]
"""A page's levels ``[height, width, 3]``, or 4 with padding, and its views to normalised pixels on a device, float32
``[views, 3, size, size]``."""

_MOST_BYTES = 1 << 27  # of a page's levels without padding; as many again hold its rows at the width of a view


def by_pillow(levels: NDArray[np.uint8], views: Sequence[View], spec: PixelSpec, device: torch.device) -> torch.Tensor:
    """Resize on the host (see :data:`Resize`)."""
    height, width, channels = levels.shape
    image = Image.frombytes("RGB", (width, height), levels.data, "raw", "RGB" if channels == 3 else "RGBX")
    return pixels_pil(image, views, spec, device)


def by_torch(levels: NDArray[np.uint8], views: Sequence[View], spec: PixelSpec, device: torch.device) -> torch.Tensor:
    """Resize on the device as torchvision does, which rounds differently; on the host if the device has too little
    memory (see :data:`Resize`)."""
    with suppress(torch.OutOfMemoryError):  # a page of 100 million pixels takes 2 GB
        return pixels_torch(levels_to_device(levels, device), views, spec)
    return pixels_torch(levels_to_device(levels, "cpu"), views, spec).to(device)


def by_kernel(levels: NDArray[np.uint8], views: Sequence[View], spec: PixelSpec, device: torch.device) -> torch.Tensor:
    """Resize on the device with Pillow's bits; on the host if the page is too large or the device has too little memory
    (see :data:`Resize`)."""
    if not _fits(levels, views, spec.size):
        return by_pillow(levels, views, spec, device)
    from panscan.images.resize_kernels import resized

    with suppress(torch.OutOfMemoryError):  # several pages at once beside a full KV cache
        return normalised(resized(upload(levels, device)[..., :3].contiguous(), views, spec.size), spec)
    return by_pillow(levels, views, spec, device)


def choose_resize(preprocess: str, spec: PixelSpec, device: torch.device) -> tuple[Resize, str]:
    """Return what resizes views, and its name and reason for the log.

    Args:
        preprocess: the setting: ``cpu`` for Pillow's rounding, wherever it is computed; ``device`` for torchvision's.
        spec: pixel settings of the checkpoint.
        device: where the pixels are needed.
    """
    if preprocess == "device":
        return by_torch, "PyTorch, rounded as by torchvision (--preprocess device)"
    reason = _refusal(spec, device)
    if reason is not None:
        return by_pillow, f"Pillow on the host ({reason})"
    return by_kernel, "a kernel, bit-identical to Pillow (compared at startup)"


def _refusal(spec: PixelSpec, device: torch.device) -> str | None:
    """Return why the kernel cannot replace Pillow; None if it can, and is compiled."""
    if device.type != "cuda":
        return "not on an NVIDIA GPU"
    if spec.resample != Image.Resampling.BILINEAR:
        return "the checkpoint's filter is not bilinear"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        equal = _equals_pillow(spec, device)
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernel
    except Exception as error:  # Triton and its compilers may raise anything; Pillow does the same on the host
        log.debug("the resize kernel failed: %s: %s", type(error).__name__, error)
        return f"the kernel failed: {type(error).__name__}"
    return None if equal else "the installed Pillow rounds differently"


def _equals_pillow(spec: PixelSpec, device: torch.device) -> bool:
    """Return whether the kernel's result is Pillow's on a page whose views need either order of axes, larger and
    smaller."""
    width, height = 3 * spec.size // 2, 5 * spec.size // 2 + 1
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    boxes = [
        (0, 0, width, height),
        (0, 0, width, spec.size),
        (1, 2, 1 + spec.size // 2, 2 + spec.size // 3),
        (0, 0, 7, height),
        (0, 0, width, 7),
    ]
    views = [View("crop", box) for box in boxes]
    expected = normalised(upload(resized_pil(Image.fromarray(levels), views, spec), device), spec)
    return torch.equal(by_kernel(levels, views, spec, device), expected)


def _fits(levels: NDArray[np.uint8], views: Sequence[View], size: int) -> bool:
    sides = {side for view in views for side in view.size}
    height, width, _ = levels.shape
    return 3 * height * width <= _MOST_BYTES and all(has_weights(side, size) for side in sides)
