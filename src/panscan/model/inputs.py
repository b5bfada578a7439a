"""A batch of requests becomes the tensors that ``generate()`` takes: pixels, ids, masks, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from panscan.core import Request, Result
from panscan.images.files import RequestImage, expand_images, image_size, open_image
from panscan.images.headers import Size
from panscan.images.pixels import view_pixels
from panscan.images.views import ViewPlan, plan_views, view_settings
from panscan.model.checkpoint import Loaded, Reader
from panscan.model.prompt import Prompt


@dataclass(slots=True)
class Prepared:
    """One request's part of a batch: plans of its images, ids of its prompt, pixels ``[views, 3, size, size]``."""

    request: Request
    plans: list[ViewPlan]
    prompt: Prompt
    pixels: torch.Tensor | None

    @property
    def views(self) -> int:
        return sum(len(plan.views) for plan in self.plans)

    def result(self, **answer: Any) -> Result:
        """Return the request's result, with these fields of its answer."""
        return Result(id=self.request.id, **self.counts(), **answer)

    def counts(self) -> dict[str, Any]:
        """Return the fields of the request's result that do not depend on its answer, except its id."""
        return {
            "views": self.views,
            "crops": sum(plan.crops for plan in self.plans),
            "pages": tuple((plan.width, plan.height) for plan in self.plans),
            "image_tokens": self.prompt.image_tokens,
            "prompt_tokens": len(self.prompt.ids),
        }


def read_images(request: Request, *, copy: bool = True) -> Request:
    """Return a request with decoded images (RGB, upright); a file of several pages gives several images.

    Without ``copy``, an image that is already decoded may be the caller's own object: do not use it after the public
    call (such as ``VllmRunner.answer``) has returned.

    Raises:
        ImageError: naming the file.
    """
    return replace(request, images=[open_image(image, copy=copy) for image in images_of(request)])


def images_of(request: Request) -> list[RequestImage]:
    """A request's images, those in files not decoded yet; a file of several pages gives several images.

    Raises:
        ImageError: naming the file.
    """
    return expand_images(request.images, max_pages=request.max_pages)


def count_views(request: Request) -> int:
    """Views of a request, found by decoding its images."""
    sizes = [image.size for image in read_images(request).images]
    return sum(len(plan.views) for plan in plan_images(request, sizes))


def prepare(read: Request, reader: Reader, device: torch.device, dtype: torch.dtype, *, on_device: bool) -> Prepared:
    """Plan the views, write the prompt and compute the pixels of one request.

    Args:
        read: the request, with decoded images.
        reader: of the checkpoint.
        device: where pixels go.
        dtype: what pixels become, after normalisation in float32.
        on_device: cut and resize on ``device`` instead of with Pillow on the CPU.
    """
    plans, prompt = plan_request(read, reader)
    if not read.images or reader.pixels is None:
        return Prepared(read, plans, prompt, None)
    parts = [
        view_pixels(image, plan.views, reader.pixels, device, on_device=on_device).to(dtype)
        for image, plan in zip(read.images, plans, strict=True)
    ]
    return Prepared(read, plans, prompt, torch.cat(parts))


def plan_request(read: Request, reader: Reader) -> tuple[list[ViewPlan], Prompt]:
    """The views of each image, and the prompt with their places."""
    return plan_sizes(read, [image.size for image in read.images], reader)


def plan_images(request: Request, sizes: Sequence[Size]) -> list[ViewPlan]:
    """The views of a request's images, which have these sizes."""
    settings = [view_settings(image, request.pan_and_scan) for image in request.images]
    return [plan_views(*size, chosen) for size, chosen in zip(sizes, settings, strict=True)]


def plan_sizes(request: Request, sizes: Sequence[Size], reader: Reader) -> tuple[list[ViewPlan], Prompt]:
    """The views of images of these sizes, as many as the request has, and the prompt with their places."""
    plans = plan_images(request, sizes)
    return plans, reader.prompts.write(request, [plan.crops for plan in plans])


def count_prompt(request: Request, reader: Reader) -> tuple[list[int], int, int]:
    """Return the token ids of a request's prompt, the number of image tokens and of views. No pixel is decoded.

    Raises:
        ImageError: an image's header cannot be read.
        SettingError: see :meth:`panscan.model.prompt.PromptWriter.write`.
    """
    images = images_of(request)
    sizes = [image_size(image) for image in images]
    plans, prompt = plan_sizes(replace(request, images=images), sizes, reader)
    return prompt.ids, prompt.image_tokens, sum(len(plan.views) for plan in plans)


def collate(batch: Sequence[Prepared], loaded: Loaded) -> dict[str, Any]:
    """Keyword arguments of ``generate()`` for a batch, padded on the left.

    ``input_ids``, ``attention_mask``, ``token_type_ids`` (1 at image tokens): int64 ``[requests, tokens]``;
    ``pixel_values``: ``[views of all requests, 3, size, size]``.
    """
    longest = max(len(item.prompt.ids) for item in batch)
    pad = loaded.model.generation_config.pad_token_id
    ids = torch.full((len(batch), longest), pad)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        ids[row, longest - len(item.prompt.ids) :] = torch.tensor(item.prompt.ids)
        mask[row, longest - len(item.prompt.ids) :] = 1
    inputs = {"input_ids": ids.to(loaded.device), "attention_mask": mask.to(loaded.device)}
    if (soft_id := loaded.reader.prompts.soft_id) is not None:
        inputs["token_type_ids"] = torch.eq(inputs["input_ids"], soft_id).long()
    pixels = [item.pixels for item in batch if item.pixels is not None]
    if pixels:
        inputs["pixel_values"] = torch.cat(pixels)
    return inputs
