"""``panscan recommend``: the cell of a finished sweep to use, and a preset of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import out, print_json
from panscan.cli.verb import verb
from panscan.core.text import capitalised
from panscan.settings import Options

if TYPE_CHECKING:
    from panscan.analysis.recommend import Recommendation
    from panscan.records.store import Run


EPILOG = """\
With a labelled dataset, a cell qualifies if its answers show no loss of accuracy, or if it
computes the same answers as the baseline: the exact or close cell with the most views. Without
labels, exact and close cells with the most views qualify (among those within --max-p95-ms). The
fastest cell that qualifies is recommended. --min-quality replaces the rule on accuracy or views.
--allow-different accepts a cell whatever its answers.

\b
Examples
  panscan recommend runs/20260101-120000-mini
  panscan recommend runs/20260101-120000-mini --max-p95-ms 2000 --min-quality 0.9
  panscan bench --preset preset.yaml --max-num-seqs 32,128
"""


@verb("recommend", EPILOG)
@click.argument("directory", metavar="RUN", type=click.Path(path_type=Path))
def command(options: Options, directory: Path) -> None:
    """Recommend a cell of a finished run, explain why, and write its settings as a preset."""
    from panscan.analysis.recommend import preset_text, recommend, write_preset
    from panscan.records.quality import with_metric
    from panscan.records.store import read_run

    run = with_metric(read_run(directory), options.quality_metric, options.max_accuracy_loss)
    chosen = recommend(
        run,
        max_p95_ms=options.max_p95_ms,
        min_quality=options.min_quality,
        allow=options.allow_different,
    )
    output = options.preset_path
    write_preset(preset_text(run, chosen), output, force=options.force)
    if options.json:
        print_json({**asdict(chosen), "preset": str(output)}, indent=None)
    else:
        _print_recommendation(run, chosen, output)


def _print_recommendation(run: Run, chosen: Recommendation, preset: Path) -> None:
    """Print the decision, its reason and costs, the rejected cells, and the path of the preset."""
    from panscan.analysis.cells import cell_names
    from panscan.report.formatting import safe_text

    console, names = out(), cell_names(run)
    runner_up = "none" if chosen.runner_up is None else names[chosen.runner_up]
    lines = [chosen.decision, f"Reason: {chosen.reason}", f"Runner-up: {runner_up}"]
    lines += map(capitalised, chosen.cost)
    lines += [f"Rejected: {names[cell]} ({cell}): {why}" for cell, why in chosen.rejected.items()]
    lines += [f"Cell: {chosen.cell}", f"Preset: {preset}"]
    for line in lines:
        console.print(safe_text(console, " ".join(line.split())), soft_wrap=True)
