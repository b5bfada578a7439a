"""The request, or the batch of requests, that a profile runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from panscan.core import BUNDLED, Request, SettingError
from panscan.images.files import Page, expand_images
from panscan.model.checkpoint import model_reads_images
from panscan.settings import Settings
from panscan.workload.documents import COLUMNS
from panscan.workload.samples import draw_sample

_DOCUMENT_PROMPT, _TEXT_PROMPT = "What does this document say?", "Explain in a few sentences how a GPU works."
_SMALL_PRINT = 100  # characters across a page, legible at 896 pixels a view


def profiled_requests(
    prompt: str | None, images: Sequence[str], settings: Settings, folder: Path, *, max_pages: int
) -> list[Request]:
    """Return the batch of ``settings.batch_size`` requests.

    A single request has all images in its prompt; in a larger batch request ``i`` has image ``i``, and the images
    repeat if there are fewer than requests. Without images, documents are drawn, a different one for each request, if
    the model reads images.

    Args:
        prompt: the question; None: one that fits.
        images: files, PDF and TIFF with all their pages, and URLs.
        settings: model, batch size, pan and scan, sampling.
        folder: folder for the drawn documents.
        max_pages: pages of one file at most.

    Raises:
        ImageError: an image cannot be read.
        ModelError: the checkpoint is not available.
        SettingError: images for a text-only checkpoint, or more images than requests in a batch.
    """
    count, pages = settings.batch_size, expand_images(images, max_pages=max_pages)
    reads = model_reads_images(settings)
    if pages and not reads:
        raise SettingError(f"--model {settings.model_name} reads text only: leave the images out")
    if count > 1 and len(pages) > count:
        raise SettingError(f"--batch-size {count}: each request takes one of the {len(pages)} images; raise it")
    if not pages and reads:
        small = settings.model in BUNDLED and settings.model_shape in (None, *BUNDLED)
        for index in range(count):
            _, name, content = draw_sample(0, index, COLUMNS if small else _SMALL_PRINT)
            (folder / name).write_bytes(content)
            pages.append(Page(str(folder / name)))
    groups = [pages] if count == 1 else [[pages[index % len(pages)]] if pages else [] for index in range(count)]
    question = prompt or (_DOCUMENT_PROMPT if pages else _TEXT_PROMPT)
    return [
        Request(
            prompt=question,
            images=chosen,
            pan_and_scan=settings.pan_and_scan,
            sampling=settings.sampling,
            id=f"request-{index}",
        )
        for index, chosen in enumerate(groups)
    ]
