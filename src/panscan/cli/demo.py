"""``panscan demo``: what pan and scan gains and costs, on made-up documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.options import SEED, InRange, common_options, errors, import_libraries, out, say_mini, show_warnings
from panscan.core.ranges import Range
from panscan.settings import SAMPLE_RANGES

if TYPE_CHECKING:
    from panscan.bench.demo import Demo, DemoCell
    from panscan.bench.plan import Observer, SweepPlan
    from panscan.records.store import Run

__all__ = ["command"]

_COUNT = InRange(Range(whole=True, least=2, most=SAMPLE_RANGES["count"].most))

EPILOG = """\b
Examples
  panscan demo
  panscan demo demo/ --count 36
"""


@click.command("demo", epilog=EPILOG, short_help="What pan and scan brings and costs, on made-up documents.")
@click.argument("directory", type=click.Path(path_type=Path), default=Path("demo"))
@click.option("--count", type=_COUNT, default=18, show_default=True, help="Documents.")
@click.option("--seed", type=SEED, default=2, show_default=True, help="Seed for the generated documents.")
@click.option("--again", is_flag=True, help="Take the place of a demo that is there.")
@common_options
def command(directory: Path, count: int, seed: int, again: bool) -> int:
    """Read the same documents with and without pan and scan, and with more and more crops; all into DIRECTORY.

    The bundled model reads them on this machine. It ends with answers beside their pictures, the curve of speed against
    quality, and the preset to take.
    """
    from panscan.bench.demo import run_demo
    from panscan.cli.bench import exit_code
    from panscan.cli.recommend import print_recommendation

    show_warnings(errors())
    demo = run_demo(directory, count=count, seed=seed, again=again, observer=_Steps(count))
    print_recommendation(demo.run, demo.recommendation, demo.preset)
    _print_results(demo)
    return exit_code(demo.run)


class _Steps:
    """Prints each step of a demo as the command that does the same, and what that command prints."""

    def __init__(self, count: int) -> None:
        self._count = count

    def step(self, command: Sequence[str]) -> None:
        out().print(f"\n$ {shlex.join(command)}", style="bold", soft_wrap=True)

    def documents_drawn(self, questions: Path) -> None:
        from panscan.cli.samples import print_samples

        print_samples(questions, self._count)

    @contextmanager
    def measuring(self, plan: SweepPlan, directory: Path) -> Iterator[Observer]:
        from panscan.cli.bench import say_dataset, say_start, sweep_progress

        import_libraries()
        say_mini()
        say_dataset(plan)
        say_start(plan, directory)
        with sweep_progress(plan, set(), directory) as progress:
            yield progress

    def measured(self, run: Run) -> None:
        from panscan.cli.bench import print_run

        print_run(run)

    def report_written(self, directory: Path) -> None:
        from panscan.cli.bench import print_files

        print_files(directory)

    def gallery_written(self, path: Path) -> None:
        out().print(str(path), soft_wrap=True)


def _print_results(demo: Demo) -> None:
    from panscan.report import GALLERY_NAME, HTML_NAME

    console = out()
    console.print()
    for cell in demo.cells:
        console.print(_result(cell), soft_wrap=True)
    console.print(f"\nanswers beside their pictures: {demo.directory / GALLERY_NAME}", soft_wrap=True)
    console.print(f"speed against quality:         {demo.directory / HTML_NAME}", soft_wrap=True)
    question = ["-p", "What is the total?", "--preset", str(demo.preset)]
    console.print("try: " + shlex.join(["panscan", "ask", str(demo.documents / "receipt-00.png"), *question]))


def _result(cell: DemoCell) -> str:
    from panscan.analysis.cells import number_text

    name = "without pan and scan" if cell.max_crops is None else f"with up to {cell.max_crops} crops"
    accuracy = f"{cell.accuracy.mean:4.0%} of {cell.accuracy.questions} answers right"
    return f"{name:21} {accuracy}, {number_text(cell.throughput)} requests/s"
