"""``panscan bench``: sweep settings over documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.options import (
    SEED,
    InRange,
    axis_options,
    common_options,
    errors,
    external_images_option,
    first_process,
    given_axes,
    import_libraries,
    max_pages_option,
    out,
    say_mini,
    show_warnings,
    url_options,
    utf8,
)
from panscan.core import InputError, PanscanError, SettingError
from panscan.core.ranges import Range

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.bench.plan import SweepPlan
    from panscan.bench.workload import Source
    from panscan.cli.progress import SweepProgress
    from panscan.records.store import Run

__all__ = ["command", "exit_code", "print_files", "print_run", "say_dataset", "say_start", "sweep_progress"]

_SAMPLES = InRange(Range(whole=True, least=1, most=1_000_000))
_TRUTH = InRange(Range(whole=True, least=1, most=4096))
_REPEATS = InRange(Range(whole=True, least=1, most=10_000))
_WARMUP = InRange(Range(whole=True, least=0, most=10_000))
_PROCESSES = InRange(Range(whole=True, least=1, most=1024))

EPILOG = """\b
Examples
  panscan bench
  panscan bench --model google/gemma-3-27b-it --images "docs/*.png" --prompts prompts.txt --batch-size 1,2,4
  panscan bench --dataset samples/questions.jsonl --preset baseline,balanced,document
  panscan bench --dataset DocVQA/ --num-samples 500 --grid-max-crops 4,10
  panscan bench --images scans/ -p "What is the total?" --grid-max-crops 2,4,8 --dry-run
  panscan bench --model google/gemma-3-27b-it --device-map auto --replicas 4 --gpus-per-replica 2
  panscan bench --model google/gemma-3-27b-it --runner engine --tensor-parallel-size 1,2,4
  panscan bench --resume runs/20260101-120000-mini

