"""``panscan demo``: the accuracy and the cost of pan and scan, on generated documents."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from panscan.cli.console import show
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.settings import Options

EPILOG = """\b
Examples
  panscan demo
  panscan demo demo/ --count 36
"""

_SWEEP = (
    *("--runner", "engine", "--max-new-tokens", "32"),
    *("--pan-and-scan", "false,true", "--min-crop-size", "256", "--max-num-crops", "2,4"),
    *("--repeats", "3", "--verify-requests", "8", "--include-content"),
)


@verb("demo", EPILOG)
@click.argument("directory", type=click.Path(path_type=Path), default=Path("demo"))
def command(options: Options, directory: Path) -> int:
    """Show the accuracy and the cost of pan and scan on generated documents, in about two minutes.

    The bundled model reads the same documents without pan and scan and with up to 2 and 4 crops. DIRECTORY receives the
    documents, a report, a gallery of all answers, and the recommended settings as a preset.
    """
    from panscan.report import GALLERY_NAME, HTML_NAME

    documents, runs, preset = directory / "documents", directory / "runs", directory / "preset.yaml"
    if runs.exists() and not runs.is_dir():
        raise SettingError(f"{runs} is in the way of the demo's runs: name another folder")
    if runs.exists() and not options.force:
        raise SettingError(
            f"{directory} already holds a demo: choose another folder, or add --force (earlier runs are kept)"
        )
    _run_step("samples", documents, "--count", options.count, "--seed", options.seed, "--force")
    earlier = set(runs.glob("*"))
    code = _run_step("bench", "--dataset", documents / "questions.jsonl", *_SWEEP, "--output-dir", runs)
    [run] = set(runs.glob("*")) - earlier
    _run_step("report", run, "--format", "gallery")
    _run_step("recommend", run, "-o", preset)
    for label, path in (
        ("\nDecision, accuracy and speed:", run / HTML_NAME),
        ("Answers beside their images: ", run / GALLERY_NAME),
    ):
        show(f"{label} {path}")
    page, question = str(documents / "receipt-00.png"), "What is the total?"
    line = shlex.join([*_program(), "ask", page, "-p", question, "--preset", str(preset)])
    show(f"Try: {line}")
    return code or 0


def _run_step(*step: Any) -> int | None:
    """Print a command, run it, and return its exit code."""
    from panscan.cli.main import cli

    words = list(map(str, step))
    show(f"\n$ {shlex.join(['panscan', *words])}", "bold")
    code: int | None = cli.main(words, prog_name="panscan", standalone_mode=False, obj={"arguments": words})
    return code


def _program() -> list[str]:
    """Return the words that start panscan in this shell, whose virtual environment may not be activated."""
    if shutil.which("panscan"):
        return ["panscan"]
    return [sys.argv[0]] if Path(sys.argv[0]).name == "panscan" else [sys.executable, "-m", "panscan"]
