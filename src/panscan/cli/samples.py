"""``panscan samples``: documents to try things on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from panscan.cli.options import SEED, InRange, common_options, out
from panscan.settings import SAMPLE_RANGES

__all__ = ["command", "print_samples"]

EPILOG = """\b
Examples
  panscan samples samples/
  panscan bench --dataset samples/questions.jsonl --do-pan-and-scan true,false
"""


@click.command("samples", epilog=EPILOG, short_help="Make sample documents with questions and answers.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--count", type=InRange(SAMPLE_RANGES["count"]), default=12, show_default=True, help="Documents.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed for the generated documents.")
@click.option(
    "--columns",
    type=InRange(SAMPLE_RANGES["columns"]),
    default=30,
    show_default=True,
    help="Characters across the short side: 30 is small print for the bundled model, 110 for Google's Gemma 3.",
)
@click.option("--overwrite", is_flag=True, help="Replace documents of another count or seed.")
@common_options
def command(directory: Path, **options: Any) -> None:
    """Make receipts, tables, pages and pictures in DIRECTORY, with questions.jsonl for --dataset."""
    from panscan.images.samples import write_samples

    questions = write_samples(directory, **options)
    print_samples(questions, options["count"])


def print_samples(questions: Path, count: int) -> None:
    """Print where samples were written, and the command that uses them."""
    console = out()
    console.print(f"{count} documents in {questions.parent}", soft_wrap=True)
    console.print(f"next: panscan bench --dataset {questions}", soft_wrap=True)