Values of one option may be a comma list: every combination becomes a cell. Presets: baseline, balanced, document,
throughput, or a YAML file; --grid FILE reads 'setting: [values]'. Underscores work too (--attn_impl).
"""


@click.command("bench", epilog=EPILOG, short_help="Sweep settings over your documents and measure them.")
@click.argument("more_images", nargs=-1, metavar="[IMAGE]...")
@click.option("--images", multiple=True, help="Glob, directory, file (PDF too) or URL; may be repeated.")
@click.option("--prompts", help="A file with one prompt a line; every document gets every prompt.")
@click.option("-p", "--prompt", help="One prompt for every document.")
@click.option("--dataset", help="JSON Lines of {image, question, answers}; DocVQA, ChartQA, ...: docs/quality.md.")
@click.option("--dataset-format", help="Its layout, where it is not found out: jsonl, docvqa, chartqa, table, ...")
@click.option("--dataset-split", help="Which split of a dataset that has several.")
@click.option("--quality-metric", help="The metric that counts as quality.  [default: the dataset's own]")
@click.option("--no-images", is_flag=True, help="Prompts alone, for text-only checkpoints.")
@click.option("--num-samples", type=_SAMPLES, help="Requests per cell, sampled with --seed or repeated.")
@click.option("--system", help="A system message for every request.")
@click.option("--raw-prompt", is_flag=True, help="Prompts as they are, with <start_of_image>: for base checkpoints.")
@click.option("--preset", help="Presets, each combined with all other settings (comma list).")
@click.option("--grid", "grid_file", help="A YAML file of 'setting: value' or 'setting: [values]'.")
@click.option("--no-pan-and-scan", is_flag=True, help="The same as --do-pan-and-scan false.")
@click.option("--repeats", type=_REPEATS, default=1, show_default=True, help="Times each cell is measured.")
@click.option("--warmup", type=_WARMUP, default=1, show_default=True, help="Warm-up batches to discard.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed for the cell order and the sample.")
@click.option("--include-content", is_flag=True, help="Keep prompts and answers in the records.")
@click.option("--no-verify", is_flag=True, help="Do not compare answers with the reference; outputs then say so.")
@click.option("--verify-requests", type=_TRUTH, default=16, show_default=True, help="Requests to verify per cell.")
@click.option(
    "--verify-tokens", type=_TRUTH, default=32, show_default=True, help="Reference output tokens per request."
)
@click.option("--check-invariance", is_flag=True, help="Repeat requests alone, reordered, chunked and cached.")
@click.option("--reference", help="A truth's file, or a run that stored one, instead of computing it here.")
@click.option("--replicas", type=_PROCESSES, default=1, show_default=True, help="Model replicas that run in parallel.")
@click.option(
    "--gpus-per-replica",
    type=_PROCESSES,
    default=1,
    show_default=True,
    help="GPUs per replica, at least --tensor-parallel-size.",
)
@click.option("--output-dir", default="runs", show_default=True, help="Where run directories are made.")
@click.option("--resume", help="Go on with this run directory; takes no other options.")
@click.option("--dry-run", is_flag=True, help="Show cells, views, tokens and a rough time; run nothing.")
@external_images_option
@url_options
@max_pages_option
@axis_options()
@common_options
def command(**options: Any) -> int:
    """Sweep settings over your documents: latency, throughput, tokens and memory of every combination.

    Without --model the bundled mini Gemma 3 runs, without --images its sample documents. Results go to a run
    directory: records.jsonl (raw), summary.csv and report.html. Each cell's answers are compared with
    the reference's (float32 eager attention, the same weights and views), and the verdict stands beside its speed.
    """
    show_warnings(errors())
    if options["resume"] is not None:
        return _resume(options)
    plan = _plan(options)
    import_libraries()
    from panscan.bench import run
    from panscan.images.fetch import conceal

    run.check_plan(plan)
    if options["dry_run"]:
        from panscan.cli.tables import print_predictions

        print_predictions(plan, out())
        return 0
    if not first_process():
        return _follow(plan, set())
    directory = run.new_directory(Path(options["output_dir"]), plan.cells[0].settings.model_name)
    line = ["panscan", *map(conceal, click.get_current_context().obj["arguments"])]
    say_start(plan, directory)
    with sweep_progress(plan, set(), directory) as progress:
        measured = run.start(plan, directory, line, progress)
    return _show(measured, directory)


def _resume(options: dict[str, Any]) -> int:
    context = click.get_current_context()
    given = [
        option
        for option in context.command.params
        if option.name not in (None, "resume", "allow_private_urls", "allow_external_images", "max_pages")
        and context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise SettingError(f"--resume takes the run's own settings: leave {given[0].get_error_hint(context)} out")
    import_libraries()
    from panscan.bench import run
    from panscan.records.store import read_run

    directory = Path(options["resume"])
    before = read_run(directory)
    later = {"external_images": options["allow_external_images"], "max_pages": options["max_pages"]}
    plan = run.plan_to_resume(before, on_problem=_say_problem, later=later)
    done = before.finished()
    if not first_process():
        return _follow(plan, done)
    repeats = len(plan.cells) * plan.repeats
    errors().print(f"resuming {directory}: {len(before.repeats)} of {repeats} repeats are done", soft_wrap=True)
    with sweep_progress(plan, done, directory) as progress:
        measured = run.resume(plan, directory, progress)
    return _show(measured, directory)


def _follow(plan: SweepPlan, done: set[tuple[str, int | None]]) -> int:
    """Do the part of a process beside torchrun's first; that one prints and returns the exit code."""
    from panscan.bench.run import follow
    from panscan.cli.progress import SweepProgress

    with SweepProgress(plan, done, errors()) as progress:
        follow(plan, done, progress)
    return 0


def _plan(options: dict[str, Any]) -> SweepPlan:
    from panscan.bench.grid import merge_equal_work
    from panscan.bench.plan import SweepPlan
    from panscan.bench.workload import load_workload, views_of

    cells = _cells(options)
    source = _source(options)
    with errors().status("reading documents") as status:
        workload = load_workload(
            source,
            on_problem=_say_problem,
            on_document=lambda done, total: status.update(f"reading documents: {done} of {total}"),
        )
    plan = SweepPlan(
        cells=merge_equal_work(cells, views_of(workload.items)),
        items=workload.items,
        source=source,
        repeats=options["repeats"],
        warmup=options["warmup"],
        seed=options["seed"],
        include_content=options["include_content"],
        verify=not options["no_verify"],
        verify_requests=options["verify_requests"],
        verify_tokens=options["verify_tokens"],
        check_invariance=options["check_invariance"],
        reference=options["reference"],
        replicas=options["replicas"],
        gpus_per_replica=options["gpus_per_replica"],
        dataset=workload.dataset,
        quality_metric=workload.quality_metric(options["quality_metric"]),
    )
    if options["dataset"] is not None:
        say_dataset(plan)
    return plan


