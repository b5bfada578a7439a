"""Tables, declared once and written to the terminal, markdown, HTML and CSV.

A :class:`Column` reads its cell from a row, which is any object; a :class:`Table` is columns and rows. HTML is written
by ``templates/table.html.j2``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from panscan.core.text import clean, cut, decimal_places, number_text, percent
from panscan.records.metrics import Metrics
from panscan.records.quality import Quality
from panscan.report.formatting import safe_text

if TYPE_CHECKING:
    from rich.console import Console


Row = TypeVar("Row")
_SPECIAL = re.compile(r"([\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_]))")  # a single _ within a word is literal
_MENTION = re.compile(r"(?<=[@#])(?=\w)")
_NARROWEST_NAME, _WIDE_NAME = 16, 36  # characters; narrower columns of names are hard to read, wider ones fold
_NARROWEST_LABEL = 24  # characters of the first column of aligned lines
ESSENTIAL = 10
"""Columns that are left out (see :attr:`Column.spare`) to show names beside figures have lower numbers."""


class Medium(Flag):
    """Where a table is written, so that a column can say where it is shown."""

    NONE = 0
    TERMINAL = auto()
    MARKDOWN = auto()
    HTML = auto()
    CSV = auto()
    PAGES = MARKDOWN | HTML
    ALL = TERMINAL | MARKDOWN | HTML | CSV


@dataclass(frozen=True, slots=True)
class TableCell:
    """What a row shows in a column.

    Args:
        text: in every writer without a specific text.
        value: the number behind it, for sorting in HTML and for CSV; None: the text.
        bounds: 95% interval, below the text in HTML.
        full: the whole name where ``text`` is shortened.
        terminal: text on the terminal.
        markdown: markdown, escaped already.
        style: of the text on the terminal.
    """

    text: str
    value: float | None = None
    bounds: str = ""
    full: str = ""
    terminal: str = ""
    markdown: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: its value (None if it was not measured), its 95% interval if there is one, and whether the samples
    are too few to certify it."""

    value: float | None
    low: float | None = None
    high: float | None = None
    uncertified: bool = False

    @property
    def text(self) -> str:
        return ("~" if self.uncertified else "") + number_text(self.value)

    @property
    def bounds(self) -> str:
        """``low–high``, or nothing."""
        return "" if self.low is None or self.high is None else f"{number_text(self.low)}–{number_text(self.high)}"

    @property
    def whole(self) -> str:
        """The value with its interval in parentheses."""
        return f"{self.text} ({self.bounds})" if self.bounds else self.text

    @property
    def half(self) -> str:
        """The value ± half of its interval; with the bounds of one that is too wide and lopsided for a half."""
        if self.value is None or self.low is None or self.high is None:
            return self.text
        if self.high - self.low > self.value:
            return self.whole
        return f"{self.text}±{(self.high - self.low) / 2:,.{decimal_places(self.value)}f}"


Content: TypeAlias = TableCell | Measured | str | float | None


def measured(metrics: Metrics | None, name: str) -> Measured:
    """A metric of a cell, by its name in :data:`panscan.records.metrics.COLUMNS`."""
    if metrics is None:
        return Measured(None)
    low, high = metrics.intervals.get(name, (None, None))
    return Measured(metrics.values[name], low, high, name in metrics.uncertified)


def with_interval(figure: Measured, *, terminal: bool = True) -> TableCell:
    """A figure with its interval in markdown, too, and with half of it on the terminal."""
    half = figure.half if terminal else ""
    return replace(_cell(figure), terminal=half, markdown=plain_text(figure.whole))


def share_cell(part: float, total: float) -> TableCell:
    """A part in percent of the whole."""
    share = part / total if total > 0 else 0.0
    return TableCell(percent(share), share)


def quality_cell(quality: Quality | None) -> TableCell:
    """A share of right answers: ``71.2% (68.9%–73.4%)``, or a dash."""
    if quality is None:
        return TableCell("-")
    low, high, mean = quality.low, quality.high, percent(quality.mean)
    bounds = f"{percent(low)}–{percent(high)}"
    terminal = f"{mean} ({100 * low:.0f}-{100 * high:.0f})"
    return TableCell(mean, quality.mean, f"{bounds} of {quality.questions}", "", terminal, f"{mean} ({bounds})")


