"""What the terminal and the report share: measured cells as rows, values and labels as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any

from panscan.bench.metrics import CellMetrics, cell_metrics
from panscan.bench.records import Run
from panscan.bench.verdict import Verdict, verdict_of
from panscan.settings import axes, foreign_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "Row",
    "cell_title",
    "count",
    "decimals",
    "distinguishing",
    "label",
    "meant",
    "measured_rows",
    "memory_metric",
    "number_text",
    "print_line",
    "safe_text",
    "short",
    "shown",
    "telling",
    "varying_names",
]

_ASCII = str.maketrans({"±": "+-", "█": "#", "─": "-", "│": "|"} | dict.fromkeys("┌┐└┘├┤┬┴┼", "+"))
_CROPS = "pan_and_scan_"


@dataclass(frozen=True, slots=True)
class Row:
    cell: str
    settings: Mapping[str, Any]
    metrics: CellMetrics
    verdict: Verdict
    preset: str | None = None


def measured_rows(run: Run) -> list[Row]:
    """The measured cells of a run. Crop settings of a cell without pan and scan are None: they mean nothing there.

    Raises:
        RecordsError: see :func:`panscan.bench.metrics.cell_metrics`.
    """
    measured = ((cell, settings, cell_metrics(run, cell)) for cell, settings in run.cells.items())
    return [
        Row(cell, meant(settings), metrics, verdict_of(run, cell), run.presets.get(cell))
        for cell, settings, metrics in measured
        if metrics is not None
    ]


def meant(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with None for those that mean nothing: crops without pan and scan, a checkpoint for random weights, a
    batch size for an engine, an engine's settings for other runners."""
    idle = () if settings.get("do_pan_and_scan", True) else tuple(name for name in settings if name.startswith(_CROPS))
    if settings.get("random_weights"):
        idle += ("model",)
    idle += _foreign(settings)
    return {name: None if name in idle else value for name, value in settings.items()}


def varying_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that differ between cells, in their order."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    return [name for name in names if len({shown(cell.get(name)) for cell in cells}) > 1]


def distinguishing(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The varying settings without those that differ only because they mean nothing in some cells (None there)."""
    return [name for name in varying_names(cells) if not _off_or_the_same(cells, name)]


def _off_or_the_same(cells: Sequence[Mapping[str, Any]], name: str) -> bool:
    if name.startswith(_CROPS):
        on = [cell for cell in cells if cell.get("do_pan_and_scan", True)]
    else:
        on = [cell for cell in cells if name not in _foreign(cell)]
        if len(on) == len(cells):
            return False
    return len({shown(cell.get(name)) for cell in on}) == 1


def _foreign(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that its runner does not have; the engine's attention, which has one value, stays."""
    runner = settings.get("runner", "generate")
    return tuple(name for name in foreign_settings(runner) if (runner, name) != ("engine", "attention"))


def telling(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that are the same wherever they mean anything, and worth saying: the model, and what is not default."""
    varying = distinguishing(cells)
    names = dict.fromkeys(name for cell in cells for name in cell if name not in varying)
    constant = {name: next((cell[name] for cell in cells if cell.get(name) is not None), None) for name in names}
    return {
        name: value
        for name, value in constant.items()
        if value is not None and (name == "model" or name not in axes() or value != axes()[name].default)
    }


def memory_metric(rows: Sequence[Row]) -> tuple[str, str]:
    """(metric, whose): the GPU's peak, or the process's (RSS) where a cell ran without a GPU."""
    if all(row.metrics.values["peak_allocated_bytes"] is not None for row in rows):
        return "peak_allocated_bytes", "GPU"
    return "peak_rss_bytes", "RSS"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: Any) -> str:
    """A setting's value."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cell_title(cell: str, settings: Mapping[str, Any], varying: Sequence[str]) -> str:
    """``id (name=value, ...)``: a cell and the settings that tell it from others, without those that mean nothing."""
    told = {name: settings.get(name) for name in varying if settings.get(name) is not None or _may_be_off(name)}
    return f"{cell} ({label(told)})" if told else cell


def _may_be_off(name: str) -> bool:
    return name in axes() and axes()[name].optional


def short(name: str) -> str:
    """A setting's name without the prefix that four of them share."""
    return name.removeprefix(_CROPS)


def label(settings: Mapping[str, Any]) -> str:
    """``name=value, ...``"""
    return ", ".join(f"{short(name)}={shown(value)}" for name, value in settings.items())


def decimals(value: float) -> int:
    """Decimals that show three digits."""
    return max(0, 2 - floor(log10(abs(value)))) if value else 0


def number_text(value: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"{value:,.{decimals(value)}f}"


def safe_text(console: Console, text: str) -> Text:
    """Never markup, and only what the console can encode: names and reasons come from outside."""
    from rich.text import Text

    return Text(text.translate(_ASCII) if console.options.ascii_only else text)


def print_line(console: Console, text: str) -> None:
    """One line, wrapped by the console."""
    console.print(safe_text(console, " ".join(text.split())))
