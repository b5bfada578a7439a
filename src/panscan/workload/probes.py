"""The questions that an endpoint under verification is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from PIL import Image

from panscan.core import InputError, PanAndScan, Request
from panscan.images.encode import encoded_image
from panscan.images.files import find_pages, open_image
from panscan.workload.documents import draw_document

_SEED = 977  # of documents
_RECEIPT, _BOARD, _CHART, _TABLE, _SIGN, _FORM = 0, 1, 3, 5, 7, 8
_DESCRIBE = "Describe this document in detail."
_DIFFERENCE = "What is different?"
_SIDE = 1.5  # of a page's short side over a view's: resizing must average pixels
_LEAST_SIDE = 288  # pixels: crops of shorter pages would be too small by default
_COLUMNS = 60 / 192  # characters across a page per pixel of a view: the print is too small to be sure of
_MOST_COLUMNS = 200


def sample_probes(settings: PanAndScan, *, view_size: int | None) -> list[Request]:
    """Return questions about sample documents, most telling first.

    A sure answer hides small differences, so the print is hard to read: many tokens are possible, and their
    probabilities depend on every pixel, view and mask. Every change of :data:`panscan.verify.hypotheses.CHANGES`
    concerns a question: square pages, crops, several images, more views than a window holds, text alone. If the
    settings enable pan and scan, two questions have other settings: a server may ignore those of a request.

    Args:
        settings: pan-and-scan settings of the requests.
        view_size: pixels of a view's side; None: the checkpoint reads no images, and the questions are text.
    """
    texts = [
        Request("List the months of the year.", id="text"),
        Request("What is a receipt?", system="Answer in one short sentence.", id="text, system message"),
    ]
    if view_size is None:
        return [
            *texts,
            Request("Count from one to ten.", id="text, numbers"),
            Request(_DESCRIBE, id="text, no document"),
        ]

    def ask(name: str, prompt: str | None, *pages: _Page, other: PanAndScan | None = None) -> Request:
        return _document_request(name, prompt, pages, settings if other is None else other, view_size)

    wide, board = _Page(_TABLE, 2.0, 1.0), _Page(_BOARD, 3.0, 1.0)
    probes = [
        ask("square chart", None, _Page(_CHART)),
        ask("wide table", None, wide),
        texts[0],
        ask("two images", _DIFFERENCE, _Page(_SIGN), _Page(_FORM)),
        ask("two wide pages", _DIFFERENCE, wide, _Page(_BOARD, 2.0, 1.0)),
        texts[1],
        ask("tall receipt", None, _Page(_RECEIPT, 1.0, 2.0)),
        ask("square form, described", _DESCRIBE, _Page(_FORM)),
    ]
    if settings.enabled:
        off = replace(settings, enabled=False)
        fewer = replace(settings, max_num_crops=3 if settings.max_num_crops == 2 else 2)
        probes[4:4] = [
            ask("wide board, without crops", None, board, other=off),
            ask("wide board, another number of crops", None, board, other=fewer),
        ]
    return probes


def long_probe(least: int, tokens: Callable[[str], int]) -> Request:
    """Return a question about the start of a long list.

    Args:
        least: tokens of the list at least.
        tokens: returns the number of tokens of a text.
    """
    draw, lines, length = Random(_SEED), list[str](), 0
    while length < least:
        lines.append(f"Amount {len(lines) + 1}: ${draw.randrange(1000, 10_000)}")
        length += tokens(lines[-1])
    return Request("\n".join([*lines, "What are the first amounts?"]), id="long text")


@dataclass(frozen=True, slots=True)
class _Page:
    """A sample document, and its width and height in short sides."""

    index: int
    width: float = 1.0
    height: float = 1.0


_KIT_SIZES = ((1, 2), (4, 1), (1, 2), (1, 1), (1, 2.5), (2, 1), (1, 2), (1, 1), (2, 1), (1, 3))
"""Width and height in short sides of each page of a test kit; the views of the second are longer than mini's window."""


def kit_probes(view_size: int) -> list[tuple[Request, Request]]:
    """Return a question about each page of a test kit, without pan and scan and with it.

    Args:
        view_size: pixels of a view's side.
    """
    off, pages = PanAndScan(enabled=False), [_Page(index, *size) for index, size in enumerate(_KIT_SIZES)]
    plain = [_document_request("plain", None, [page], off, view_size) for page in pages]
    return [(request, replace(request, id="pan and scan", pan_and_scan=PanAndScan())) for request in plain]


def _document_request(
    name: str, prompt: str | None, pages: Sequence[_Page], settings: PanAndScan, view_size: int
) -> Request:
    """Return a question about drawn pages; without a prompt, the last page's own question."""
    side = max(_LEAST_SIDE, round(_SIDE * view_size))
    columns = min(_MOST_COLUMNS, round(_COLUMNS * view_size))
    drawn = [draw_document(_SEED, page.index, columns=columns) for page in pages]
    question = drawn[-1].questions[0].question if prompt is None else prompt
    sizes = [(round(page.width * side), round(page.height * side)) for page in pages]
    images = [
        encoded_image(document.image.resize(size, Image.Resampling.BICUBIC))
        for document, size in zip(drawn, sizes, strict=True)
    ]
    return Request(question, images, pan_and_scan=settings, id=name)


def own_probes(images: Sequence[str], prompts: Sequence[str], settings: PanAndScan, most: int) -> list[Request]:
    """Return each prompt over each page, and the first prompt without an image.

    Args:
        images: paths, globs or URLs of documents.
        prompts: questions.
        settings: pan-and-scan settings of the requests.
        most: number of questions at most.

    Raises:
        ImageError: a document cannot be read, or no pattern matches.
    """
    problems: list[InputError] = []
    pages = find_pages(images, on_problem=problems.append)
    if problems:
        raise problems[0]
    chosen = [(page, number, prompt) for number, prompt in enumerate(prompts, 1) for page in pages][: most - 1]
    files = {page: encoded_image(open_image(page)) for page, *_ in chosen}
    asked = [
        Request(prompt, [files[page]], pan_and_scan=settings, id=f"{page.name}, prompt {number}")
        for page, number, prompt in chosen
    ]
    return [*asked[:1], Request(prompts[0], id="text"), *asked[1:]]
