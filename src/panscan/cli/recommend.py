"""``panscan recommend``: the cell of a finished sweep to use, and a preset of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.console import echo, errors, out, show_warnings
from panscan.cli.options import InRange, common_options
from panscan.cli.verb import option, verb
from panscan.core.ranges import Range

if TYPE_CHECKING:
    from panscan.analysis.recommend import Recommendation
    from panscan.records.store import Run

__all__ = ["command", "print_recommendation"]

_MILLISECONDS = InRange(Range(gt=0, le=1_000_000_000))
_SHARE = InRange(Range(ge=0, le=1))

EPILOG = """\
A cell qualifies if its answers match the reference and, on a labelled dataset, show no
measurable loss of accuracy. Without labels, only cells with the most views qualify (among those
within --max-p95-ms). The fastest cell that qualifies is recommended. --min-quality replaces the
rule on accuracy or views. A cell whose answers differ qualifies if a labelled dataset shows
no measurable loss, or by --allow-different.

\b
Examples
  panscan recommend runs/20260101-120000-mini
  panscan recommend runs/20260101-120000-mini --max-p95-ms 2000 --min-quality 0.9
  panscan bench --preset preset.yaml --max-num-seqs 32,128
"""


@verb("recommend", EPILOG)
@click.argument("directory", metavar="RUN", type=click.Path(path_type=Path))
@option("Measurement", "--max-p95-ms", type=_MILLISECONDS, metavar="MS", help="Maximum p95 of end-to-end latency, ms.")
@option("Measurement", "--min-quality", type=_SHARE, metavar="SHARE", help="Minimum quality, 0 to 1.")
@option("Measurement", "--quality-metric", metavar="NAME", help="Quality metric.  [default: the run's]")
@option(
    "Measurement",
    "--allow-different",
    multiple=True,
    metavar="CELL",
    help="Id of a cell to allow whatever its verdict; repeatable.",
)
@option(
    "Output",
    "-o",
    "--output",
    default="preset.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Preset to write.",
)
@option("Output", "--force", is_flag=True, help="Replace a file that panscan did not write.")
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(directory: Path, output: Path, **options: Any) -> None:
    """Recommend a cell of a finished run, explain why, and write its settings as a preset."""
    from panscan.analysis.recommend import preset_text, recommend, write_preset
    from panscan.records.quality import with_metric
    from panscan.records.store import read_run

    show_warnings(errors())
    run = with_metric(read_run(directory), options["quality_metric"])
    found = recommend(
        run,
        max_p95_ms=options["max_p95_ms"],
        min_quality=options["min_quality"],
        allow=options["allow_different"],
    )
    write_preset(preset_text(run, found), output, force=options["force"])
    if options["as_json"]:
        echo(json.dumps({**asdict(found), "preset": str(output)}, ensure_ascii=False))
    else:
        print_recommendation(run, found, output)


def print_recommendation(run: Run, found: Recommendation, preset: Path) -> None:
    """Print the decision, its reason and costs, the rejected cells, and the path of the preset."""
    from panscan.analysis.candidates import cell_names
    from panscan.report.formatting import safe_text

    console, names = out(), cell_names(run)
    runner_up = "none" if found.runner_up is None else names[found.runner_up]
    lines = [found.decision, f"Reason: {found.reason}", f"Runner-up: {runner_up}"]
    lines += [f"{cost[:1].upper()}{cost[1:]}" for cost in found.cost]
    lines += [f"Rejected: {names[cell]} ({cell}): {why}" for cell, why in found.rejected.items()]
    lines += [f"Cell: {found.cell}", f"Preset: {preset}"]
    for line in lines:
        console.print(safe_text(console, " ".join(line.split())), soft_wrap=True)
