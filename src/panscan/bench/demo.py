"""The demo: the bundled model reads the same documents without and with pan and scan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from panscan import report
from panscan.analysis.recommend import Recommendation, preset_text, recommend, write_preset
from panscan.bench.grid import build_cells, merge_equal_work
from panscan.bench.plan import Observer, SweepPlan
from panscan.bench.run import new_directory, start
from panscan.core import InputError, SettingError
from panscan.records.store import Run
from panscan.workload.requests import Source, load_workload, views_of
from panscan.workload.samples import write_samples

_FLAGS = {
    "--runner": ["engine"],
    "--max-new-tokens": ["32"],
    "--pan-and-scan": ["false", "true"],
    "--min-crop-size": ["256"],
    "--max-num-crops": ["2", "4"],
}
_REPEATS = 3
_VERIFY_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Demo:
    """A finished demo.

    Args:
        run: the records of its sweep.
        directory: the run directory, with ``report.html`` and ``gallery.html``.
        documents: the folder of the documents.
        preset: the file of the recommended settings.
        recommendation: the cell that the preset was made from.
    """

    run: Run
    directory: Path
    documents: Path
    preset: Path
    recommendation: Recommendation


class DemoObserver(Protocol):
    """Receives the progress of a demo."""

    def step(self, command: Sequence[str]) -> None:
        """A step starts; ``command`` is the command line that does the same."""

    def documents_drawn(self, questions: Path) -> None:
        """The documents are beside their ``questions.jsonl``."""

    def measuring(self, plan: SweepPlan, directory: Path) -> AbstractContextManager[Observer]:
        """Return what observes the sweep while it runs."""

    def measured(self, run: Run) -> None:
        """The sweep is over."""

    def report_written(self, directory: Path) -> None:
        """The run directory has its report."""

    def gallery_written(self, path: Path) -> None:
        """The page of all answers is written."""


def run_demo(directory: Path, *, count: int, seed: int, again: bool, observer: DemoObserver) -> Demo:
    """Draw documents, measure the bundled model on them, and write a report, a gallery of answers and a preset.

    Args:
        directory: takes the documents, the run directory and the preset.
        count: documents to draw.
        seed: another seed draws other documents.
        again: replace the documents and the preset of an earlier demo; its run is kept.
        observer: follows the demo.

    Raises:
        SettingError: ``directory`` holds a demo and not ``again``, or a file is in the way.
        RecordsError: a file cannot be written, or no cell can be recommended.
    """
    documents, runs, preset = directory / "documents", directory / "runs", directory / "preset.yaml"
    if runs.exists() and not runs.is_dir():
        raise SettingError(f"{runs} is in the way of the demo's runs: name another folder")
    if runs.exists() and not again:
        raise SettingError(
            f"{directory} already holds a demo: choose another folder, or add --force (earlier runs are kept)"
        )
    observer.step(_line("samples", documents, "--count", count, "--seed", seed, "--force"))
    questions = write_samples(documents, count=count, seed=seed, overwrite=True)
    observer.documents_drawn(questions)
    run, run_directory = _measure(questions, runs, observer)
    observer.step(_line("report", run_directory, "--format", "gallery"))
    gallery = run_directory / report.GALLERY_NAME
    report.write_gallery(run, gallery)
    observer.gallery_written(gallery)
    observer.step(_line("recommend", run_directory, "-o", preset))
    recommendation = recommend(run)
    write_preset(preset_text(run, recommendation), preset)
    return Demo(run, run_directory, documents, preset, recommendation=recommendation)


def _line(*words: object) -> list[str]:
    return ["panscan", *map(str, words)]


def _measure(questions: Path, runs: Path, observer: DemoObserver) -> tuple[Run, Path]:
    """Measure the demo's cells into a new run directory, with a report. Return the run and its directory."""
    command = _bench_command(questions, runs)
    observer.step(command)
    plan = _plan(questions)
    directory = new_directory(runs, plan.cells[0].settings.model_name)
    with observer.measuring(plan, directory) as progress:
        run = start(plan, directory, command, progress)
    observer.measured(run)
    report.write_report(run, directory / report.HTML_NAME)
    observer.report_written(directory)
    return run, directory


def _bench_command(questions: Path, runs: Path) -> list[str]:
    """Return the command line that makes the plan of :func:`_plan`."""
    flags = [word for flag, values in _FLAGS.items() for word in (flag, ",".join(values))]
    options = ("--repeats", _REPEATS, "--verify-requests", _VERIFY_REQUESTS, "--include-content", "--output-dir", runs)
    return _line("bench", "--dataset", questions, *flags, *options)


def _plan(questions: Path) -> SweepPlan:
    def refuse(problem: InputError) -> None:
        raise problem  # the documents were drawn a moment ago, so each of them can be read

    source = Source(dataset=str(questions))
    workload = load_workload(source, on_problem=refuse)
    cells = build_cells({flag.removeprefix("--"): values for flag, values in _FLAGS.items()})
    return SweepPlan(
        cells=merge_equal_work(cells, views_of(workload.items)),
        items=workload.items,
        source=source,
        repeats=_REPEATS,
        verify_requests=_VERIFY_REQUESTS,
        include_content=True,
        dataset=workload.dataset,
        quality_metric=workload.quality_metric(None),
    )
