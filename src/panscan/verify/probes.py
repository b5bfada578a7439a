"""The questions that an endpoint under verification is asked."""

from __future__ import annotations

from collections.abc import Sequence

from panscan.core import PanAndScan, Request
from panscan.images.documents import draw_document
from panscan.images.files import find_pages, open_image
from panscan.verify.endpoint import encoded_image

__all__ = ["own_probes", "sample_probes"]

_SEED = 977  # of documents
_RECEIPT, _BOARD, _INVOICE, _CHART, _TABLE, _NOTES, _SIGN, _FORM = 0, 1, 2, 3, 5, 6, 7, 8  # their indices
_DESCRIBE = "Describe this document in detail."


def sample_probes(settings: PanAndScan, *, images: bool) -> list[Request]:
    """Return questions about sample documents, most telling first: without crops, with crops, several images, text.

    Args:
        settings: pan-and-scan settings of the requests.
        images: whether the checkpoint reads images; without it, the questions are text.
    """
    texts = [
        Request("List the months of the year.", id="text"),
        Request("What is a receipt?", system="Answer in one short sentence.", id="text, system message"),
    ]
    if not images:
        return [
            *texts,
            Request("Count from one to ten.", id="text, numbers"),
            Request(_DESCRIBE, id="text, no document"),
        ]
    shown = (_RECEIPT, _BOARD, _INVOICE, _CHART, _TABLE, _NOTES, _SIGN, _FORM)
    documents = {index: draw_document(_SEED, index) for index in shown}
    files = {index: encoded_image(document.image) for index, document in documents.items()}

    def ask(name: str, *indices: int, ask: int = 0, prompt: str | None = None, system: str | None = None) -> Request:
        question = prompt or documents[indices[-1]].asks[ask].question
        return Request(question, [files[index] for index in indices], system, pan_and_scan=settings, id=name)

    return [
        ask("square chart", _CHART),
        texts[0],
        ask("tall receipt", _RECEIPT),
        ask("two images", _FORM, _CHART),
        ask("wide board", _BOARD),
        ask("square form", _FORM, ask=2),
        texts[1],
        ask("invoice", _INVOICE, ask=1),
        ask("wide table, system message", _TABLE, system="Answer in one word."),
        ask("tall notes", _NOTES, ask=1),
        ask("square sign", _SIGN, ask=2),
        ask("square chart, described", _CHART, prompt=_DESCRIBE),
    ]


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

    def refuse(error: Exception) -> None:
        raise error

    pages = find_pages(images, on_problem=refuse)
    pairs = [(page, prompt) for prompt in prompts for page in pages][: most - 1]
    files = {page: encoded_image(open_image(page)) for page, _ in pairs}
    asked = [
        Request(prompt, [files[page]], pan_and_scan=settings, id=f"{page.name}, prompt {prompts.index(prompt) + 1}")
        for page, prompt in pairs
    ]
    return [*asked[:1], Request(prompts[0], id="text"), *asked[1:]]
