"""What a run asks: documents and prompts, or a dataset, become a list of items that is the same in every cell."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panscan.core import DatasetError, ImageError, InputError, Request, SettingError
from panscan.images.files import Page, find_pages, load_page, page_digest
from panscan.images.views import GEMMA3_COST, PromptCost, ViewPlan, plan_views
from panscan.settings import Settings, nearest

__all__ = ["DEFAULT_PROMPT", "Document", "Item", "Source", "build_workload", "dataset_rows", "plans_of", "request_of"]

DEFAULT_PROMPT = "What does this document say?"
_KEYS = {"image", "question", "answers", "kind", "type", "id"}


@dataclass(frozen=True, slots=True)
class Document:
    """One picture of a workload: its name, size in pixels (upright) and the hash of its file."""

    name: str
    width: int
    height: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload, without the settings of a cell."""

    id: str
    documents: tuple[Document, ...]
    prompt: str
    answers: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a workload comes from, as the user said it; kept in the run's header so that it can resume.

    Args:
        images: globs, directories, files, URLs.
        prompts: a file of one prompt a line.
        prompt: one prompt, instead of a file.
        dataset: a JSON Lines file of ``{image, question, answers}``.
        no_images: prompts alone.
        num_samples: requests; fewer than all are drawn with ``seed``, more repeat them.
        system: a system message for every request.
        raw_prompt: prompts go to the tokenizer as they are.
        seed: of the draw.
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

    def __post_init__(self) -> None:
        if self.dataset and (self.images or self.prompts or self.prompt):
            raise SettingError("--dataset brings its own images and questions: leave --images and --prompts out")
        if self.prompt is not None and self.prompts is not None:
            raise SettingError("--prompt and --prompts exclude each other")
        if self.prompt is not None and not self.prompt.strip():
            raise SettingError("the prompt is empty")
        if self.no_images and (self.images or self.dataset):
            raise SettingError("--no-images contradicts --images and --dataset")
        if self.no_images and not (self.prompts or self.prompt):
            raise SettingError("--no-images needs --prompts or --prompt")
        if self.num_samples is not None and self.num_samples < 1:
            raise SettingError(f"--num-samples must be at least 1, got {self.num_samples}")


def build_workload(source: Source, *, on_problem: Callable[[InputError], None]) -> list[Item]:
    """Every item of a workload, in a fixed order. Each document is decoded once here, so that bad ones fail now.

    Args:
        source: what the user gave.
        on_problem: told of each file that cannot be used; the rest goes on.

    Raises:
        InputError: nothing usable is left, or a file of prompts or questions cannot be read.
    """
    if source.dataset is not None:
        items = _dataset_items(Path(source.dataset), on_problem)
    else:
        prompts = _prompts(source)
        documents = [] if source.no_images else _documents(find_pages(source.images, on_problem=on_problem), on_problem)
        if not documents and not source.no_images:
            raise ImageError(f"--images {' '.join(source.images)}: no readable image is left")
        pictures: list[tuple[Document, ...]] = [(document,) for document in documents] or [()]
        items = [
            Item(f"{number:05d}", picture, prompt)
            for number, (picture, prompt) in enumerate((picture, prompt) for picture in pictures for prompt in prompts)
        ]
    chosen = _sampled(items, source.num_samples, source.seed)
    if len({item.id for item in chosen}) < len(chosen):
        raise DatasetError(f"--dataset {source.dataset}: two requests have the same id (repeats add +1, +2, ... to it)")
    return chosen


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
    )


def plans_of(item: Item, settings: Settings, cost: PromptCost = GEMMA3_COST) -> list[ViewPlan]:
    """The views that a cell takes of an item's documents."""
    return [plan_views(d.width, d.height, settings.pan_and_scan, cost) for d in item.documents]


def _documents(pages: Sequence[Page], on_problem: Callable[[InputError], None]) -> list[Document]:
    found = []
    for page in pages:
        try:
            width, height = load_page(page).size
            found.append(Document(page.name, width, height, page_digest(page)))
        except ImageError as error:
            on_problem(error)
    return found


def _prompts(source: Source) -> list[str]:
    if source.prompts is None:
        return [source.prompt if source.prompt is not None else DEFAULT_PROMPT]
    lines = [line for line in _read(Path(source.prompts), f"--prompts {source.prompts}").split("\n") if line.strip()]
    if not lines:
        raise DatasetError(f"--prompts {source.prompts}: the file has no prompt")
    return lines if source.raw_prompt else [line.strip() for line in lines]


def _dataset_items(path: Path, on_problem: Callable[[InputError], None]) -> list[Item]:
    rows = dataset_rows(path, f"--dataset {path}")
    known: dict[str, list[Document]] = {}
    items = []
    for number, row in enumerate(rows):
        names = [row["image"]] if isinstance(row["image"], str) else row["image"]
        for name in names:
            if name not in known:
                place = name if "://" in name else str(path.parent / name)
                known[name] = _documents(find_pages([place], on_problem=on_problem), on_problem)
        if all(known[name] for name in names):
            documents = tuple(document for name in names for document in known[name])
            tags = tuple((key, str(row[key])) for key in ("kind", "type") if key in row)
            item_id = str(row.get("id", f"{number:05d}"))
            items.append(Item(item_id, documents, row["question"], tuple(row.get("answers", ())), tags))
    if not items:
        raise DatasetError(f"--dataset {path}: no usable question is left")
    return items


def dataset_rows(path: Path, called: str) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file of ``{image, question}`` and perhaps ``answers``, ``kind``, ``type`` and ``id``.

    Args:
        path: the file; empty lines in it are skipped.
        called: what messages call it.

    Raises:
        DatasetError: the file cannot be read, or a line is not such a row; the message has its number.
    """
    lines = _read(path, called).split("\n")
    return [_row(line, f"{called}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error.msg}") from error
    if not _is_unicode(row):
        raise DatasetError(f"{where}: half of a surrogate pair is no text")
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected an object with image, question and answers")
    for key in ("image", "question"):
        if key not in row:
            raise DatasetError(f"{where}: {key!r} is missing")
    for key in row.keys() - _KEYS:
        raise DatasetError(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}")
    names = [row["image"]] if isinstance(row["image"], str) else row["image"]
    if not names or not _texts(names) or not all(names):
        raise DatasetError(f"{where}: 'image' must be a file name or a list of them")
    if not isinstance(row["question"], str) or not _texts(row.get("answers", [])):
        raise DatasetError(f"{where}: 'question' must be text and 'answers' a list of texts")
    return row


def _is_unicode(row: Any) -> bool:
    """JSON's escapes can write code points that UTF-8, and so a tokenizer, cannot."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _read(path: Path, called: str) -> str:
    """A file's text, its line ends made "\\n". (str.splitlines would also cut at signs that a JSON text may hold.)"""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{called}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{called}: not UTF-8 text") from error


def _sampled(items: list[Item], count: int | None, seed: int) -> list[Item]:
    """``count`` items: a seeded draw of fewer, kept in order; or all of them again and again, with ids of their own."""
    if count is None or count == len(items):
        return items
    if count < len(items):
        return [items[index] for index in sorted(random.Random(seed).sample(range(len(items)), count))]
    rounds = (divmod(number, len(items)) for number in range(count))
    return [
        items[index] if not turn else Item(f"{items[index].id}+{turn}", *_fields(items[index]))
        for turn, index in rounds
    ]


def _fields(item: Item) -> tuple[Any, ...]:
    return item.documents, item.prompt, item.answers, item.tags
