"""What a run asks: documents and prompts, or a dataset, become a list of requests that is the same in every cell."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import msgspec

from panscan.core import (
    DatasetError,
    ImageError,
    InputError,
    PanAndScan,
    Request,
    SettingError,
)
from panscan.core.activity import activity, track
from panscan.core.errors import OnProblem
from panscan.core.files import cache_directory
from panscan.core.groups import grouped
from panscan.core.option import integers
from panscan.core.request import MAX_PAGES
from panscan.images.fetch import named_url
from panscan.images.files import Page, expand_images, find_pages, open_image, page_digest
from panscan.images.views import PUBLISHED_COST, PromptCost, ViewPlan, plan_views
from panscan.records.fields import EXACT_MATCH, METRICS
from panscan.records.quality import ANNOTATORS, metrics_for
from panscan.records.schema import DatasetFacts
from panscan.settings import Settings, nearest
from panscan.workload.datasets import load_dataset
from panscan.workload.rows import LoadedDataset, Row, read_text, unique_id
from panscan.workload.samples import sample_dataset
from panscan.workload.tables import picture_files

MAX_REQUESTS = 1_000_000
"""Requests of one cell."""

DEFAULT_PROMPT = "What does this document say?"
_MOST_SAID = 8  # files that are named; the count has them all


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One picture of a workload: its name, size in pixels (upright) and the hash of its file."""

    name: str
    width: int
    height: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload, without the settings of a cell."""

    id: str
    documents: tuple[DocumentFile, ...]
    prompt: str
    answers: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    @property
    def document_sha256s(self) -> list[str]:
        return [document.sha256 for document in self.documents]

    @property
    def tag_values(self) -> dict[str, list[str]]:
        """The values of each tag, by its name."""
        return grouped(self.tags)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a workload comes from, as the user said it; kept in the run's header so that it can resume.

    Args:
        images: globs, directories, files, URLs.
        prompts: a file of one prompt a line.
        prompt: one prompt, instead of a file.
        dataset: a file or folder of one of :data:`panscan.workload.datasets.FORMATS`.
        dataset_format: its layout; None to find out.
        dataset_split: which of its splits; None for the one that the layout prefers.
        no_images: prompts alone.
        num_samples: requests; fewer than all are drawn with ``seed``, more repeat them.
        system: a system message for every request.
        raw_prompt: prompts go to the tokenizer as they are.
        seed: of the draw.
        external_images: rows of the dataset may name URLs, and files outside its folder.
        max_pages: pages of one document; a document with more is unusable.
        template_kwargs: values for the chat template in every request.
    """

    images: tuple[str, ...] = ()
    prompts: str | None = None
    prompt: str | None = None
    dataset: str | None = None
    no_images: bool = False
    num_samples: int | None = None
    system: str | None = None
    raw_prompt: bool = False
    seed: int = 0
    dataset_format: str | None = None
    dataset_split: str | None = None
    external_images: bool = False
    max_pages: int = MAX_PAGES
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", tuple(map(named_url, self.images)))
        asked = self.prompts or self.prompt
        for contradicts, problem in (
            (
                self.dataset and (self.images or asked),
                "--dataset has its own images and questions: remove --images, --prompts and --prompt",
            ),
            (
                not self.dataset and (self.dataset_format or self.dataset_split),
                "--dataset-format and --dataset-split say how to read --dataset, which is missing",
            ),
            (self.prompt is not None and self.prompts is not None, "--prompt and --prompts exclude each other"),
            (self.prompt is not None and not self.prompt.strip(), "the prompt is empty"),
            (self.no_images and (self.images or self.dataset), "--no-images contradicts --images and --dataset"),
            (self.no_images and not asked, "--no-images needs --prompts or --prompt"),
            (self.raw_prompt and self.template_kwargs, "--template-kwargs: a raw prompt has no template"),
        ):
            if contradicts:
                raise SettingError(problem)
        if self.num_samples is not None:
            integers(1, MAX_REQUESTS).check("--num-prompts", self.num_samples)


@dataclass(frozen=True, slots=True)
class Workload:
    """The items of a run. ``dataset`` and ``metric`` (its own metric of quality) are None without a dataset."""

    items: list[Item]
    dataset: DatasetFacts | None = None
    metric: str | None = None

    def quality_metric(self, wanted: str | None) -> str | None:
        """The metric that is the run's quality: the one that the user wants, else the dataset's own, else exact match.

        None where no question has answers.

        Raises:
            SettingError: no such metric, or no question's answers have it.
        """
        known = {name for item in self.items for name in metrics_for(item.answers)}
        if wanted is None:
            return self.metric if self.metric in known else EXACT_MATCH if known else None
        if wanted not in METRICS:
            raise SettingError(f"--quality-metric takes {', '.join(METRICS)}; got {wanted!r}{nearest(wanted, METRICS)}")
        if not known:
            raise SettingError(f"--quality-metric {wanted}: no question has accepted answers; use a labelled --dataset")
        if wanted not in known:
            raise SettingError(f"--quality-metric {wanted} requires questions with {ANNOTATORS} answers each")
        return wanted


