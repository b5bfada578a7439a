"""``panscan recommend``: the cell of a finished sweep to use, and a preset of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.options import InRange, common_options, echo, errors, out, show_warnings
from panscan.core.ranges import Range

if TYPE_CHECKING:
    from panscan.analysis.recommend import Recommendation
    from panscan.records.store import Run

__all__ = ["command", "print_recommendation"]

_MILLISECONDS = InRange(Range(above=0, most=1_000_000_000))
_SHARE = InRange(Range(least=0, most=1))

EPILOG = """\b
Examples
  panscan recommend runs/20260101-120000-mini
  panscan recommend runs/20260101-120000-mini --max-p95-ms 2000 --min-quality 0.9
  panscan bench --preset preset.yaml --batch-size 1,2,4

A cell is never recommended whose answers differ from the reference, or that reads fewer views than others within
--max-p95-ms, unless a dataset with answers shows that it loses nothing measurable, or --allow-different names it.
--min-quality takes the place of the rule about views.
"""


@click.command("recommend", epilog=EPILOG, short_help="Choose a cell of a finished run, and write it as a preset.")
@click.argument("directory", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--max-p95-ms", type=_MILLISECONDS, help="Only cells whose p95 of E2E is at most this.")
@click.option("--min-quality", type=_SHARE, help="Only cells whose quality is at least this (0 to 1).")
@click.option("--quality-metric", help="The metric that counts as quality.  [default: the run's]")
@click.option(
    "--allow-different",
    multiple=True,
    metavar="CELL",
    help="The id of a cell that may be different, unverified or read fewer views; may be repeated.",
)
@click.option("-o", "--output", default="preset.yaml", show_default=True, type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a file that panscan did not write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(directory: Path, output: Path, **options: Any) -> None:
    """Name the cell of a run with the highest throughput whose answers can be trusted, why, and what it costs."""
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
    """Print the recommended cell, the reason, its costs, the other cells and the path of the preset."""
    from panscan.analysis.candidates import cell_name
    from panscan.report.formatting import safe_text

    console = out()
    runner_up = "none" if found.runner_up is None else cell_name(run, found.runner_up)
    lines = [f"cell: {cell_name(run, found.cell)}", f"reason: {found.reason}", f"runner-up: {runner_up}"]
    lines += [f"cost: {cost}" for cost in found.cost]
    lines += [f"not taken: {cell_name(run, cell)}: {why}" for cell, why in found.rejected.items()]
    lines += [f"preset: {preset}"]
    for line in lines:
        console.print(safe_text(console, " ".join(line.split())), soft_wrap=True)