def _cell(content: Content) -> TableCell:
    if isinstance(content, TableCell):
        return content
    if isinstance(content, str):
        return TableCell(content)
    if isinstance(content, Measured):
        return TableCell(content.text, content.value, content.bounds)
    return TableCell(str(content) if isinstance(content, int) else number_text(content), content)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table.

    Args:
        title: heading with its unit; its line breaks are for the terminal.
        read: the cell of a row: text, a number, a figure with its interval, or a :class:`TableCell`.
        on: the media that show it.
        text: the media that align it as text, to the left, and fold it on the terminal.
        optional: the media that leave it out if no row fills it.
        terminal: heading on the terminal, if another one.
        markdown: heading in markdown, if another one.
        spare: narrow terminals leave the columns with the lowest numbers out first, those from :data:`ESSENTIAL` on
            only where a figure would be cut; 0: it always stays.
    """

    title: str
    read: Callable[[Row], Content]
    on: Medium = Medium.ALL
    text: Medium = Medium.NONE
    optional: Medium = Medium.NONE
    terminal: str = ""
    markdown: str = ""
    spare: int = 0

    @property
    def is_text(self) -> bool:
        """Whether HTML aligns it as text."""
        return Medium.HTML in self.text

    def heading(self, medium: Medium, *, narrow: bool = False) -> str:
        """Return its heading; on the terminal with line breaks, if ``narrow`` also at each space of the title."""
        if medium is Medium.TERMINAL:
            wrapped = self.title.replace(" ", "\n") if narrow and "\n" not in self.title else self.title
            return self.terminal or wrapped
        return (medium is Medium.MARKDOWN and self.markdown) or self.title.replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Grid:
    """The shown columns of a table, and a list of cells for each row."""

    columns: tuple[Column[Any], ...]
    lines: tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """Columns and rows.

    Args:
        columns: in their order.
        rows: the objects that the columns read.
        title: heading above it.
        note: a sentence on it; empty: none.
        sparse: the media that leave out every column that no row fills.
        aligned: whether markdown aligns figures to the right.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""
    note: str = ""
    sparse: Medium = Medium.NONE
    aligned: bool = False

    def grid(self, medium: Medium) -> Grid:
        """Return what a writer shows."""
        columns, cells = [], []
        for column in self.columns:
            if medium in column.on:
                read = [_cell(column.read(row)) for row in self.rows]
                shown = [cell.terminal or cell.text if medium is Medium.TERMINAL else cell.text for cell in read]
                if medium not in column.optional | self.sparse or any(text not in ("-", "0") for text in shown):
                    columns.append(column)
                    cells.append(read)
        return Grid(tuple(columns), tuple(zip(*cells, strict=True)))

    @property
    def html(self) -> Grid:
        """Return what ``templates/table.html.j2`` writes."""
        return self.grid(Medium.HTML)

    def markdown(self) -> str:
        """Return a GitHub-flavoured markdown table; cells are escaped."""
        grid = self.grid(Medium.MARKDOWN)
        head = [plain_text(column.heading(Medium.MARKDOWN)) for column in grid.columns]
        rows = ([cell.markdown or plain_text(cell.text) for cell in line] for line in grid.lines)
        rule = ["--:" if self.aligned and Medium.MARKDOWN not in column.text else "---" for column in grid.columns]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))

    def csv(self) -> str:
        """Return the table as CSV: a line of titles, then numbers in full."""
        grid, text = self.grid(Medium.CSV), io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(column.heading(Medium.CSV) for column in grid.columns)
        writer.writerows([cell.text if cell.value is None else cell.value for cell in line] for line in grid.lines)
        return text.getvalue()

    def lines(self, width: int) -> list[str]:
        """Return aligned lines of text below the title; only the first column is cut to the width."""
        grid = self.grid(Medium.TERMINAL)
        rows = [[column.title for column in grid.columns], *([cell.text for cell in line] for line in grid.lines)]
        sizes = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
        spare = width - sum(sizes[1:]) - 2 * (len(sizes) - 1)
        sizes[0] = max(_NARROWEST_LABEL, min(sizes[0], spare))
        written = [self.title]
        for first, *others in rows:
            figures = (text.rjust(size) for text, size in zip(others, sizes[1:], strict=True))
            written.append("  ".join([cut(first, sizes[0]).ljust(sizes[0]), *figures]).rstrip())
        return written + ([self.note] if self.note else [])


