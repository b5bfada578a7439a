"""The demo: the bundled model reads the same documents without pan and scan, and with more and more crops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from panscan import report
from panscan.analysis.cells import shown, told_of
from panscan.analysis.recommend import Recommendation, preset_text, recommend, write_preset
from panscan.bench.grid import build_cells, merge_equal_work
from panscan.bench.plan import Observer, SweepPlan
from panscan.bench.run import new_directory, start
from panscan.bench.workload import Source, load_workload, views_of
from panscan.core import InputError, SettingError
from panscan.images.samples import write_samples
from panscan.records.quality import Quality, quality_of
from panscan.records.store import Run
from panscan.records.summary import cell_metrics

__all__ = ["Demo", "DemoCell", "DemoObserver", "run_demo"]

_FLAGS = {
    "--runner": ["engine"],
    "--max-new-tokens": ["32"],
    "--do-pan-and-scan": ["false", "true"],
    "--min-crop-size": ["256"],
    "--grid-max-crops": ["2", "3", "4", "6"],
}
_GOOD = 0.9  # share of right answers


@dataclass(frozen=True, slots=True)
class DemoCell:
    """What one cell of a demo achieved.

    Args:
        cell: its id.
        max_crops: as text, with those of its aliases; None without pan and scan.
        accuracy: share of right answers, and the number of questions.
        throughput: requests per second; None if it was not measured.
    """

    cell: str
    max_crops: str | None
    accuracy: Quality
    throughput: float | None


@dataclass(frozen=True, slots=True)
class Demo:
    """A finished demo.

    Args:
        run: the records of its sweep.
        directory: the run directory, with ``report.html`` and ``gallery.html``.
        documents: the folder of the documents.
        preset: the file of the recommended settings.
        recommendation: the cell that the preset was made from.
        cells: the cells with scored answers, in the order of the sweep.
    """

    run: Run
    directory: Path
    documents: Path
    preset: Path
    recommendation: Recommendation
    cells: tuple[DemoCell, ...]


class DemoObserver(Protocol):
    """Follows a demo, for people to watch."""

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
    _check(directory, runs, again=again)
    observer.step(_line("samples", documents, "--count", count, "--seed", seed, "--overwrite"))
    questions = write_samples(documents, count=count, seed=seed, overwrite=True)
    observer.documents_drawn(questions)
    run, run_directory = _measure(questions, runs, observer)
    observer.step(_line("report", run_directory, "--format", "gallery"))
    gallery = run_directory / report.GALLERY_NAME
    report.write_gallery(run, gallery)
    observer.gallery_written(gallery)
    cells = _cells(run)
    # The fastest cell that is nearly always right, if there is one; else the rules for any run.
    limit = _GOOD if any(each.accuracy.mean >= _GOOD for each in cells) else None
    limited = () if limit is None else ("--min-quality", limit)
    observer.step(_line("recommend", run_directory, *limited, "-o", preset))
    recommendation = recommend(run, min_quality=limit)
    write_preset(preset_text(run, recommendation), preset)
    return Demo(run, run_directory, documents, preset, recommendation=recommendation, cells=cells)


def _check(directory: Path, runs: Path, *, again: bool) -> None:
    if runs.exists() and not runs.is_dir():
        raise SettingError(f"{runs} is in the way of the demo's runs: name another folder")
    if runs.exists() and not again:
        raise SettingError(f"{directory} holds a demo already: name another folder, or --again")


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
    return _line("bench", "--dataset", questions, *flags, "--include-content", "--output-dir", runs)


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
        include_content=True,
        dataset=workload.dataset,
        quality_metric=workload.quality_metric(None),
    )


def _cells(run: Run) -> tuple[DemoCell, ...]:
    found = []
    for cell, settings in run.cells.items():
        accuracy, metrics = quality_of(run, cell), cell_metrics(run, cell)
        if accuracy is not None:
            most = shown(told_of(run, cell)["pan_and_scan_max_num_crops"])
            crops = most if settings["do_pan_and_scan"] else None
            throughput = None if metrics is None else metrics.values["request_throughput"]
            found.append(DemoCell(cell, crops, accuracy, throughput))
    return tuple(found)
