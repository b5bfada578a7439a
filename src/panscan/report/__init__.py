"""A run as one HTML page, as markdown or as pictures; made from its records alone. Load runs have pages of levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panscan.core import RecordsError
from panscan.core.files import write_file
from panscan.core.text import clean
from panscan.records.load_runs import is_load_run
from panscan.records.store import Run

if TYPE_CHECKING:
    from panscan.report.load import LoadReport
    from panscan.report.sweep import SweepReport

__all__ = [
    "GALLERY_NAME",
    "HTML_NAME",
    "to_csv",
    "to_document",
    "to_markdown",
    "write_gallery",
    "write_pictures",
    "write_report",
]

HTML_NAME = "report.html"
GALLERY_NAME = "gallery.html"


def write_report(run: Run, path: Path) -> None:
    """Write a run's report as one HTML file that needs no network; an older one is replaced in one step.

    Raises:
        InputError: the file could not be written, or a cell's stamps contradict its counts.
    """
    from panscan.report.html import render_html

    write_file(path, render_html(_facts_of(run)))


def write_gallery(run: Run, path: Path) -> None:
    """Write every question of a run with its picture and each cell's answer as one HTML file.

    Pictures are read again, from where the run found them.

    Raises:
        InputError: the file could not be written, or the run holds no answers or is a load run.
    """
    from panscan.analysis.levels import refuse_load_run
    from panscan.report.gallery import render_gallery

    refuse_load_run(run, "gallery of answers")
    write_file(path, render_gallery(run))


def to_markdown(run: Run) -> str:
    """A run's report as GitHub-flavoured markdown, for an issue tracker.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """
    from panscan.report.markdown import render_markdown

    return render_markdown(_facts_of(run))


def to_csv(run: Run) -> str:
    """The table of a run's measured settings or levels, with numbers in full; ``summary.csv`` has every metric.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """
    return _facts_of(run).whole_table.csv()


def to_document(run: Run) -> dict[str, Any]:
    """A run's decision and the rows of its ``summary.csv`` as one JSON object, see docs/output.md.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """
    from panscan.analysis.summary import summary_rows
    from panscan.report.load import LoadReport

    facts, document, rows = _facts_of(run), {"run": str(run.path.parent)}, summary_rows(run)
    if isinstance(facts, LoadReport):
        best = None if facts.best is None else facts.best.name
        return document | {"decision": clean(facts.headline), "best": best, "levels": rows}
    best = None if facts.advice is None else facts.advice.cell
    return document | {"decision": clean(facts.recommendation), "best": best, "cells": rows}


def write_pictures(run: Run, directory: Path) -> list[Path]:
    """Write the curves of a run as ``report-*.png``; returns the files.

    Raises:
        InputError: a file could not be written, nothing was measured that a picture could show, or a cell's stamps
            contradict its counts.
    """
    written = []
    for name, data in _pictures(run):
        path = directory / f"report-{name}.png"
        write_file(path, data)
        written.append(path)
    if not written:
        least = "no level was" if is_load_run(run) else "fewer than two cells were"
        raise RecordsError(f"{run.path}: {least} measured, so there is no curve to draw")
    return written


def _pictures(run: Run) -> Iterator[tuple[str, bytes]]:
    from panscan.report.draw import png
    from panscan.report.load import LoadReport

    facts = _facts_of(run)
    if isinstance(facts, LoadReport):
        for curve in facts.latency:
            yield curve.name, png(curve, curve.legend)
        for curve in facts.throughput:
            yield curve.name, png(curve)
        return
    for comparison in (facts.decision, *facts.comparisons, facts.latency):
        for panel in comparison.panels:
            yield panel.name, png(panel, comparison.legend)
    if facts.front is not None:
        yield "front", png(facts.front)


def _facts_of(run: Run) -> SweepReport | LoadReport:
    from panscan.report.load import LoadReport
    from panscan.report.sweep import SweepReport

    return LoadReport(run) if is_load_run(run) else SweepReport(run)