def table_of(
    titles: Sequence[str], rows: Sequence[Sequence[Content]], texts: int = 1, *, title: str = "", note: str = ""
) -> Table[Sequence[Content]]:
    """Return a table of rows that have a cell for each title; the first ``texts`` columns are texts, not figures."""
    aligned = [Medium.ALL] * texts + [Medium.NONE] * (len(titles) - texts)
    columns: list[Column[Sequence[Content]]] = [
        Column(heading, itemgetter(index), text=aligned[index]) for index, heading in enumerate(titles)
    ]
    return Table(columns, rows, title, note)


def plain_text(text: str) -> str:
    """Return a line of text escaped to render literally in markdown: no markup, no mentions, no references."""
    return _MENTION.sub("<!-- -->", _SPECIAL.sub(r"\\\1", clean(text)))


def print_table(
    table: Table[Any],
    console: Console,
    *,
    frame: Literal["rule", "none", "full"] = "rule",
    gap: int = 1,
    fit: bool = False,
) -> None:
    """Print a table.

    Args:
        table: the table.
        console: the terminal.
        frame: a rule below the headings, which break at each space; no line; or lines around every cell.
        gap: spaces between columns, besides those of the frame.
        fit: leave out spare columns on a narrow terminal, and fold the names of the first column.
    """
    from rich import box
    from rich.table import Table as RichTable

    grid = table.grid(Medium.TERMINAL)
    room: int | None = None
    if fit:
        grid, room = _fitted(grid, console.width)
    if frame == "full":
        rich_table = RichTable()
    else:
        line = box.SIMPLE_HEAD if frame == "rule" else None
        rich_table = RichTable(box=line, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)
    for index, column in enumerate(grid.columns):
        text = Medium.TERMINAL in column.text
        rich_table.add_column(
            safe_text(console, column.heading(Medium.TERMINAL, narrow=frame == "rule")),
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold" if text else "ellipsis",
            width=None if index else room,
        )
    for cells in grid.lines:
        texts = [safe_text(console, cell.terminal or cell.text) for cell in cells]
        for cell, content in zip(cells, texts, strict=True):
            content.stylize(cell.style)
        rich_table.add_row(*texts)
    console.print(rich_table)


def _fitted(grid: Grid, width: int) -> tuple[Grid, int]:
    """Return what fits a terminal, and the width of the names in the first column, which fold."""
    widest = max(len(name) for name in (*grid.columns[0].title.split("\n"), *(cells[0].text for cells in grid.lines)))
    grid = _narrowed(grid, width - min(widest, _WIDE_NAME) - 1, range(1, ESSENTIAL))
    grid = _narrowed(grid, width - min(widest, _NARROWEST_NAME), range(1, 100))
    return grid, min(widest, max(_figures_width(grid), width) - _figures_width(grid)) or 1


def _narrowed(grid: Grid, room: int, spare: range) -> Grid:
    """Return a grid without the spare columns for whose figures there is no room, the lowest numbers first."""
    columns = [column for column in grid.columns if column.spare in spare]
    for column in sorted(columns, key=lambda column: column.spare):
        if _figures_width(grid) > room:
            remaining = [index for index, other in enumerate(grid.columns) if other is not column]
            lines = tuple(tuple(cells[index] for index in remaining) for cells in grid.lines)
            grid = Grid(tuple(grid.columns[index] for index in remaining), lines)
    return grid


def _figures_width(grid: Grid) -> int:
    """Return the characters of all columns but the first, with the spaces before each."""
    texts = [[cell.terminal or cell.text for cell in cells[1:]] for cells in grid.lines]
    headings = [column.heading(Medium.TERMINAL, narrow=True).split("\n") for column in grid.columns[1:]]
    return sum(max(map(len, (*lines, *column))) + 1 for lines, *column in zip(headings, *texts, strict=True)) + 1
