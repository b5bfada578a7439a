"""Prompts for calibration, and held-out prompts to measure the result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from panscan.core import DatasetError, ImageError, SettingError
from panscan.core.errors import OnProblem
from panscan.core.request import MAX_PAGES
from panscan.workload.requests import DEFAULT_PROMPT, Item, Source, Workload, load_workload
from panscan.workload.samples import sample_dataset

_HELD_OUT = 5  # one of so many calibration documents is kept for the measurement
_MOST_HELD_OUT = 8
_DATASETS = (".jsonl", ".json", ".parquet", ".arrow")
_TEXT_PROMPT = "List the fields of an invoice, and explain each of them."


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Source of calibration prompts.

    Args:
        sources: directories, globs and files of documents, or one dataset; empty: no calibration.
        prompts: questions about the documents; empty: a general one.
        num_samples: maximum number of prompts.
        seed: random seed for sampling prompts.
        max_pages: maximum number of pages per document.
    """

    sources: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    num_samples: int = 128
    seed: int = 0
    max_pages: int = MAX_PAGES

    def __post_init__(self) -> None:
        if self.prompts and not self.sources:
            raise SettingError("--prompt requires calibration documents: add --calibration")
        if any(not prompt.strip() for prompt in self.prompts):
            raise SettingError("--prompt is empty: give a question")
        if self.prompts and self.is_dataset:
            raise SettingError(f"--prompt: --calibration {self.sources[0]} already has questions; leave out --prompt")

    @property
    def is_dataset(self) -> bool:
        """Whether the prompts are a dataset's questions."""
        return len(self.sources) == 1 and self.sources[0].endswith(_DATASETS)


def load_documents(
    dataset: str | None, num_samples: int, seed: int, on_problem: OnProblem, *, reads_images: bool = True
) -> tuple[Workload, Source]:
    """Return labelled questions to measure on, and their source.

    Args:
        dataset: file or directory; None for the bundled sample documents.
        num_samples: maximum number of questions of a dataset.
        seed: random seed for sampling them.
        on_problem: called for each document that cannot be read.
        reads_images: False: a text prompt instead of the bundled documents.

    Raises:
        InputError: the dataset cannot be read, or none of its questions is usable.
    """
    if dataset is not None:
        source = Source(dataset=dataset, num_samples=num_samples, seed=seed)
    elif reads_images:
        source = Source(dataset=str(sample_dataset()))
    else:
        source = Source(no_images=True, prompt=_TEXT_PROMPT)
    return _open_workload(source, on_problem), source


def load_calibration(wanted: CalibrationSource, on_problem: OnProblem) -> tuple[list[Item], list[Item], Source]:
    """Return calibration prompts, held-out prompts to measure the result, and the source of both.

    With fewer than five documents, nothing is held out. The sample depends on the contents of the documents and the
    seed, not on the order or names of files; of a dataset with more questions than are used, on their order too.

    Args:
        wanted: calibration source with at least one entry.
        on_problem: called for each document that cannot be read.

    Raises:
        ImageError: no document is usable.
        DatasetError: the dataset cannot be read, or none of its questions is usable.
    """
    first, *others = wanted.prompts or (DEFAULT_PROMPT,)
    if wanted.is_dataset:
        count = wanted.num_samples + _MOST_HELD_OUT  # only documents that are drawn are opened
        source = Source(dataset=wanted.sources[0], num_samples=count, seed=wanted.seed, max_pages=wanted.max_pages)
    else:
        source = Source(images=wanted.sources, prompt=first, max_pages=wanted.max_pages)
    try:
        items = _open_workload(source, on_problem).items
    except (ImageError, DatasetError) as error:
        text = re.sub("--(images|dataset)", "--calibration", str(error), count=1)
        raise type(error)(text if "--calibration" in text else f"--calibration {wanted.sources[0]}: {text}") from error
    items += [replace(item, id=f"{item.id}.{n}", prompt=prompt) for n, prompt in enumerate(others) for item in [*items]]
    items.sort(key=lambda item: hashlib.sha256(f"{wanted.seed} {digest_of([item])}".encode()).digest())
    # No document is on both sides.
    groups = list(dict.fromkeys(tuple(item.document_sha256s) for item in items))
    held = groups[len(groups) - min(len(groups) // _HELD_OUT, _MOST_HELD_OUT) :]
    held_out = [item for item in items if tuple(item.document_sha256s) in held]
    calibration = [item for item in items if set().union(*held).isdisjoint(item.document_sha256s)]
    return calibration[: wanted.num_samples], held_out[: wanted.num_samples], source


def digest_of(items: Sequence[Item]) -> str:
    """Return a digest of documents and prompts."""
    facts = [[item.document_sha256s, item.prompt_sha256] for item in items]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _open_workload(source: Source, on_problem: OnProblem) -> Workload:
    """Return a workload in which a dataset with fewer questions than are wanted is not repeated."""
    workload = load_workload(source, on_problem=on_problem)
    return workload if workload.dataset is None else replace(workload, items=workload.items[: workload.dataset.used])
