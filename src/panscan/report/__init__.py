"""A run as one HTML page, as markdown or as pictures; made from its records alone. Load runs have pages of levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from panscan.core import RecordsError
from panscan.core.files import write_file
from panscan.records.load_runs import is_load_run
from panscan.records.store import Run

__all__ = [
    "GALLERY_NAME",
    "HTML_NAME",
    "to_markdown",
    "write_gallery",
    "write_markdown",
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
    if is_load_run(run):
        from panscan.report.load_data import load_report_of
        from panscan.report.load_html import render_load_html

        page = render_load_html(load_report_of(run))
    else:
        from panscan.report.html import render_html
        from panscan.report.report_data import report_data_of

        page = render_html(report_data_of(run))
    write_file(path, page)


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
    if is_load_run(run):
        from panscan.report.load_data import load_report_of
        from panscan.report.load_markdown import render_load_markdown

        return render_load_markdown(load_report_of(run))
    from panscan.report.markdown import render_markdown
    from panscan.report.report_data import report_data_of

    return render_markdown(report_data_of(run))


def write_markdown(run: Run, path: Path) -> None:
    """Write :func:`to_markdown` as a file; an older one is replaced in one step.

    Raises:
        InputError: the file could not be written, or a cell's stamps contradict its counts.
    """
    write_file(path, to_markdown(run))


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
    from panscan.report.report_data import report_data_of

    if is_load_run(run):
        from panscan.report.load_data import load_report_of

        report = load_report_of(run)
        for curve in report.latency:
            yield curve.name, png(curve, report.legend)
        for curve in report.throughput:
            yield curve.name, png(curve)
        return
    facts = report_data_of(run)
    for comparison in (facts.decision, *facts.comparisons, facts.latency):
        for panel in comparison.panels:
            yield panel.name, png(panel, comparison.legend)
    if facts.front is not None:
        yield "front", png(facts.front)
