"""The gallery of a run: an HTML page of its images, the views of each setting, and the answers with their scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from os.path import commonpath, relpath
from pathlib import Path

from markupsafe import Markup, escape
from PIL import Image, ImageDraw

from panscan.analysis.cells import cell_names
from panscan.core import InputError, RecordsError, SettingError
from panscan.core.groups import grouped
from panscan.images.draw import COLOURS
from panscan.images.encode import data_url, encoded_image
from panscan.images.files import open_image, page_digest, page_named
from panscan.images.views import ViewPlan, plan_views
from panscan.records.quality import metric_of, metric_title
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.report import draw
from panscan.report.definitions import weights_note
from panscan.report.formatting import templates
from panscan.settings import recorded_settings

_IMAGE_SIZE = (460, 620)  # maximum width and height of an image in pixels
_TILE = 192  # maximum side of a view in pixels
_MAX_DOCUMENTS = 200  # per page
_MAX_VIEWS = 8  # per image
_LONGEST_MARKED = 200  # maximum length in characters of an answer whose differences are marked


@dataclass(frozen=True, slots=True)
class Answer:
    """A cell's answer (None: the request failed), and its score by the run's metric (None: not scored)."""

    cell: str
    text: str | None
    score: float | None
    views: int


@dataclass(frozen=True, slots=True)
class QuestionAnswers:
    """One question about a document, its accepted answers, and the answer of each cell."""

    question: str
    expected: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def differs(self) -> bool:
        """Return whether some cells score better than others."""
        return len({answer.score for answer in self.answers}) > 1


@dataclass(frozen=True, slots=True)
class CellViews:
    """The views of an image in cells that have the same views.

    Args:
        cells: names of the cells.
        tiles: data URLs of the views, squashed as the model reads them; the whole image first.
        more: number of further views.
    """

    cells: tuple[str, ...]
    tiles: tuple[str, ...]
    more: int

    @property
    def views(self) -> int:
        """Return the number of views."""
        return len(self.tiles) + self.more


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a data URL, and its views by cell. Cells whose views could not be recomputed are left out."""

    url: str
    cell_views: tuple[CellViews, ...]


@dataclass(frozen=True, slots=True)
class GalleryEntry:
    """A document, its images (None: moved or changed since the run) and its questions."""

    name: str
    pictures: tuple[Picture | None, ...]
    questions: tuple[QuestionAnswers, ...]


def entries_of(run: Run) -> tuple[dict[str, str], list[GalleryEntry]]:
    """Return the names of the cells by id, and all documents, those with different scores first.

    The answers are those of the first repeat and replica.

    Raises:
        RecordsError: no request is finished, or the run was made without ``--include-content``.
    """
    records = [
        record for batch in run.requests.values() for record in batch if record.repeat == 0 and record.replica == 0
    ]
    if not records:
        raise RecordsError(f"{run.path.parent}: no request is finished yet")
    if all(record.content is None for record in records):
        raise RecordsError(f"{run.path.parent}: its records hold no answers: measure with --include-content")
    used = {record.cell for record in records}
    cells = {cell: name for cell, name in cell_names(run).items() if cell in used}
    short = _short_names({name for record in records for name in record.image})
    by_document = grouped((tuple(record.image), record) for record in records if record.content is not None)
    entries = [_entry(run, names, group, cells, short) for names, group in by_document.items()]
    entries.sort(key=lambda one: not any(question.differs for question in one.questions))
    return cells, entries


def _short_names(names: Collection[str]) -> dict[str, str]:
    """Return each file name relative to the directory that all files share."""
    files = [name for name in names if "://" not in name]
    try:
        shared = commonpath([Path(name).parent for name in files])
    except ValueError:  # no file, or absolute and relative names
        return {}
    return {name: relpath(name, shared) for name in files} if shared != "." else {}


def _entry(
    run: Run, names: tuple[str, ...], group: Sequence[RequestRecord], cells: Mapping[str, str], short: Mapping[str, str]
) -> GalleryEntry:
    by_question: dict[tuple[str, tuple[str, ...]], dict[str, Answer]] = {}
    for record in group:  # a dataset may repeat a question with different answers
        assert record.content is not None  # as the caller sees to
        question = (record.content.prompt, tuple(record.content.answers))
        text = None if record.error is not None else record.content.answer
        answer = Answer(record.cell, text, record.scores.get(metric_of(run)), record.views or 0)
        by_question.setdefault(question, {}).setdefault(record.cell, answer)
    questions = [
        QuestionAnswers(question, expected, tuple(answers[cell] for cell in cells if cell in answers))
        for (question, expected), answers in by_question.items()
    ]
    questions.sort(key=lambda one: not one.differs)
    sizes = [f" ({width} x {height})" for width, height in group[0].image_size] or [""] * len(names)
    called = [short.get(name, name) + size for name, size in zip(names, sizes, strict=False)]
    images = [_unchanged_image(name, digest) for name, digest in zip(names, group[0].image_sha256, strict=True)]
    views = {record.cell: record.views or 0 for record in group if record.error is None}
    pictures = _pictures(run, images, views, cells)
    return GalleryEntry(", ".join(called) or "without an image", pictures, tuple(questions))


def _unchanged_image(name: str, digest: str) -> Image.Image | None:
    """Return an image, or None if its file has moved or changed since the run. URLs are not fetched."""
    if "://" in name:
        return None
    try:
        page = page_named(name)
        if page_digest(page) != digest:
            return None
        return open_image(page).convert("RGB")
    except InputError:
        return None


