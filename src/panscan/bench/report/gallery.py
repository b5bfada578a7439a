"""The answers of a run beside their pictures: which cell read what, right or wrong."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from markupsafe import Markup
from PIL import Image

from panscan.bench.records import Record, Run
from panscan.bench.report import palette
from panscan.bench.report.page import templates
from panscan.bench.rows import distinguishing, label, meant
from panscan.bench.scores import exact_match
from panscan.core import InputError, RecordsError
from panscan.images.files import find_pages, load_page, page_digest

__all__ = ["Answer", "Asked", "Pictured", "pictures_of", "render_gallery"]

_SHOWN = (460, 620)  # pixels, the largest width and height of a picture
_MOST = 200  # documents on a page


@dataclass(frozen=True, slots=True)
class Answer:
    """What a cell said (None: it failed), and whether it was right (None: there is no known answer)."""

    cell: str
    text: str | None
    right: bool | None
    views: int
    e2e_ms: float | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a picture with its accepted answers."""

    question: str
    expected: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def differs(self) -> bool:
        """Whether some cells are right and others are not."""
        return len({answer.right for answer in self.answers}) > 1


@dataclass(frozen=True, slots=True)
class Pictured:
    """A document, its picture as a data URL (None: not found where the run found it, or changed since)."""

    name: str
    size: tuple[int, int] | None
    picture: str | None
    asked: tuple[Asked, ...]


def pictures_of(run: Run) -> tuple[dict[str, str], list[Pictured]]:
    """Names of the cells by id, and every document with its questions; those on which cells differ come first.

    Raises:
        RecordsError: the run was made without ``--include-content``, or nothing is finished.
    """
    records = [record for batch in run.requests.values() for record in batch if record["repeat"] == 0]
    if not records:
        raise RecordsError(f"{run.path.parent}: no request is finished yet")
    if not any("content" in record for record in records):
        raise RecordsError(f"{run.path.parent}: its records hold no answers: measure with --include-content")
    cells = _names(run, {record["cell"] for record in records})
    by_document: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if "content" in record:
            by_document.setdefault(tuple(record["image"]), []).append(record)
    found = [_pictured(names, group, list(cells)) for names, group in by_document.items()]
    found.sort(key=lambda one: not any(asked.differs for asked in one.asked))
    return cells, found


def _names(run: Run, used: set[str]) -> dict[str, str]:
    settings = {cell: value for cell, value in run.cells.items() if cell in used}
    varying = distinguishing(list(settings.values()))
    return {cell: label({name: meant(value).get(name) for name in varying}) or cell for cell, value in settings.items()}


def _pictured(names: tuple[str, ...], group: Sequence[Record], order: Sequence[str]) -> Pictured:
    by_question: dict[str, list[Record]] = {}
    for record in group:
        by_question.setdefault(record["content"]["prompt"], []).append(record)
    asked = []
    for question, records in by_question.items():
        expected = tuple(records[0]["content"]["answers"])
        answers = [_answer(record, expected) for record in records]
        asked.append(Asked(question, expected, tuple(sorted(answers, key=lambda answer: order.index(answer.cell)))))
    asked.sort(key=lambda one: not one.differs)
    size = group[0].get("image_size") or [None]
    shown = tuple(size[0]) if size[0] else None
    return Pictured(", ".join(names), shown, _picture(names, group[0]["image_sha256"]), tuple(asked))


def _answer(record: Record, expected: tuple[str, ...]) -> Answer:
    text = None if record["error"] is not None else record["content"]["answer"]
    right = None if not expected else text is not None and bool(exact_match(text, expected))
    stamps = record["stamps"]
    tokens = stamps.get("tokens") or []
    e2e = 1000 * (tokens[-1] - stamps["accepted"]) if tokens else None
    return Answer(record["cell"], text, right, record["views"], e2e)


def _picture(names: tuple[str, ...], digests: Sequence[str]) -> str | None:
    """The first picture of a question, small, if the file is still what the run read."""
    if not names or "://" in names[0]:  # a page that is looked at later must not fetch anything
        return None
    try:
        [page, *_] = find_pages([names[0]], on_problem=_leave_out)
        if page_digest(page) != digests[0]:
            return None
        image = load_page(page)
    except (InputError, ValueError):
        return None
    image = image.convert("RGB")
    image.thumbnail(_SHOWN, Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{b64encode(buffer.getvalue()).decode()}"


def _leave_out(problem: InputError) -> None:
    raise problem


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
            documents=found[:_MOST],
            left_out=max(0, len(found) - _MOST),
            totals=_totals(cells, found),
            light=palette.LIGHT,
            dark=palette.DARK,
            picture=Markup,  # data URLs that were made above
        )
    )


def _totals(cells: dict[str, str], found: Sequence[Pictured]) -> list[tuple[str, int, int, float]]:
    """(cell, right, asked, mean views) of each cell."""
    totals: list[tuple[str, int, int, float]] = []
    for cell in cells:
        answers: list[Any] = [a for one in found for asked in one.asked for a in asked.answers if a.cell == cell]
        known = [answer for answer in answers if answer.right is not None]
        views = sum(answer.views for answer in answers) / max(1, len(answers))
        totals.append((cell, sum(answer.right for answer in known), len(known), views))
    return totals
