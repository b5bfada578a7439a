"""What a load level sends: documents and prompts as chat completions, encoded before the clock starts.

Every level sends the same documents, prompts and lengths in the same order, so levels are compared on the same work.
The images are made distinct by a few pixels (:mod:`panscan.load.variants`), except for the share that is reused on
purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from PIL import Image, UnidentifiedImageError

from panscan.core import SettingError
from panscan.core.groups import grouped
from panscan.images.files import open_image, page_named
from panscan.load.chat import ChatRequest, chat_body, data_url
from panscan.load.options import LoadOptions
from panscan.load.scenario import Scenario
from panscan.load.variants import VariantImage
from panscan.workload.request_sets import chat_parts
from panscan.workload.requests import DocumentFile, Item

MAX_BYTES = 2**31
"""Encoded documents and request bodies of one level, bytes."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A chat completion and the item that it was made of, for the records."""

    chat: ChatRequest
    item: Item


def _open_document(document: DocumentFile) -> VariantImage:
    page = page_named(document.name)
    header = None  # of a JPEG file on this machine
    if page.page is None:
        with suppress(OSError, UnidentifiedImageError), Image.open(page.source) as file:  # a URL is sent as PNG
            header = file if file.format in ("JPEG", "MPO") else None
    return VariantImage(open_image(page), header)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Documents with prompts, and how often each is sent.

    Args:
        items: documents and prompt of each possible request.
        weights: relative frequency of each item; None: every item once per round, in random order.
        open_image: returns a document's encoded image.
    """

    items: Sequence[Item]
    weights: Sequence[float] | None = None
    open_image: Callable[[DocumentFile], VariantImage] = _open_document


def mix_of_scenario(scenario: Scenario, seed: int, prompts: Sequence[str] = ()) -> RequestMix:
    """Draw the documents of a scenario and return their mix.

    Args:
        scenario: one with documents.
        seed: another seed gives other documents.
        prompts: questions for every document, instead of the scenario's or each document's own.
    """
    items: list[Item] = []
    weights: list[float] = []
    images: dict[str, VariantImage] = {}
    for entry in scenario.documents:
        for index in range(scenario.variety):
            drawn = entry.draw(seed, index, scenario.columns)
            digest = hashlib.sha256(drawn.image.tobytes()).hexdigest()
            file = DocumentFile(f"{scenario.name}/{entry.name}-{index}", entry.width, entry.height, digest)
            images[file.name] = VariantImage(drawn.image)
            questions = list(prompts or scenario.prompts) or [ask.question for ask in drawn.questions]
            items += [Item(f"{file.name}-{number}", (file,), question) for number, question in enumerate(questions)]
            weights += [entry.share / scenario.variety / len(questions)] * len(questions)
    return RequestMix(items, weights, lambda document: images[document.name])


class Content:
    """Makes the requests of each level of a run.

    Args:
        mix: documents and prompts.
        options: options of the run; the seed determines order, lengths and reuse.
        model: model name of the requests.
        salt: number that is mixed into the images, so that a second run with the same seed sends other pixels. The same
            salt and seed give the same bytes.
        most_bytes: encoded documents and request bodies of one level, bytes.
    """

    def __init__(
        self, mix: RequestMix, options: LoadOptions, model: str, salt: int = 0, most_bytes: int = MAX_BYTES
    ) -> None:
        self._mix, self._options, self._model, self._most_bytes = mix, options, model, most_bytes
        self._variant = salt
        self._images: dict[str, VariantImage] = {}
        self._document_bytes = 0
        self._request_bytes = 0.0

    @property
    def size(self) -> str:
        """What the latest level keeps in memory, as text."""
        documents = f"{len(self._images):,} document{'' if len(self._images) == 1 else 's'}"
        encoded = f"{self._document_bytes / 1e6:,.1f} MB in base64"
        return f"{documents}, {encoded}; each request adds {self._request_bytes / 1e3:,.1f} kB"

    def requests(self, count: int) -> list[LoadRequest]:
        """Return the requests of a level, with images that no earlier call returned.

        Raises:
            ImageError: a document cannot be read.
            SettingError: the requests would need more than ``most_bytes``.
        """
        requests: list[LoadRequest] = []
        sent: list[tuple[Item, int]] = []  # fresh images of this level
        by_documents = grouped((item.documents, item) for item in self._mix.items)
        order, draw = self._order(), Random(f"{self._options.seed}-reuse")
        total, share = 0, self._options.image_reuse
        for number in range(count):
            item = next(order)
            if sent and int((number + 1) * share) > int(number * share):  # an even spread
                earlier, variant = draw.choice(sent)
                item = draw.choice(by_documents[earlier.documents])
            else:
                variant, self._variant = self._variant, self._variant + 1
                sent.append((item, variant))
            chat = self._chat(number, item, variant)
            total += sum(map(len, chat.body)) - sum(self._image(file).shared_bytes for file in item.documents)
            self._check_size(total)
            requests.append(LoadRequest(chat, item))
        self._request_bytes = total / count
        return requests

    def _order(self) -> Iterator[Item]:
        """Yield items without end, the same for the same seed."""
        items, weights = list(self._mix.items), self._mix.weights
        draw = Random(f"{self._options.seed}-items")
        while True:
            if weights is None:
                draw.shuffle(items)
                yield from items
            else:
                yield from draw.choices(items, weights, k=256)

    def _chat(self, number: int, item: Item, variant: int) -> ChatRequest:
        options, trace = self._options, self._options.trace
        if trace is not None and trace.output_lengths is not None:
            tokens = trace.output_lengths[number % len(trace.output_lengths)]  # there may be more warm-up requests
        else:
            least = options.max_tokens if options.min_tokens is None else options.min_tokens
            tokens = Random(f"{options.seed}-length-{number}").randint(least, options.max_tokens)
        images = [self._image(file) for file in item.documents]
        # Each image's URL without its data is a segment of the body, between two others.
        first, *segments = chat_body(
            self._model,
            [
                {
                    "role": "user",
                    "content": chat_parts([data_url(image.media_type, b"") for image in images], item.prompt),
                }
            ],
            tokens,
            ignore_eos=options.ignore_eos or None,  # not every endpoint knows the field
            mm_processor_kwargs=options.mm_processor_kwargs,
            adapt=options.adapted,
        )
        body = [first]
        for image, start, rest in zip(images, segments[::2], segments[1::2], strict=True):
            body += [start, *image.base64(variant), rest]
        return ChatRequest(f"{number:05d}", tuple(body), tokens)

    def _image(self, document: DocumentFile) -> VariantImage:
        if document.name not in self._images:
            self._images[document.name] = image = self._mix.open_image(document)
            self._document_bytes += image.shared_bytes
            self._check_size(0)
        return self._images[document.name]

    def _check_size(self, private: int) -> None:
        """Refuse more than the allowed bytes.

        Args:
            private: bytes of the requests so far, without the documents' shared bytes.
        """
        if self._document_bytes + private > self._most_bytes:
            documents, requests, most = (size / 1e6 for size in (self._document_bytes, private, self._most_bytes))
            raise SettingError(
                f"{len(self._images):,} documents of {documents:,.0f} MB in base64, and requests of {requests:,.0f} MB,"
                f" exceed {most:,.0f} MB: give smaller --images, or fewer --num-prompts"
            )