@activity("reading documents")
def load_workload(source: Source, *, on_problem: OnProblem) -> Workload:
    """Every item of a workload, in a fixed order. Each document is decoded once here, so that bad ones fail now.

    Of a dataset only what is drawn is opened. A question whose pictures cannot be read is counted, and another one is
    drawn in its place.

    Args:
        source: what the user gave.
        on_problem: receives the error of each unusable file, which is skipped.

    Raises:
        InputError: nothing usable is left, or a file of prompts or questions cannot be read.
        UnsupportedError: a dataset in a format that needs a library which is missing.
    """
    if source.dataset is not None:
        return _dataset_workload(Path(source.dataset), source, on_problem)
    prompts = [DEFAULT_PROMPT if source.prompt is None else source.prompt]
    if source.prompts is not None:
        text = read_text(Path(source.prompts), f"--prompts {source.prompts}")
        prompts = [line if source.raw_prompt else line.strip() for line in text.split("\n") if line.strip()]
    if not prompts:
        raise DatasetError(f"--prompts {source.prompts}: the file has no prompt")
    documents: list[DocumentFile] = []
    if not source.no_images:
        pages = find_pages(source.images, on_problem=on_problem, max_pages=source.max_pages)
        documents = _documents_of(track("reading documents", pages), on_problem)
    if not documents and not source.no_images:
        raise ImageError(f"--images {' '.join(source.images)}: no readable image is left")
    pictures: list[tuple[DocumentFile, ...]] = [(document,) for document in documents] or [()]
    if (count := len(pictures) * len(prompts)) > MAX_REQUESTS:
        product_text = f"{len(prompts):,} prompts for each of {len(pictures):,} documents are {count:,} requests"
        raise SettingError(f"--prompts {source.prompts}: {product_text}, the limit is {MAX_REQUESTS:,}")
    items = [Item(f"{number:05d}", *pair) for number, pair in enumerate(product(pictures, prompts))]
    return Workload(_sampled(items, source.num_samples, source.seed))


def content_digest(items: Sequence[Item]) -> str:
    """Return a hash over every item's id, documents and prompt."""
    facts = [[item.id, item.document_sha256s, item.prompt_sha256] for item in items]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def view_counts(items: Sequence[Item], settings: Settings) -> list[int]:
    """Return the number of views of each item's documents in a cell."""
    return [sum(len(plan.views) for plan in plans_of(item, settings)) for item in items]


def request_of(item: Item, settings: Settings, source: Source) -> Request:
    """The item as a request under a cell's settings."""
    return Request(
        prompt=item.prompt,
        images=[document.name for document in item.documents],
        system=source.system,
        raw=source.raw_prompt,
        pan_and_scan=settings.pan_and_scan,
        sampling=settings.sampling,
        id=item.id,
        max_pages=source.max_pages,
        template_kwargs=source.template_kwargs,
    )


def plans_of(item: Item, settings: Settings, cost: PromptCost = PUBLISHED_COST) -> list[ViewPlan]:
    """The views that a cell takes of an item's documents."""
    return [plan_views(d.width, d.height, settings.pan_and_scan, cost) for d in item.documents]


def views_of(items: Sequence[Item]) -> Callable[[Settings], bytes]:
    """Return a function that maps a cell's settings to a digest of the view boxes of all documents in the items."""
    sizes = sorted({(document.width, document.height) for item in items for document in item.documents})

    @cache
    def planned(pan_and_scan: PanAndScan) -> bytes:
        boxes = [[view.box for view in plan_views(*size, pan_and_scan).views] for size in sizes]
        return hashlib.sha256(repr(boxes).encode()).digest()

    return lambda settings: planned(settings.pan_and_scan)


