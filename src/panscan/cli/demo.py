"""``panscan demo``: the accuracy and the cost of pan and scan, on generated documents."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import errors, import_libraries, out, show_warnings, warn_mini
from panscan.cli.verb import verb
from panscan.settings import Options

if TYPE_CHECKING:
    from panscan.bench.demo import Demo
    from panscan.bench.plan import Observer, SweepPlan
    from panscan.records.store import Run


EPILOG = """\b
Examples
  panscan demo
  panscan demo demo/ --count 36
"""


@verb("demo", EPILOG)
@click.argument("directory", type=click.Path(path_type=Path), default=Path("demo"))
def command(options: Options, directory: Path) -> int:
    """Show the accuracy and the cost of pan and scan on generated documents, in about two minutes.

    The bundled model reads the same documents without pan and scan and with up to 2 and 4 crops. DIRECTORY receives the
    documents, a report, a gallery of all answers, and the recommended settings as a preset.
    """
    from panscan.bench.demo import run_demo
    from panscan.cli.bench import exit_code
    from panscan.cli.recommend import print_recommendation

    show_warnings(errors())
    steps = _Steps(options.count)
    demo = run_demo(directory, count=options.count, seed=options.seed, again=options.force, observer=steps)
    print_recommendation(demo.run, demo.recommendation, demo.preset)
    _print_results(demo)
    return exit_code(demo.run)


class _Steps:
    """Prints each step of a demo as the equivalent command, with that command's output."""

    def __init__(self, count: int) -> None:
        self._count = count

    def step(self, command: Sequence[str]) -> None:
        out().print(f"\n$ {shlex.join(command)}", style="bold", soft_wrap=True)

    def documents_drawn(self, questions: Path) -> None:
        from panscan.cli.samples import print_samples

        print_samples(questions, self._count, hint=False)

    @contextmanager
    def measuring(self, plan: SweepPlan, directory: Path) -> Iterator[Observer]:
        from panscan.cli.bench import print_dataset, print_start, sweep_progress

        import_libraries()
        warn_mini()
        print_dataset(plan)
        print_start(plan, directory)
        with sweep_progress(plan, set(), directory) as progress:
            yield progress

    def measured(self, run: Run) -> None:
        from panscan.cli.bench import print_run

        print_run(run, decision=False)  # recommend prints it

    def report_written(self, directory: Path) -> None:
        from panscan.cli.bench import print_files

        print_files(directory)

    def gallery_written(self, path: Path) -> None:
        out().print(str(path), soft_wrap=True)


def _print_results(demo: Demo) -> None:
    from panscan.report import GALLERY_NAME, HTML_NAME

    console = out()
    console.print(f"\nDecision, accuracy and speed: {demo.directory / HTML_NAME}", soft_wrap=True)
    console.print(f"Answers beside their images:  {demo.directory / GALLERY_NAME}", soft_wrap=True)
    question = ["-p", "What is the total?", "--preset", str(demo.preset)]
    line = shlex.join([*_program(), "ask", str(demo.documents / "receipt-00.png"), *question])
    console.print(f"Try: {line}", soft_wrap=True)


def _program() -> list[str]:
    """Return the words that start panscan in this shell, whose virtual environment may not be activated."""
    if shutil.which("panscan"):
        return ["panscan"]
    return [sys.argv[0]] if Path(sys.argv[0]).name == "panscan" else [sys.executable, "-m", "panscan"]
