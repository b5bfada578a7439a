"""``panscan compare``: runs side by side, and an exit code for somebody's CI."""

from __future__ import annotations

from pathlib import Path

import click

from panscan.cli.console import echo, note, out, print_json
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.settings import Options

EPILOG = """\
A condition is "METRIC>5%" (rises by more than 5% against A), "METRIC<-5%" (falls by more
than 5%) or "verdict" (becomes worse). METRIC is request_throughput, output_throughput,
{mean,median,p90,p95,p99}_{ttft,tpot,e2el}, a score (exact_match, anls, ...), or for load
runs attainment: the share of answered requests that meet the goodput limits.
Exit code 5: a condition holds beyond the noise. See docs/compare.md.

\b
Examples
  panscan compare runs/before runs/after
  panscan compare main/ branch/ --fail-on "p95_e2el>5%" --fail-on "request_throughput<-5%" --fail-on verdict
  panscan compare main/ branch/ --format md >> "$GITHUB_STEP_SUMMARY"
"""

_CONDITION_HOLDS = 5
_MOST = 26  # one letter each


@verb("compare", EPILOG)
@click.argument("runs", nargs=-1, required=True, metavar="A B [C]...")
def command(options: Options, runs: tuple[str, ...]) -> int:
    """Compare each run with the baseline A. Runs are run directories of panscan bench or panscan load.

    Cells and load levels pair by their settings, requests by id, images and prompt. Only differences beyond the noise
    count.
    """
    from panscan.analysis.comparison import as_json, build_report
    from panscan.records.store import read_run
    from panscan.report.comparison import markdown_text, print_comparison

    if not 2 <= len(runs) <= _MOST:
        raise SettingError(f"compare takes 2 to {_MOST} runs, got {len(runs)}")
    if options.strict and not options.fail_on:
        raise SettingError("--strict says what becomes of --fail-on, which is missing")
    report = build_report([read_run(Path(run)) for run in runs], options.fail_on)
    form = "json" if options.json else options.comparison_format
    if form == "json":
        print_json(as_json(report))
    elif form == "md":
        echo(markdown_text(report), nl=False)
    else:
        print_comparison(report, out())
    for condition, outcome in report.outcomes():
        style = {"holds": "red", "cannot be evaluated": "yellow"}.get(outcome.partition(":")[0])
        note(f"--fail-on {condition} {outcome}", style)
    failed = any(finding.holds or options.strict for finding in report.findings)
    return _CONDITION_HOLDS if failed else 0
