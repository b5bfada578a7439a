"""Views become normalised pixels, as Transformers' Gemma 3 image processors compute them.

Two backends, one per processor of Transformers. ``pil`` resizes with Pillow on the CPU and equals
``Gemma3ImageProcessorPil`` bit for bit. ``torch`` resizes on the image's device, in float32 and rounded to whole
levels, as the torchvision processor does; Pillow resizes with 8-bit weights, so the two may differ by one or two of
255 levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from panscan.core import View
from panscan.core.model_names import VIEW_SIDE
from panscan.images.transfer import upload


@dataclass(frozen=True, slots=True)
class PixelSpec:
    """What a checkpoint's image processor does: side in pixels, scale of a level, mean and deviation per channel, and
    Pillow's number of the filter, bilinear or bicubic."""

    size: int = VIEW_SIDE
    rescale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = Image.Resampling.BILINEAR


def view_pixels(
    image: Image.Image, views: Sequence[View], spec: PixelSpec, device: torch.device | str, *, on_device: bool
) -> torch.Tensor:
    """Return normalised pixels of an RGB image's views, float32 ``[views, 3, size, size]``, on ``device``.

    Args:
        image: in mode RGB.
        views: boxes in its pixels.
        spec: what the checkpoint's image processor does.
        device: device of the result.
        on_device: cut and resize on ``device`` (:func:`pixels_torch`) instead of on the CPU (:func:`pixels_pil`).
    """
    if on_device:
        return pixels_torch(levels_to_device(levels_of(image), device), views, spec)
    return pixels_pil(image, views, spec, device)


def pixels_pil(
    image: Image.Image, views: Sequence[View], spec: PixelSpec, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return normalised pixels of an RGB image's views, float32 ``[views, 3, size, size]``, on ``device``.

    Views are resized on the CPU, copied to ``device`` as uint8, a quarter of the bytes of float32, and normalised
    there. Each view is cropped before it is resized, as in Transformers: otherwise, the filter would read beyond its
    edges.
    """
    return normalised(upload(resized_pil(image, views, spec), torch.device(device)), spec)


def resized_pil(image: Image.Image, views: Sequence[View], spec: PixelSpec) -> NDArray[np.uint8]:
    """Return the views of an RGB image, cut and resized by Pillow: uint8 ``[views, size, size, 3]``."""
    square = (spec.size, spec.size)
    cut = (image if view.kind == "whole" else image.crop(view.box) for view in views)
    return np.stack([np.asarray(part.resize(square, Image.Resampling(spec.resample))) for part in cut])


def normalised(levels: torch.Tensor, spec: PixelSpec) -> torch.Tensor:
    """Return float32 ``[views, 3, size, size]`` of uint8 levels ``[views, size, size, 3]``.

    Uses a table of the 256 levels, computed on the host: Transformers scales in float64, which some devices lack.
    """
    scaled = (np.arange(256) * spec.rescale).astype(np.float32)[:, None]
    mean, std = (np.array(value, dtype=np.float32) for value in (spec.mean, spec.std))
    table = upload((scaled - mean) / std, levels.device)
    planes = levels.permute(3, 0, 1, 2)
    pixels = torch.empty(planes.shape, dtype=torch.float32, device=levels.device)
    for channel, plane in enumerate(planes):
        pixels[channel] = table[:, channel].index_select(0, plane.flatten().int()).view(plane.shape)
    return pixels.transpose(0, 1).contiguous()


def levels_of(image: Image.Image) -> NDArray[np.uint8]:
    """Levels ``[height, width, 3]`` of an RGB image, copied once; read-only."""
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)


def levels_to_device(levels: NDArray[np.uint8], device: torch.device | str) -> torch.Tensor:
    """Levels ``[height, width, 3]``, or 4 with padding, as ``[3, height, width]`` on ``device``: a third of the bytes
    of float32 over the link, or less."""
    return upload(levels, torch.device(device))[..., :3].contiguous().permute(2, 0, 1)


def pixels_torch(image: torch.Tensor, views: Sequence[View], spec: PixelSpec) -> torch.Tensor:
    """Normalised pixels of views, float32 ``[views, 3, size, size]``, on the device of ``image``.

    Args:
        image: uint8 ``[3, height, width]``.
        views: boxes in pixels of ``image``.
        spec: size, scale, mean and deviation of the checkpoint.
    """
    square = (spec.size, spec.size)
    resized = torch.empty((len(views), 3, *square), dtype=torch.float32, device=image.device)
    source = image.to(torch.float32)
    for index, view in enumerate(views):
        left, top, right, bottom = view.box
        part = source[None, :, top:bottom, left:right]
        if part.shape[-2:] != square:
            part = functional.interpolate(part, size=square, mode=_MODES[spec.resample], antialias=True)
        resized[index] = part[0]
    mean, std = _scale(spec, image.device)
    return resized.round_().clamp_(0, 255).sub_(mean).div_(std)


_MODES: dict[int, str] = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}
"""The filters that PyTorch has, too, by Pillow's number."""


@cache
def _scale(spec: PixelSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation in levels, float32 ``[3, 1, 1]``, fused with the scale as in Transformers.

    Divided on the device, which may round differently than the host. Cached, because copying them to a GPU waits for
    all work on the stream.
    """
    values = (torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (spec.mean, spec.std))
    mean, std = (tensor.div_(spec.rescale)[:, None, None] for tensor in values)
    if device.type == "cuda":  # before another stream uses them
        torch.cuda.current_stream(device).synchronize()
    return mean, std
