"""Wide tables in small print: quarterly figures with totals, and railway timetables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from panscan.images.documents.sheet import GREY, INK, Ask, Document, Sheet, choose
from panscan.images.documents.words import COMPANIES, GROCERIES, TOWNS, a_date, long_date

__all__ = ["table"]

_TOP = 112  # pixels above the column labels' baseline
_FOOT = 40
_THEMES = (("#1f4e79", "#eef3f8"), ("#3d5a45", "#f0f4ee"), ("#6b3f54", "#f7f0f3"))


class _Grid:
    """Where the cells of a table lie: a column of row labels, then columns of equal width."""

    def __init__(self, rng: Random, *, label_width: int) -> None:
        height = rng.randrange(448, 901, 4)
        self.size = rng.choice((13, 14, 15))
        self.step = self.size + 11
        self.width = round(min(height * rng.uniform(2.05, 3.45), 2700))
        self.rows = (height - _TOP - _FOOT) // self.step
        self.margin = 32
        self.label_width = label_width
        self.columns = (self.width - 2 * self.margin - label_width) // (7 * self.size)
        self.sheet = Sheet(self.width, height, rng.choice(("#ffffff", "#fdfcf8")))
        self.dark, self.light = rng.choice(_THEMES)
        self.strong: tuple[int, ...] = ()  # columns in bold

    def right_of(self, column: int) -> float:
        """Right edge of a column's text."""
        space = self.width - 2 * self.margin - self.label_width
        return self.margin + self.label_width + space * (column + 1) / self.columns - 8

    def baseline(self, row: int) -> int:
        """Row 0 is the first one below the column labels."""
        return _TOP + (row + 1) * self.step

    def title(self, title: str, note: str) -> None:
        self.sheet.text(self.margin, 48, title, 26, bold=True, fill=self.dark)
        self.sheet.text(self.margin, 74, note, self.size, fill=GREY)

    def _bar(self, row: int, colour: str) -> None:
        base = self.baseline(row) + self.size // 2 - 1
        edges = (self.margin - 8, base - self.step + 1, self.width - self.margin + 7, base)
        self.sheet.draw.rectangle(edges, fill=colour)

    def body(self, corner: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """Everything below the title: labels on a dark bar, rows striped."""
        self._bar(-1, self.dark)
        self._row(-1, corner, columns, fill="#ffffff", bold=True)
        for index, (label, texts) in enumerate(zip(rows, cells, strict=True)):
            if index % 2:
                self._bar(index, self.light)
            bold = label == "Total"
            if bold:
                top = self.baseline(index) - self.step + self.size // 2
                self.sheet.rule(self.margin - 8, self.width - self.margin + 7, top, weight=2, fill=self.dark)
            self._row(index, label, texts, bold=bold)

    def _row(self, row: int, label: str, texts: Sequence[str], *, fill: str = INK, bold: bool = False) -> None:
        y = self.baseline(row)
        self.sheet.text(self.margin, y, label, self.size, fill=fill, bold=bold)
        for column, text in enumerate(texts):
            self.sheet.text(
                self.right_of(column), y, text, self.size, anchor="rs", fill=fill, bold=bold or column in self.strong
            )


def _number(value: int) -> tuple[str, ...]:
    """As drawn, with a comma for thousands, and without it."""
    return tuple(dict.fromkeys((f"{value:,}", str(value))))


def _figures(rng: Random) -> Document:
    """Units sold of each article in each town; the last row and the last column are totals."""
    grid = _Grid(rng, label_width=190)
    goods = sorted(rng.sample(GROCERIES, grid.rows - 1))
    towns = sorted(rng.sample(TOWNS, grid.columns - 1))
    # All different, so that no two articles share the highest figure of a shop.
    pieces = iter(rng.sample(range(12, 2400), len(goods) * len(towns)))
    units = [[next(pieces) for _ in towns] for _ in goods]
    full = [[*row, sum(row)] for row in units]
    full.append([sum(column) for column in zip(*full, strict=True)])
    grid.title(
        f"Units sold by article and shop, {rng.choice(('first', 'second', 'third'))} quarter {rng.randint(2021, 2025)}",
        f"{rng.choice(COMPANIES)} · internal · all figures in pieces",
    )
    grid.strong = (len(towns),)
    columns, rows = [*towns, "Total"], [*goods, "Total"]
    grid.body("Article", columns, rows, [[f"{value:,}" for value in row] for row in full])
    asks = []
    for r, c in zip(rng.sample(range(len(goods)), 3), rng.sample(range(len(towns)), 3), strict=True):
        asks.append(Ask(f"What is the value of {goods[r]} in {towns[c]}?", _number(units[r][c]), "cell"))
        asks.append(Ask(f"What is the total of {goods[r]}?", _number(full[r][-1]), "row total"))
        asks.append(Ask(f"What is the total of {towns[c]}?", _number(full[-1][c]), "column total"))
    first, *others = asks
    column = rng.randrange(len(towns))
    best = max(range(len(goods)), key=lambda row: units[row][column])
    others.append(Ask(f"Which article sold most in {towns[column]}?", (goods[best],), "highest"))
    return grid.sheet.document("table", choose(rng, first, others))


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _timetable(rng: Random) -> Document:
    """Trains are columns, stations rows, and time runs down and to the right."""
    grid = _Grid(rng, label_width=150)
    stations = rng.sample(TOWNS, min(grid.rows, len(TOWNS)))
    travel = list(accumulate((rng.randint(3, 8) for _ in stations[1:]), initial=0))
    trains = [f"IR {number}" for number in sorted(rng.sample(range(2100, 2999), grid.columns))]
    start = 5 * 60 + rng.randrange(30)
    headway = (14 * 60) // grid.columns  # the last train is in before midnight
    leaves = [start + headway * column + rng.randrange(12) for column in range(grid.columns)]
    times = [[_clock(leave + minutes) for leave in leaves] for minutes in travel]
    grid.title(
        f"Timetable {stations[0]} to {stations[-1]}",
        f"Valid from {long_date(a_date(rng))} · Mondays to Fridays except on public holidays",
    )
    grid.body("Station", trains, stations, times)
    asks = []
    for row in rng.sample(range(len(stations)), 4):
        column = rng.randrange(len(trains))
        train, station, time = trains[column], stations[row], times[row][column]
        asks.append(Ask(f"At what time is train {train} at {station}?", (time,), "cell"))
        asks.append(Ask(f"Which train is at {station} at {time}?", (train,), "column"))
    return grid.sheet.document("table", choose(rng, asks[0], asks[1:]))


def table(rng: Random, variant: int) -> Document:
    """A table 448-900 pixels high and 2-3.5 times as wide, at most 2,700; ``variant`` picks figures or times."""
    return (_figures, _timetable)[variant % 2](rng)
