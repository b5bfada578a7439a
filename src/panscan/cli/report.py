"""``panscan report``: a finished or unfinished run as a page, as markdown or as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import echo, errors, json_text, show
from panscan.cli.verb import verb
from panscan.core import RecordsError, SettingError
from panscan.core.files import replaced_source, write_file
from panscan.settings import Options

if TYPE_CHECKING:
    from panscan.records.store import Run

EPILOG = """\
html needs no network; md suits an issue tracker; csv is the table of measured settings or
levels; json has the decision and every metric; png draws the curves; gallery shows every
answer beside its document, for runs with --include-content. By default, html, gallery and
png files are written to RUN; md, csv and json are printed.

\b
Examples
  panscan report runs/20260101-120000-mini
  panscan report runs/20260101-120000-mini --format md | gh issue create --title "Sweep" --body-file -
  panscan report runs/20260101-120000-mini --format png -o figures/
"""


def _to_json(run: Run) -> str:
    from panscan.report import to_document

    return f"{json_text(to_document(run))}\n"


@verb("report", EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
def command(options: Options, run: Path) -> None:
    """Write the report of a run directory, from its records; nothing is measured again.

    A bench report has the recommendation, cells with verdicts, curves and stages. A load report has the highest rate
    that meets the goodput, levels, throughput-latency curves and errors.
    """
    from panscan import report
    from panscan.records.load_runs import is_load_run
    from panscan.records.quality import with_metric
    from panscan.records.store import read_run

    form, output = options.report_format, options.output_file
    if form != "png" and output is not None and output.is_dir():
        raise SettingError(f"--output {output} is a folder: name a file")
    records = with_metric(read_run(run), options.quality_metric, options.max_accuracy_loss)
    if output is not None and replaced_source([output], [records.path]) is not None:
        raise SettingError(f"--output {output} would replace the records of the run: name another file")
    home = records.path.parent
    written: list[Path] = []
    if form == "html":
        written = [output or home / report.HTML_NAME]
        report.write_report(records, written[0])
    elif form == "gallery":
        written = [output or home / report.GALLERY_NAME]
        report.write_gallery(records, written[0])
    elif form == "png":
        folder = output or home
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordsError(f"--output {folder}: {error.strerror or error}") from error
        written = report.write_pictures(records, folder)
    else:
        text = {"md": report.to_markdown, "csv": report.to_csv, "json": _to_json}[form](records)
        if output is None:
            echo(text, nl=False)
        else:
            written = [output]
            write_file(output, text)
    for path in written:
        show(str(path))
    if not any(cell.outcome == "done" for cell in records.outcomes.values()):
        errors().print(f"no {'level' if is_load_run(records) else 'cell'} is finished yet")
