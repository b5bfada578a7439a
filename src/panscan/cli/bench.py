"""``panscan bench``: sweep settings over documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import import_libraries, note, out, print_json
from panscan.cli.models import check_first_adapter, check_model_names, warn_demonstration, warn_mini
from panscan.cli.values import given_axes, print_runner, print_skipped, public_words, read_template_kwargs, utf8
from panscan.cli.verb import verb
from panscan.core import InputError, PanscanError, SettingError
from panscan.core.activity import activity
from panscan.core.text import count
from panscan.settings import Options, RunnerChoice

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.bench.plan import FinishedVisits, SweepPlan
    from panscan.cli.progress import SweepProgress
    from panscan.records.store import Run
    from panscan.workload.requests import Source


EPILOG = """\
Options take comma lists of values; every combination is a cell. Presets: baseline,
balanced, document, throughput, or a YAML file. Underscores work too (--max_num_seqs).

\b
Examples
  panscan bench
  panscan bench --dataset samples/questions.jsonl --preset baseline,balanced --max-new-tokens 32
  panscan bench --model google/gemma-3-27b-it --images scans/ -p "What is the total?" --dry-run
  panscan bench --model google/gemma-3-27b-it --tensor-parallel-size 1,2,4
  panscan bench --runner generate --batch-size 1,2,4 --device-map auto --gpus-per-replica 2
  panscan bench --resume runs/20260101-120000-mini