def _dataset_workload(path: Path, source: Source, on_problem: OnProblem) -> Workload:
    """Return the questions of a dataset, or a seeded draw of ``num_samples`` of them, in the dataset's order.

    Args:
        path: the dataset.
        source: how to read it and how many questions to draw.
        on_problem: called with each of the first few unusable files, and with the number of the others.

    Raises:
        InputError: the dataset cannot be read, or none of its questions is usable.
    """
    loaded = load_dataset(
        path, layout=source.dataset_format, split=source.dataset_split, external=source.external_images
    )
    rows, count = loaded.rows, source.num_samples
    wanted = len(rows) if count is None else min(count, len(rows))
    opening = _Opening(loaded, on_problem, source.max_pages)
    order = list(range(len(rows)))
    if wanted < len(rows):  # those that are drawn, then those that take the places of bad ones
        draw = random.Random(source.seed)
        drawn = sorted(draw.sample(order, wanted))
        others = sorted({*order}.difference(drawn))
        draw.shuffle(others)
        order = drawn + others
    opened: dict[int, tuple[DocumentFile, ...]] = {}
    with activity("reading documents", total=wanted) as step:
        while numbers := sorted(order[: wanted - len(opened)]):  # a table is read once per round
            order = order[len(numbers) :]
            for number in numbers:
                if documents := opening.open(rows[number]):
                    opened[number] = documents
                    step.advance()
    if (more := opening.problems - _MOST_SAID) > 0:
        on_problem(DatasetError(f"{loaded.called}: {more} more file{'' if more == 1 else 's'}"))
    items = []
    for number, documents in sorted(opened.items()):
        row = rows[number]
        items.append(Item(row.id, documents, row.question or "", row.answers, row.tags))
    facts = msgspec.structs.replace(
        loaded.facts,
        used=len(items),
        without_image=loaded.facts.without_image + len(rows) - len(order) - len(items),
        unscored=sum(not item.answers for item in items),
    )
    if not items:
        raise DatasetError(f"--dataset {path}: no usable question is left ({facts.text})")
    return Workload(_sampled(items, count, source.seed), facts, loaded.metric)


class _Opening:
    """Opens the pictures of a dataset, each file once, and reports the first few problems."""

    def __init__(self, loaded: LoadedDataset, on_problem: OnProblem, max_pages: int) -> None:
        self._called, self._max_pages, self._on_problem = loaded.called, max_pages, on_problem
        self._known: dict[str, list[DocumentFile]] = {}
        self.problems = 0

    def open(self, row: Row) -> tuple[DocumentFile, ...]:
        """Return the documents of a row; none if any picture cannot be read."""
        images, folder = row.images, cache_directory() / "dataset-pictures"
        names = picture_files(images(), folder, self._called) if callable(images) else images
        for name in names:
            if name not in self._known:
                try:  # A row names files, no folders and no patterns: those could lead anywhere.
                    expanded = expand_images([name], max_pages=self._max_pages)
                except ImageError as problem:
                    expanded = []  # the name of a table's picture in the cache says nothing about its row
                    self._problem(
                        DatasetError(f"{self._called}, id {row.id}: {problem}") if callable(images) else problem
                    )
                pages = [page for page in expanded if isinstance(page, Page)]
                self._known[name] = _documents_of(pages, self._problem)
        documents = [self._known[name] for name in names]
        return tuple(chain.from_iterable(documents)) if all(documents) else ()

    def _problem(self, problem: InputError) -> None:
        self.problems += 1
        if self.problems <= _MOST_SAID:
            self._on_problem(problem)


def _documents_of(pages: Iterable[Page], on_problem: OnProblem) -> list[DocumentFile]:
    """Return pages as documents. Each is decoded once; ``on_problem`` is called for those that cannot be decoded."""
    documents = []
    digests: dict[str, str] = {}  # a file of a thousand pages is hashed once
    for page in pages:
        try:
            width, height = open_image(page).size
            if page.source not in digests:
                digests[page.source] = page_digest(Page(page.source))
            digest = Page(digests[page.source], page.page).name
            documents.append(DocumentFile(page.name, width, height, digest))
        except ImageError as error:
            on_problem(error)
    return documents


def _sampled(items: list[Item], count: int | None, seed: int) -> list[Item]:
    """``count`` items: a seeded draw of fewer, kept in order; or all of them again and again, with ids of their own."""
    if count is None or count == len(items):
        return items
    if count < len(items):
        return [items[index] for index in sorted(random.Random(seed).sample(range(len(items)), count))]
    taken = {item.id for item in items}
    repeated = list(items)
    for number in range(len(items), count):
        turn, index = divmod(number, len(items))
        item_id = f"{items[index].id}+{turn}"
        item_id = unique_id(item_id, taken) if item_id in taken else item_id
        taken.add(item_id)
        repeated.append(replace(items[index], id=item_id))
    return repeated


def source_or_samples(
    *,
    images: Sequence[str] = (),
    dataset: str | None = None,
    prompts: str | None = None,
    prompt: str | None = None,
    no_images: bool = False,
    on_default: Callable[[str], None],
    **others: Any,
) -> Source:
    """Return a :class:`Source`, with the bundled sample documents if it names no documents.

    Prompts are asked of the samples' pictures; without prompts, the samples' own questions are asked.

    Args:
        images: see :class:`Source`, as are the others.
        on_default: called with a remark about each default that is used.
    """
    prompted = prompts is not None or prompt is not None
    if not images and dataset is None and not no_images:
        samples = sample_dataset()
        on_default(f"no --images given: using the bundled sample documents ({samples.parent})")
        if prompted:
            images = (str(samples.parent),)
        else:
            dataset = str(samples)
    if dataset is None and not prompted and not no_images:
        on_default(f"no -p given: asking {DEFAULT_PROMPT!r}")
    return Source(images=tuple(images), dataset=dataset, prompts=prompts, prompt=prompt, no_images=no_images, **others)
