"""Comparison of panscan's inputs with those of Transformers' processor: crop boxes, token ids, pixels.

The reference uses the same planner, prompt writer and preprocessor as the cells, so a comparison with it cannot detect
their faults. All of its requests are therefore also processed by the checkpoint's processor, once per reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from panscan.core import PanAndScan, Request
from panscan.core.errors import brief
from panscan.images.pixels import view_pixels
from panscan.images.views import ViewPlan
from panscan.model.checkpoint import Reader
from panscan.model.inputs import plan_request, read_images
from panscan.records.verdict_records import InputCheck

_DEVICE_LEVELS = 2.01  # of 255: Pillow resizes with 8-bit weights, a device in float32
_MOST_PIXELS = 64_000_000  # per image whose boxes are checked: the check takes four bytes per pixel


def check_inputs(reader: Reader, requests: Sequence[Request], device: torch.device | str | None = None) -> InputCheck:
    """Compare panscan's inputs with those of the checkpoint's processor.

    Pixels of the CPU preprocessor must be bit-identical to those of Transformers' Pillow backend; those of a device may
    differ by two of 255 levels.

    Args:
        reader: reader of the checkpoint.
        requests: requests to check.
        device: device whose preprocessor to check; None: the CPU preprocessor.
    """
    views, notes, difference = 0, [], None
    for request in requests:
        read = read_images(request)
        try:
            request_difference, count = _input_difference(reader, read, device)
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            notes.append(f"request {request.id}: the processor raised: {brief(error, 120)}")
            continue
        views += count
        if request_difference is not None:
            difference = f"request {request.id}, {request_difference}"
            break
    else:
        if any(reader.prompts.special_in(request) for request in requests if not request.raw):
            notes.append("token ids of prompts that contain special tokens differ on purpose and were not compared")
    return InputCheck(len(requests), views, difference, "; ".join(notes))


def _input_difference(reader: Reader, read: Request, device: torch.device | str | None) -> tuple[str | None, int]:
    """Return the first difference of one request, or None, and the number of compared views."""
    plans, prompt = plan_request(read, reader)
    settings, count = read.pan_and_scan, 0
    if reader.reads_images and read.images:
        assert reader.pixels is not None  # it reads images
        installed = reader.processor.image_processor  # torchvision's, where that is installed
        pillow = getattr(transformers, f"{type(installed).__name__.removesuffix('Pil')}Pil")
        processor = pillow.from_dict(installed.to_dict())
        for number, (image, plan) in enumerate(zip(read.images, plans, strict=True), start=1):
            count += len(plan.views)
            if (box_difference := _box_difference(processor, image, plan, settings)) is not None:
                return f"image {number}: {box_difference}", count
            expected = processor(image, return_tensors="pt", **settings.processor_kwargs())["pixel_values"]
            pixels = view_pixels(image, plan.views, reader.pixels, device or "cpu", on_device=device is not None).cpu()
            if expected.shape != pixels.shape:
                return f"image {number}: {len(pixels)} views instead of {len(expected)}", count
            levels = (pixels - expected).abs().amax((0, 2, 3)) * torch.tensor(reader.pixels.std) / reader.pixels.rescale
            if float(levels.max()) > (0.0 if device is None else _DEVICE_LEVELS):
                return f"image {number}: pixels differ by up to {float(levels.max()):.3g} of 255 levels", count
    if read.raw or reader.prompts.special_in(read) is None:
        return _id_difference(reader, read, prompt.ids), count
    return None, count


def _box_difference(processor: Any, image: Image.Image, plan: ViewPlan, settings: PanAndScan) -> str | None:
    width, height = image.size
    if not settings.enabled or width * height > _MOST_PIXELS:
        return None
    # The pixels are numbered row by row, so a crop's first and last ones tell its box.
    numbers = np.arange(width * height, dtype=np.int32).reshape(1, height, width)
    options = {name: value for name, value in settings.processor_kwargs().items() if name != "do_pan_and_scan"}
    corners = [(int(crop[0, 0, 0]), int(crop[0, -1, -1])) for crop in processor.pan_and_scan(numbers, **options)]
    expected = [(first % width, first // width, last % width + 1, last // width + 1) for first, last in corners]
    boxes = [view.box for view in plan.views[1:]]
    return None if boxes == expected else f"crop boxes {boxes} instead of {expected}"


def _id_difference(reader: Reader, read: Request, ids: Sequence[int]) -> str | None:
    if read.raw:
        assert read.prompt is not None  # Request holds this for raw prompts
        bos = reader.tokenizer.bos_token
        text = read.prompt if read.prompt.startswith(bos) else bos + read.prompt
    else:
        text = reader.prompts.render(read)
    if reader.reads_images and read.images:
        chosen = {"images": read.images, **read.pan_and_scan.processor_kwargs()}
        [expected] = reader.processor(text=text, add_special_tokens=False, **chosen)["input_ids"]
    else:
        expected = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = [int(token) for token in expected]
    if expected == list(ids):
        return None
    at = next((at for at, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), len(expected))
    return f"token ids differ at position {at}: {list(ids[at : at + 3])} instead of {expected[at : at + 3]}"
