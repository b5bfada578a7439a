"""Tables of figures. Layouts: a dark head, ruled rows, a grid; and striped rows under a light head, held out."""

from __future__ import annotations

from random import Random

from panscan.workload.documents.sheet import Document, Question, Sheet
from panscan.workload.documents.words import GOODS, MONTHS, TOWNS

LAYOUTS = 4
"""The last one is held out."""

_MONTHS = tuple(month[:3] for month in MONTHS)
_YEARS = tuple(str(year) for year in range(1996, 2034))
_TOPICS = ("Units sold", "Visitors", "Hours worked", "Rainfall, mm", "Parcels", "Books lent", "Stock")


class _Grid:
    """Where the cells of a table lie: a column of row labels, then columns of equal width."""

    def __init__(self, sheet: Sheet, labels: list[str], columns: int) -> None:
        self.sheet = sheet
        self.margin = 0.04 * sheet.height
        self.label_width = max(sheet.long(label, bold=True) for label in labels) + 0.6 * sheet.style.size
        self.columns = columns
        self.top = 1.6 * sheet.step

    def right_of(self, column: int) -> float:
        """Right edge of a column's text."""
        space = self.sheet.width - 2 * self.margin - self.label_width
        return self.margin + self.label_width + space * (column + 1) / self.columns - 0.2 * self.sheet.style.size

    def baseline(self, row: int) -> float:
        """Row 0 is the first one below the column labels."""
        return self.top + (row + 1.75) * self.sheet.step

    def bar(self, row: int, colour: str) -> None:
        base = self.baseline(row) + 0.3 * self.sheet.step
        box = (self.margin * 0.6, base - self.sheet.step + 1, self.sheet.width - self.margin * 0.6, base)
        self.sheet.draw.rectangle(box, fill=colour)

    def rule(self, row: int) -> None:
        """Below a row."""
        y = round(self.baseline(row) + 0.3 * self.sheet.step)
        self.sheet.rule(self.margin * 0.6, self.sheet.width - self.margin * 0.6, y)

    def row(self, row: int, label: str, cells: list[str], *, fill: str | None = None, bold: bool = False) -> None:
        if label:
            self.sheet.text(self.margin, self.baseline(row), label, fill=fill, bold=bold)
        for column, text in enumerate(cells):
            self.sheet.text(self.right_of(column), self.baseline(row), text, anchor="rs", fill=fill, bold=bold)


def _draw_table(grid: _Grid, layout: int, heads: list[str], labels: list[str], cells: list[list[str]]) -> None:
    style = grid.sheet.style
    if layout == 0:
        grid.bar(-1, style.accent)
    elif layout == 3:
        grid.bar(-1, style.light)
    else:
        grid.rule(-1)
    grid.row(-1, "", heads, fill="#ffffff" if layout == 0 else None, bold=layout != 1)
    for index, (label, texts) in enumerate(zip(labels, cells, strict=True)):
        if layout == 3 and index % 2:
            grid.bar(index, style.light)
        grid.row(index, label, texts, bold=label == "Total")
        if layout in (1, 2):
            grid.rule(index)
    if layout == 2:
        bottom = round(grid.baseline(len(labels) - 1) + 0.3 * grid.sheet.step)
        for column in range(-1, grid.columns):
            x = round(grid.right_of(column) + 0.35 * style.size)
            grid.sheet.draw.line((x, grid.top + grid.sheet.step * 0.7, x, bottom), fill=style.grey)


def _heads(rng: Random, sheet: Sheet, count: int, invented: float) -> list[str]:
    pool = rng.choice((_MONTHS, _YEARS, ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"), None))
    if pool is not None and count <= len(pool):
        start = rng.randrange(len(pool) - count + 1)
        return list(pool[start : start + count])
    limit = 6.0 * sheet.style.size * 0.6
    return sheet.names(rng, count, rng.choice((GOODS, TOWNS)), max(invented, 0.3), limit, bold=True)


def table(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """A table that fills the sheet; ``layout`` is below :data:`LAYOUTS`. Figures of a table are all different."""
    rows = max(2, min(14, int((sheet.height - 3.2 * sheet.step) / sheet.step)))
    labels = sheet.names(rng, rows, rng.choice((GOODS, TOWNS)), max(invented, 0.1), 0.42 * sheet.height, bold=True)
    most = rng.choice((90, 900, 9000))
    cell = max(sheet.long(f"{most:,}", bold=True), 2.4 * sheet.style.size) + 0.9 * sheet.style.size
    space = sheet.width * 0.92 - max(sheet.long(label, bold=True) for label in labels)
    heads = _heads(rng, sheet, max(2, min(9, int(space / cell))), invented)
    widest = max(sheet.long(head, bold=True) for head in heads) + 0.9 * sheet.style.size
    heads = heads[: max(2, int(space / max(cell, widest)))]
    grid = _Grid(sheet, labels, len(heads))
    values = iter(rng.sample(range(most // 10, most), min(len(heads) * rows, most - most // 10)))
    figures = [[next(values, most) for _ in heads] for _ in labels]
    title = rng.choice(_TOPICS)
    sheet.text(grid.margin, 1.15 * sheet.step, title, 1.2, bold=True)
    _draw_table(grid, layout, heads, labels, [[f"{value:,}" for value in row] for row in figures])
    questions = [Question("What is the title?", (title,), "title")]
    for r, label in enumerate(labels):
        for c, head in enumerate(heads):
            value = figures[r][c]
            answers = tuple(dict.fromkeys((f"{value:,}", str(value))))
            questions.append(Question(f"What is the value of {label} in {head}?", answers, "cell"))
    return sheet.document("table", questions)
