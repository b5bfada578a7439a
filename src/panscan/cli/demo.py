"""``panscan demo``: the story of pan and scan on made-up documents, told by the commands that anybody can type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.options import common_options, out
from panscan.core import SettingError

if TYPE_CHECKING:
    from panscan.records.quality import Quality
    from panscan.records.store import Run

__all__ = ["command"]

EPILOG = """\b
Examples
  panscan demo
  panscan demo demo/ --count 36
"""

_CROPS = (2, 3, 4, 6)
_GOOD = 0.9  # share of right answers


@click.command("demo", epilog=EPILOG, short_help="What pan and scan brings and costs, on made-up documents.")
@click.argument("directory", type=click.Path(path_type=Path), default=Path("demo"))
@click.option("--count", type=click.IntRange(2), default=18, show_default=True, help="Documents.")
@click.option("--seed", type=int, default=2, show_default=True, help="Another seed, other documents.")
@click.option("--again", is_flag=True, help="Take the place of a demo that is there.")
@common_options
def command(directory: Path, count: int, seed: int, again: bool) -> int:
    """Read the same documents with and without pan and scan, and with more and more crops; all into DIRECTORY.

    The bundled model reads them on this machine. It ends with answers beside their pictures, the curve of speed against
    quality, and the preset to take.
    """
    from panscan.records.quality import quality_of
    from panscan.records.store import read_run

    documents, runs, preset = directory / "documents", directory / "runs", directory / "preset.yaml"
    if runs.exists() and not runs.is_dir():
        raise SettingError(f"{runs} is in the way of the demo's runs: name another folder")
    if runs.exists() and not again:
        raise SettingError(f"{directory} holds a demo already: name another folder, or --again")
    before = set(runs.iterdir()) if runs.exists() else set()
    _type("samples", documents, "--count", count, "--seed", seed, "--overwrite")
    code = _type(
        "bench", "--dataset", documents / "questions.jsonl", "--runner", "engine", "--max-new-tokens", 32,
        "--do-pan-and-scan", "false,true", "--min-crop-size", 256, "--grid-max-crops", ",".join(map(str, _CROPS)),
        "--include-content", "--output-dir", runs,
    )  # fmt: skip
    place = max(set(runs.iterdir()) - before)  # its name begins with the time
    _type("report", place, "--format", "gallery")
    run = read_run(place)
    shares = {cell: share for cell in run.cells if (share := quality_of(run, cell)) is not None}
    _type("recommend", place, *_wanted(shares), "-o", preset)
    console = out()
    console.print()
    for line in _story(run, shares):
        console.print(line, soft_wrap=True)
    console.print(f"\nanswers beside their pictures: {place / 'gallery.html'}", soft_wrap=True)
    console.print(f"speed against quality:         {place / 'report.html'}", soft_wrap=True)
    console.print("try: " + _line("ask", documents / "receipt-00.png", "-p", "What is the total?", "--preset", preset))
    return code


def _line(*words: object) -> str:
    return shlex.join(["panscan", *map(str, words)])


def _type(*words: object) -> int:
    """Show a command and run it."""
    from panscan.cli.main import cli

    out().print(f"\n$ {_line(*words)}", style="bold", soft_wrap=True)
    arguments = [str(word) for word in words]
    state: dict[str, Any] = {"debug": False, "arguments": arguments}
    found = cli.main(arguments, prog_name="panscan", standalone_mode=False, obj=state)
    return found if isinstance(found, int) else 0


def _wanted(shares: Mapping[str, Quality]) -> tuple[str, ...]:
    """The fastest cell that is right nine times of ten, if there is one; else the rules for any run."""
    return ("--min-quality", str(_GOOD)) if any(share.mean >= _GOOD for share in shares.values()) else ()


def _story(run: Run, shares: Mapping[str, Quality]) -> Sequence[str]:
    """A line for each cell: right answers and what they cost."""
    from panscan.analysis.cells import number_text
    from panscan.records.summary import cell_metrics

    lines = []
    for cell, share in shares.items():
        settings, measured = run.cells[cell], cell_metrics(run, cell)
        crops = settings.get("pan_and_scan_max_num_crops")
        name = "without pan and scan" if settings.get("do_pan_and_scan") is False else f"with up to {crops} crops"
        speed = None if measured is None else measured.values["request_throughput"]
        lines.append(f"{name:21} {share.mean:4.0%} of {share.questions} answers right, {number_text(speed)} requests/s")
    return lines
