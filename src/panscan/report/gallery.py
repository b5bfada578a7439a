"""The answers of a run beside their pictures: which cell read what, right or wrong."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from markupsafe import Markup
from PIL import Image

from panscan.analysis.cells import distinguishing, label, told_of
from panscan.core import InputError, RecordsError
from panscan.images.files import load_page, page_digest, page_named
from panscan.records.quality import metric_of, metric_title
from panscan.records.store import Record, Run
from panscan.report import draw
from panscan.report.formatting import templates

__all__ = ["Answer", "Asked", "Pictured", "pictures_of", "render_gallery"]

_SHOWN = (460, 620)  # pixels, the largest width and height of a picture
_MOST = 200  # documents on a page


@dataclass(frozen=True, slots=True)
class Answer:
    """What a cell said (None: it failed), and its score by the run's metric (None: it has none)."""

    cell: str
    text: str | None
    score: float | None
    views: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about a document with its accepted answers."""

    question: str
    expected: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def differs(self) -> bool:
        """Whether some cells score better than others."""
        return len({answer.score for answer in self.answers}) > 1


@dataclass(frozen=True, slots=True)
class Pictured:
    """One or more images that were asked about together, each as a data URL (None: see :func:`_picture`)."""

    name: str
    pictures: tuple[str | None, ...]
    asked: tuple[Asked, ...]


def pictures_of(run: Run) -> tuple[dict[str, str], list[Pictured]]:
    """Names of the cells by id, and every document with its questions; those on which cells differ come first.

    Of several repeats and replicas the first one's answers are shown.

    Raises:
        RecordsError: the run was made without ``--include-content``, or nothing is finished.
    """
    records = [
        record
        for batch in run.requests.values()
        for record in batch
        if record["repeat"] == 0 and record.get("replica", 0) == 0
    ]
    if not records:
        raise RecordsError(f"{run.path.parent}: no request is finished yet")
    if not any("content" in record for record in records):
        raise RecordsError(f"{run.path.parent}: its records hold no answers: measure with --include-content")
    cells = _names(run, {record["cell"] for record in records})
    by_document: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if "content" in record:
            by_document.setdefault(tuple(record["image"]), []).append(record)
    found = [_pictured(names, group, list(cells), metric_of(run)) for names, group in by_document.items()]
    found.sort(key=lambda one: not any(asked.differs for asked in one.asked))
    return cells, found


def _names(run: Run, used: set[str]) -> dict[str, str]:
    settings = {cell: told_of(run, cell) for cell in run.cells if cell in used}
    varying = distinguishing(list(settings.values()))
    return {cell: label({name: value.get(name) for name in varying}) or cell for cell, value in settings.items()}


def _pictured(names: tuple[str, ...], group: Sequence[Record], order: Sequence[str], metric: str) -> Pictured:
    by_question: dict[tuple[str, tuple[str, ...]], dict[str, Answer]] = {}
    for record in group:  # a dataset may ask the same words twice, with other answers
        question = (record["content"]["prompt"], tuple(record["content"]["answers"]))
        by_question.setdefault(question, {}).setdefault(record["cell"], _answer(record, metric))
    asked = [
        Asked(question, expected, tuple(answers[cell] for cell in order if cell in answers))
        for (question, expected), answers in by_question.items()
    ]
    asked.sort(key=lambda one: not one.differs)
    sizes = group[0].get("image_size") or [None] * len(names)
    called = [f"{name} ({size[0]} x {size[1]})" if size else name for name, size in zip(names, sizes, strict=False)]
    digests = group[0]["image_sha256"]
    pictures = tuple(_picture(name, digest) for name, digest in zip(names, digests, strict=True))
    return Pictured(", ".join(called) or "without an image", pictures, tuple(asked))


def _answer(record: Record, metric: str) -> Answer:
    text = None if record["error"] is not None else record["content"]["answer"]
    score = None if text is None else record.get("scores", {}).get(metric)
    return Answer(record["cell"], text, score, record["views"])


def _picture(name: str, digest: str) -> str | None:
    """An image, small, if the file is where the run found it and still what the run read."""
    if "://" in name:  # a page that is looked at later must not fetch anything
        return None
    try:
        page = page_named(name)
        if page_digest(page) != digest:
            return None
        image = load_page(page)
    except InputError:
        return None
    image = image.convert("RGB")
    image.thumbnail(_SHOWN, Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{b64encode(buffer.getvalue()).decode()}"


def render_gallery(run: Run) -> str:
    """One HTML page, its pictures inside; at most 200 documents.

    Raises:
        RecordsError: see :func:`pictures_of`.
    """
    cells, found = pictures_of(run)
    return (
        templates()
        .get_template("gallery.html.j2")
        .render(
            cells=cells,
            metric=metric_title(run),
            documents=found[:_MOST],
            left_out=max(0, len(found) - _MOST),
            totals=_totals(cells, found),
            light=draw.LIGHT,
            dark=draw.DARK,
            picture=Markup,  # data URLs that were made above
        )
    )


def _totals(cells: dict[str, str], found: Sequence[Pictured]) -> list[tuple[str, float | None, int, float]]:
    """(cell, mean score, scored questions, mean views) of each cell."""
    totals: list[tuple[str, float | None, int, float]] = []
    for cell in cells:
        answers = [a for one in found for asked in one.asked for a in asked.answers if a.cell == cell]
        scores = [answer.score for answer in answers if answer.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        totals.append((cell, mean, len(scores), sum(answer.views for answer in answers) / max(1, len(answers))))
    return totals