def _pictures(
    run: Run, images: Sequence[Image.Image | None], views: Mapping[str, int], names: Mapping[str, str]
) -> tuple[Picture | None, ...]:
    """Return the images with their views by cell.

    Skip cells whose recomputed view count differs from the recorded one.
    """
    recomputed = {cell: _plans(run, cell, images) for cell in names if cell in views}
    pictures: list[Picture | None] = []
    for index, image in enumerate(images):
        by_plan = grouped(
            (plans[index], cell)
            for cell, plans in recomputed.items()
            if sum(len(plan.views) for plan in plans) == views[cell]
        )
        pictures.append(None if image is None else _picture(run, image, by_plan, names))
    return tuple(pictures)


def _plans(run: Run, cell: str, images: Sequence[Image.Image | None]) -> list[ViewPlan]:
    """Return the view plan of each available image in a cell; empty if the cell's settings are unknown."""
    try:
        pan_and_scan = recorded_settings(run.cells[cell].settings).pan_and_scan
        return [plan_views(*image.size, pan_and_scan) for image in images if image is not None]
    except (SettingError, TypeError):
        return []


def _picture(
    run: Run, image: Image.Image, by_plan: Mapping[ViewPlan, Sequence[str]], names: Mapping[str, str]
) -> Picture:
    shown = image.copy()
    shown.thumbnail(_IMAGE_SIZE, Image.Resampling.LANCZOS)
    most = max(by_plan, key=lambda plan: plan.crops, default=None)
    if most is not None:
        pen, scale = ImageDraw.Draw(shown), (shown.width / most.width, shown.height / most.height)
        for number, view in enumerate(most.views[1:]):
            left, top, right, bottom = (edge * scale[side % 2] for side, edge in enumerate(view.box))
            pen.rectangle((left, top, right - 1, bottom - 1), outline=COLOURS[number % len(COLOURS)], width=3)
    cell_views = tuple(
        CellViews(
            tuple(names[cell] for cell in cells),
            tuple(_tile(image, plan, index, _side(run, cells[0])) for index in range(len(plan.views))[:_MAX_VIEWS]),
            max(0, len(plan.views) - _MAX_VIEWS),
        )
        for plan, cells in sorted(by_plan.items(), key=lambda pair: pair[0].crops)
    )
    return Picture(_jpeg_url(shown), cell_views)


def _side(run: Run, cell: str) -> int:
    """Return the side of a view in pixels: the model's image size, at most :data:`_TILE`."""
    load = run.loads.get(cell)
    vision = {} if load is None or load.shape is None else load.shape.get("vision") or {}
    return min(_TILE, vision.get("image_size") or _TILE)


def _tile(image: Image.Image, plan: ViewPlan, index: int, side: int) -> str:
    """Return the data URL of a view squashed to a square, as the model reads it; crops have a frame in their colour."""
    tile = image.resize((side, side), Image.Resampling.BILINEAR, box=plan.views[index].box)
    if index:
        pen = ImageDraw.Draw(tile)
        pen.rectangle((0, 0, side - 1, side - 1), outline=COLOURS[(index - 1) % len(COLOURS)], width=3)
    return _jpeg_url(tile)


def _jpeg_url(image: Image.Image) -> str:
    return data_url("image/jpeg", encoded_image(image, "JPEG", quality=80))


def marked(answer: Answer, expected: Sequence[str]) -> Markup:
    """Return a wrong answer with ``<mark>`` around its differences from the closest accepted one, others unmarked."""
    text = answer.text or ""
    if not expected or answer.score is None or answer.score == 1 or len(text) > _LONGEST_MARKED:
        return escape(text)
    compared = {answer_text: SequenceMatcher(None, answer_text, text, autojunk=False) for answer_text in expected}
    closest = max(expected, key=lambda answer_text: compared[answer_text].ratio())
    parts = []
    for kind, start, end, low, high in compared[closest].get_opcodes():
        if kind == "equal":
            parts.append(escape(text[low:high]))
        else:
            missing = Markup(' title="expected: {}"').format(closest[start:end]) if end > start else ""
            parts.append(Markup("<mark{}>{}</mark>").format(missing, text[low:high] or "…"))
    return Markup("").join(parts)


def render_gallery(run: Run) -> str:
    """Return the gallery as one HTML page with embedded images; at most 200 documents.

    Raises:
        RecordsError: as :func:`entries_of`.
    """
    cells, entries = entries_of(run)
    return (
        templates()
        .get_template("gallery.html.j2")
        .render(
            cells=cells,
            metric=metric_title(run),
            note=weights_note(run),
            documents=entries[:_MAX_DOCUMENTS],
            left_out=max(0, len(entries) - _MAX_DOCUMENTS),
            totals=_totals(cells, entries),
            light=draw.LIGHT,
            dark=draw.DARK,
            url=Markup,  # safe: the data URLs built above
            marked=marked,
        )
    )


def _totals(cells: dict[str, str], entries: Sequence[GalleryEntry]) -> list[tuple[str, float | None, int, float]]:
    """Return the id, mean score, number of scored questions and mean view count of each cell."""
    totals = []
    for cell in cells:
        answers = [a for one in entries for question in one.questions for a in question.answers if a.cell == cell]
        scores = [answer.score for answer in answers if answer.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        totals.append((cell, mean, len(scores), sum(answer.views for answer in answers) / max(1, len(answers))))
    return totals