"""


@verb("bench", EPILOG)
@click.argument("more_images", nargs=-1, metavar="[IMAGE]...")
def command(options: Options, more_images: tuple[str, ...]) -> int:
    """Sweep settings over your documents and measure latency, throughput, tokens and memory.

    IMAGE means the same as --images. The defaults are the bundled model and its sample documents. Each cell's answers
    are compared with a reference (float32 eager attention on the same weights and views). The run directory gets
    records.jsonl, summary.csv and report.html.
    """
    if options.resume_run is not None:
        return _resume(options, options.resume_run)
    plan = _sweep_plan(options, more_images)
    import_libraries(model=not options.dry_run and options.model_replicas == 1)
    from panscan.bench import run

    run.check_plan(plan)
    if options.dry_run:
        from panscan.cli.tables import predictions_document, print_predictions

        if options.json:
            print_json(predictions_document(plan))
        else:
            print_predictions(plan)
        return 0
    directory = run.new_directory(options.output_dir, plan.cells[0].settings.model_name)
    merged = sum(len(cell.aliases) for cell in plan.cells)
    same = f" ({merged} more with the same views)" if merged else ""
    size = (
        f"{count(len(plan.cells), 'cell')}{same}, {count(len(plan.items), 'request')}{' each' * (len(plan.cells) > 1)}"
    )
    note(f"{size}; records in {directory}")
    with sweep_progress(plan, set(), directory) as progress:
        measured = run.start(plan, directory, public_words(), progress)
    return print_results(measured, directory, as_json=options.json)


def _resume(options: Options, run_directory: str) -> int:
    context = click.get_current_context()
    changed = options.given - {"resume_run", "json", "allow_private_urls", "allow_external_images", "max_pages"}
    for parameter in context.command.params:
        if parameter.name in changed:
            raise SettingError(f"--resume takes the run's own settings: leave {parameter.get_error_hint(context)} out")
    from panscan.records.store import read_run

    directory = Path(run_directory)
    before = read_run(directory)  # refuses a wrong directory before slower imports
    import_libraries(model=False)  # the run may be complete
    from panscan.bench import run

    later = {"external_images": options.allow_external_images, "max_pages": options.max_pages}
    plan = run.plan_to_resume(before, on_problem=print_skipped, later=later)
    done = before.finished()
    note(f"resuming {directory}, which has {count(len(before.repeats), 'repeat')}")
    with sweep_progress(plan, done, directory) as progress:
        measured = run.resume(plan, directory, progress)
    return print_results(measured, directory, as_json=options.json)


def _sweep_plan(options: Options, more_images: tuple[str, ...]) -> SweepPlan:
    cells = _sweep_cells(options)  # refuses wrong settings before slower imports
    from panscan.bench.grid import merge_equal_work
    from panscan.bench.plan import SweepPlan
    from panscan.workload.requests import load_workload, views_of

    source = document_source(options, more_images)
    workload = load_workload(source, on_problem=print_skipped)
    plan = SweepPlan(
        cells=merge_equal_work(cells, views_of(workload.items)),
        items=workload.items,
        source=source,
        repeats=options.repeats,
        precision=None if "repeats" in options.given and "repeat_until" not in options.given else options.repeat_until,
        warmup=options.warmup,
        seed=options.seed,
        include_content=options.include_content,
        verify=options.verify,
        verify_requests=options.verify_requests,
        verify_tokens=options.verify_tokens,
        verify_budget=options.verify_budget,
        check_invariance=options.check_invariance,
        reference=options.reference,
        replicas=options.model_replicas,
        gpus_per_replica=options.gpus_per_replica,
        dataset=workload.dataset,
        quality_metric=workload.quality_metric(options.quality_metric),
        max_accuracy_loss=options.max_accuracy_loss,
    )
    if (facts := plan.dataset) is not None:
        others = f" (other splits: {facts.other_splits})" if facts.other_splits else ""
        if others or facts.used < facts.questions:
            note(f"dataset {facts.text}{others}")
        if facts.unscored == facts.used:
            note("no question has a reference answer: quality is not measured")
    for settings in {cell.settings.model: cell.settings for cell in plan.cells}.values():
        warn_demonstration(settings, (file.name for item in plan.items for file in item.documents))
    return plan


def _sweep_cells(options: Options) -> list[Cell]:
    from panscan.bench.grid import adapter_sums, build_cells
    from panscan.settings.preset_files import read_grid_file

    flags = given_axes(options)
    file = read_grid_file(Path(options.grid)) if options.grid else None
    presets = [name.strip() for name in options.preset.split(",")] if options.preset else []
    adapters = adapter_sums(options.adapter)
    choices: list[RunnerChoice] = []
    cells = build_cells(flags, file=file, presets=presets, on_choice=choices.append, adapters=adapters)
    check_model_names(cell.settings.model for cell in cells)
    if "model" not in {*flags, *(file or ())} and not presets:
        for names in adapters:
            check_first_adapter(names)
    warn_mini(options, *(cell.settings for cell in cells))
    for choice in dict.fromkeys(choices):
        print_runner(choice)
    return cells


def document_source(options: Options, more_images: tuple[str, ...] = ()) -> Source:
    """Return the documents and prompts of a command's options, or the sample documents.

    Raises:
        SettingError: options exclude each other, or a text is not valid.
    """
    from panscan.workload.requests import source_or_samples

    return source_or_samples(
        images=(*options.images, *more_images),
        prompts=options.prompts,
        prompt=utf8("--prompt", options.prompt),
        dataset=options.dataset,
        no_images=options.no_images,
        num_samples=options.limit,
        system=utf8("--system", options.system),
        raw_prompt=options.raw_prompt,
        seed=options.seed,
        dataset_format=options.dataset_format,
        dataset_split=options.dataset_split,
        external_images=options.allow_external_images,
        max_pages=options.max_pages,
        template_kwargs=read_template_kwargs(options.template_kwargs),
        on_default=note,
    )


@contextmanager
def sweep_progress(plan: SweepPlan, done: FinishedVisits, directory: Path) -> Iterator[SweepProgress]:
    """Show a sweep's progress. If it is interrupted or fails, write its summary so far and report how to resume it.

    Args:
        plan: the sweep.
        done: visits that an earlier start finished.
        directory: the run directory.
    """
    from panscan.bench.run import finish
    from panscan.cli.progress import MEASURING, SweepProgress

    try:
        with activity(MEASURING) as step:
            yield SweepProgress(plan, done, step)
    except (KeyboardInterrupt, PanscanError) as error:
        resumable = not isinstance(error, InputError | SettingError)  # these would stop it again
        with suppress(PanscanError):  # there is no summary of a run without records
            finish(directory)
            if resumable:
                note(f"resume with: panscan bench --resume {shlex.quote(str(directory))}")
        raise


def print_results(run: Run, directory: Path, *, as_json: bool) -> int:
    """Print what was measured, write the report, and return the exit code: 0 if every cell is done, else 4."""
    from panscan.records.store import outcome_of
    from panscan.report import HTML_NAME, to_document, write_report
    from panscan.report.terminal import print_curves, print_decision, print_summary

    console = out()
    if (run.repeats or run.outcomes) and not as_json:
        print_summary(run, console)
        print_curves(run, console)
        print_decision(run, console)
    with activity("writing the report"):
        write_report(run, directory / HTML_NAME)
    if as_json:
        print_json(to_document(run))
    else:
        for name, file in (("records", "records.jsonl"), ("summary", "summary.csv"), ("report", HTML_NAME)):
            console.print(f"{name}: {directory / file}", soft_wrap=True)
    return 0 if all(outcome_of(run, cell)[0] == "done" for cell in run.cells) else 4
