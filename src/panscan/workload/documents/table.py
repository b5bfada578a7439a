"""Tables of figures. Layouts: a dark head, ruled rows, a grid; and striped rows under a light head, held out."""

from __future__ import annotations

from random import Random

from panscan.workload.documents.sheet import Document, Sheet
from panscan.workload.documents.words import GOODS, MONTHS, TOWNS

LAYOUTS = 4
"""The last one is held out."""

_MONTHS = tuple(month[:3] for month in MONTHS)
_YEARS = tuple(str(year) for year in range(1996, 2034))
_TOPICS = ("Units sold", "Visitors", "Hours worked", "Rainfall, mm", "Parcels", "Books lent", "Stock")


class _Grid:
    """Where the cells of a table lie: a column of row labels, then columns of equal width."""

    def __init__(self, sheet: Sheet, label_width: float, columns: int) -> None:
        self.sheet, self.columns = sheet, columns
        self.margin = 0.04 * sheet.height
        self._left = self.margin + label_width + 0.6 * sheet.style.size
        self._pitch = (sheet.width - self.margin - self._left) / columns

    def right_of(self, column: int) -> float:
        """Right edge of a column's text."""
        return self._left + self._pitch * (column + 1) - 0.2 * self.sheet.style.size

    def bottom(self, row: int) -> float:
        """Lower edge of a row; row 0 is the first one below the column labels."""
        return (row + 3.65) * self.sheet.step

    def bar(self, row: int, colour: str) -> None:
        bottom = self.bottom(row)
        box = (self.margin * 0.6, bottom - self.sheet.step + 1, self.sheet.width - self.margin * 0.6, bottom)
        self.sheet.draw.rectangle(box, fill=colour)

    def rule(self, row: int) -> None:
        """Below a row."""
        self.sheet.rule(self.margin * 0.6, self.sheet.width - self.margin * 0.6, round(self.bottom(row)))

    def row(self, row: int, label: str, cells: list[str], *, fill: str | None = None, bold: bool = False) -> None:
        baseline = self.bottom(row) - 0.3 * self.sheet.step
        if label:
            self.sheet.text(self.margin, baseline, label, fill=fill, bold=bold)
        for column, text in enumerate(cells):
            self.sheet.text(self.right_of(column), baseline, text, anchor="rs", fill=fill, bold=bold)


def _draw_table(grid: _Grid, layout: int, heads: list[str], rows: dict[str, list[str]]) -> None:
    style = grid.sheet.style
    if layout in (0, 3):
        grid.bar(-1, style.accent if layout == 0 else style.light)
    else:
        grid.rule(-1)
    grid.row(-1, "", heads, fill="#ffffff" if layout == 0 else None, bold=layout != 1)
    for index, (label, texts) in enumerate(rows.items()):
        if layout == 3 and index % 2:
            grid.bar(index, style.light)
        grid.row(index, label, texts)
        if layout in (1, 2):
            grid.rule(index)
    if layout == 2:
        top, bottom = 2.3 * grid.sheet.step, round(grid.bottom(len(rows) - 1))
        for column in range(-1, grid.columns):
            x = round(grid.right_of(column) + 0.35 * style.size)
            grid.sheet.draw.line((x, top, x, bottom), fill=style.grey)


def _heads(rng: Random, sheet: Sheet, count: int) -> list[str]:
    pool = rng.choice((_MONTHS, _YEARS, ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"), None))
    if pool is not None and count <= len(pool):
        start = rng.randrange(len(pool) - count + 1)
        return list(pool[start : start + count])
    return sheet.new_names(rng, count, rng.choice((GOODS, TOWNS)), 3.6 * sheet.style.size, invented=0.3, bold=True)


def table(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A table that fills the sheet; ``layout`` is below :data:`LAYOUTS`. Figures of a table are all different."""
    count = max(2, min(14, int((sheet.height - 3.2 * sheet.step) / sheet.step)))
    labels = sheet.new_names(rng, count, rng.choice((GOODS, TOWNS)), 0.42 * sheet.height, invented=0.1, bold=True)
    label_width = max(sheet.long(label, bold=True) for label in labels)
    most = rng.choice((90, 900, 9000))
    gap = 0.9 * sheet.style.size
    cell = max(sheet.long(f"{most:,}", bold=True), 2.4 * sheet.style.size) + gap
    space = sheet.width * 0.92 - label_width
    heads = _heads(rng, sheet, max(2, min(9, int(space / cell))))
    widest = max(sheet.long(head, bold=True) for head in heads) + gap
    heads = heads[: max(2, int(space / max(cell, widest)))]
    values = iter(rng.sample(range(most // 10, most), min(len(heads) * count, most - most // 10)))
    rows = {label: [f"{next(values, most):,}" for _ in heads] for label in labels}
    title = rng.choice(_TOPICS)
    sheet.ask("What is the title?", "title", title)
    grid = _Grid(sheet, label_width, len(heads))
    sheet.text(grid.margin, 1.15 * sheet.step, title, 1.2, bold=True)
    _draw_table(grid, layout, heads, rows)
    for label, texts in rows.items():
        for head, text in zip(heads, texts, strict=True):
            answers = dict.fromkeys((text, text.replace(",", "")))
            sheet.ask(f"What is the value of {label} in {head}?", "cell", *answers)
    return sheet.document("table")
