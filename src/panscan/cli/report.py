"""``panscan report``: a finished or unfinished run as a page, as markdown or as pictures."""

from __future__ import annotations

from pathlib import Path

import click

from panscan.cli.options import common_options, echo, errors, out
from panscan.core import RecordsError, SettingError

__all__ = ["command"]

EPILOG = """\b
Examples
  panscan report runs/20260101-120000-mini
  panscan report runs/20260101-120000-mini --format md | gh issue create --title "Sweep" --body-file -
  panscan report runs/20260101-120000-mini --format png -o figures/
"""


@click.command("report", epilog=EPILOG, short_help="A run as one HTML page, markdown or pictures.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "md", "png", "gallery"]),
    default="html",
    show_default=True,
    help="A page that needs no network, markdown for an issue tracker, pictures of the curves, or a page of all answers"
    " beside their pictures (of a run with --include-content).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write; with png the folder.  [default: RUN/report.html, RUN/gallery.html, standard output for md,"
    " RUN for png]",
)
@click.option("--quality-metric", help="The metric that counts as quality.  [default: the run's]")
@common_options
def command(run: Path, form: str, output: Path | None, quality_metric: str | None) -> None:
    """Show a RUN directory: the recommendation, every cell with its verdict, curves, the Pareto front, stages.

    For a panscan load run: the highest rate that meets the goodput, every level, throughput-latency curves, errors.

    Everything is derived from the run's records; nothing is measured again.
    """
    from panscan import report
    from panscan.records.load_runs import is_load_run
    from panscan.records.quality import with_metric
    from panscan.records.store import read_run

    if form != "png" and output is not None and output.is_dir():
        raise SettingError(f"--output {output} is a folder: name a file")
    records = with_metric(read_run(run), quality_metric)
    home = records.path.parent
    written: list[Path] = []
    if form == "html":
        written = [output or home / report.HTML_NAME]
        report.write_report(records, written[0])
    elif form == "gallery":
        written = [output or home / report.GALLERY_NAME]
        report.write_gallery(records, written[0])
    elif form == "png":
        written = report.write_pictures(records, _folder(output or home))
    elif output is not None:
        written = [output]
        report.write_markdown(records, output)
    else:
        echo(report.to_markdown(records), nl=False)
    for path in written:
        out().print(str(path), soft_wrap=True)
    if not any(cell["outcome"] == "done" for cell in records.outcomes.values()):
        errors().print(f"no {'level' if is_load_run(records) else 'cell'} is finished yet")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordsError(f"--output {path}: {error.strerror or error}") from error
    return path