def _cells(options: dict[str, Any]) -> list[Cell]:
    from panscan.bench.grid import build_cells, without_pan_and_scan
    from panscan.presets.parse import read_grid_file

    flags = given_axes(options)
    if options["no_pan_and_scan"]:
        flags = without_pan_and_scan(flags)
    file = read_grid_file(Path(options["grid_file"])) if options["grid_file"] else None
    presets = [name.strip() for name in options["preset"].split(",")] if options["preset"] else []
    cells = build_cells(flags, file=file, presets=presets)
    if "model" not in flags and any(cell.settings.model_name == "mini" for cell in cells):
        say_mini()
    return cells


def _source(options: dict[str, Any]) -> Source:
    from panscan.bench.workload import source_or_samples

    return source_or_samples(
        images=(*options["images"], *options["more_images"]),
        prompts=options["prompts"],
        prompt=utf8("--prompt", options["prompt"]),
        dataset=options["dataset"],
        no_images=options["no_images"],
        num_samples=options["num_samples"],
        system=utf8("--system", options["system"]),
        raw_prompt=options["raw_prompt"],
        seed=options["seed"],
        dataset_format=options["dataset_format"],
        dataset_split=options["dataset_split"],
        external_images=options["allow_external_images"],
        max_pages=options["max_pages"],
        on_default=lambda remark: errors().print(remark, soft_wrap=True),
    )


def _say_problem(problem: InputError) -> None:
    errors().print(f"left out: {problem}", style="yellow", soft_wrap=True)


def say_dataset(plan: SweepPlan) -> None:
    """Report how many questions of the plan's dataset are used, and why others are not."""
    facts = plan.dataset
    if facts is None:
        return
    others = f" (other splits: {facts.other_splits})" if facts.other_splits else ""
    errors().print(f"dataset {facts.text}{others}", soft_wrap=True)
    if facts.unscored == facts.used:
        errors().print("none of these questions has answers, so quality cannot be measured", soft_wrap=True)


def say_start(plan: SweepPlan, directory: Path) -> None:
    """Report the size of a sweep that starts, and its run directory."""
    spared = sum(len(cell.aliases) for cell in plan.cells)
    same = f" ({spared} more lead to the same views)" if spared else ""
    size = f"cells: {len(plan.cells)}{same}, requests each: {len(plan.items)}"
    errors().print(f"{size}; records in {directory}", soft_wrap=True)


@contextmanager
def sweep_progress(plan: SweepPlan, done: set[tuple[str, int | None]], directory: Path) -> Iterator[SweepProgress]:
    """Show a sweep's progress. If it is interrupted or fails, write its summary so far and report how to resume it.

    Args:
        plan: the sweep.
        done: visits that an earlier start finished.
        directory: the run directory.
    """
    from panscan.bench.run import finish
    from panscan.cli.progress import SweepProgress

    try:
        with SweepProgress(plan, done, errors()) as progress:
            yield progress
    except (KeyboardInterrupt, PanscanError) as error:
        resumable = not isinstance(error, InputError | SettingError)  # these would stop it again
        with suppress(PanscanError):  # there is no summary of a run without records
            finish(directory)
            if resumable:
                errors().print(f"go on with: panscan bench --resume {shlex.quote(str(directory))}", soft_wrap=True)
        raise


def _show(measured: Run, directory: Path) -> int:
    from panscan.report import HTML_NAME, write_report

    print_run(measured)
    with errors().status("writing the report"):
        write_report(measured, directory / HTML_NAME)
    print_files(directory)
    return exit_code(measured)


def print_run(run: Run) -> None:
    """Print the table and the curves of a finished run."""
    from panscan.report.terminal import print_curves, print_summary

    console = out()
    print_summary(run, console)
    print_curves(run, console)


def print_files(directory: Path) -> None:
    """Print the paths of a finished run's files."""
    from panscan.report import HTML_NAME

    for name, file in (("records", "records.jsonl"), ("summary", "summary.csv"), ("report", HTML_NAME)):
        out().print(f"{name}: {directory / file}", soft_wrap=True)


def exit_code(run: Run) -> int:
    """Return 0 if every cell is done, else 4."""
    return 0 if all(run.outcomes.get(cell, {}).get("outcome") == "done" for cell in run.cells) else 4
