"""``panscan bench``: sweep settings over documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from panscan.cli.options import (
    axis_options,
    common_options,
    errors,
    first_process,
    given_axes,
    out,
    say_mini,
    show_warnings,
    utf8,
)
from panscan.core import InputError, PanscanError, SettingError

__all__ = ["command"]

EPILOG = """\b
Examples
  panscan bench
  panscan bench --model google/gemma-3-27b-it --images "docs/*.png" --prompts prompts.txt --batch-size 1,2,4
  panscan bench --dataset samples/questions.jsonl --preset baseline,balanced,document
  panscan bench --dataset DocVQA/ --num-samples 500 --grid-max-crops 4,10
  panscan bench --images scans/ -p "What is the total?" --grid-max-crops 2,4,8 --dry-run
  panscan bench --model google/gemma-3-27b-it --device-map auto --replicas 4 --gpus-per-replica 2
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
@click.option("--num-samples", type=int, help="Requests per cell: a seeded draw of fewer, or repeats for more.")
@click.option("--system", help="A system message for every request.")
@click.option("--raw-prompt", is_flag=True, help="Prompts as they are, with <start_of_image>: for base checkpoints.")
@click.option("--preset", help="Presets, each combined with all other settings (comma list).")
@click.option("--grid", "grid_file", help="A YAML file of 'setting: value' or 'setting: [values]'.")
@click.option("--no-pan-and-scan", is_flag=True, help="The same as --do-pan-and-scan false.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Times each cell is measured.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Batches thrown away first.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of cells and the draw of samples.")
@click.option("--include-content", is_flag=True, help="Keep prompts and answers in the records.")
@click.option("--no-verify", is_flag=True, help="Do not compare answers with the reference; outputs then say so.")
@click.option("--reference", help="A truth's file, or a run that stored one, instead of computing it here.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Copies that run side by side.")
@click.option("--gpus-per-replica", type=click.IntRange(1), default=1, show_default=True, help="GPUs of each copy.")
@click.option("--output-dir", default="runs", show_default=True, help="Where run directories are made.")
@click.option("--resume", help="Go on with this run directory; takes no other options.")
@click.option("--dry-run", is_flag=True, help="Show cells, views, tokens and a rough time; run nothing.")
@axis_options()
@common_options
def command(**options: Any) -> int:
    """Sweep settings over your documents: latency, throughput, tokens and memory of every combination.

    Without --model the bundled mini Gemma 3 runs, without --images its sample documents. Results go to a run
    directory: records.jsonl (raw), summary.csv and report.html. Each cell's answers are compared with
    the reference's (float32 eager attention, the same weights and views), and the verdict stands beside its speed.
    """
    from panscan.model.runtime import quiet_libraries

    show_warnings(errors())
    quiet_libraries()
    if options["resume"] is not None:
        return _resume(options)
    from panscan.bench import run
    from panscan.bench.plan import SweepPlan
    from panscan.bench.workload import load_workload

    cells = _cells(options)
    source = _source(options)
    workload = load_workload(source, on_problem=_say_problem)
    items, metric = workload.items, workload.quality_metric(options["quality_metric"])
    if options["dataset"] is not None:
        _say_dataset(workload)
    if options["no_verify"] and options["reference"] is not None:
        raise SettingError("--no-verify and --reference exclude each other")
    plan = SweepPlan(
        cells=cells,
        items=items,
        source=source,
        repeats=options["repeats"],
        warmup=options["warmup"],
        seed=options["seed"],
        include_content=options["include_content"],
        verify=not options["no_verify"],
        reference=options["reference"],
        replicas=options["replicas"],
        gpus_per_replica=options["gpus_per_replica"],
        dataset=workload.dataset,
        quality_metric=metric,
    )
    if plan.replicas * plan.gpus_per_replica > 1:
        from panscan.bench.replicas import slots

        slots(plan)  # what this machine cannot give is said before a run directory is made
    if options["reference"] is not None:
        run.check_reference(plan)
    if options["dry_run"]:
        from panscan.cli.tables import print_predictions

        print_predictions(plan, out())
        return 0
    from panscan.cli.progress import SweepProgress

    if not first_process():
        with SweepProgress(plan, set(), errors()) as progress:
            run.follow(plan, set(), progress)
        return 0
    directory = run.new_directory(Path(options["output_dir"]), cells[0].settings.model_name)
    line = ["panscan", *click.get_current_context().obj["arguments"]]
    errors().print(f"cells: {len(cells)}, requests each: {len(items)}; records in {directory}", soft_wrap=True)
    with _resumable(directory), SweepProgress(plan, set(), errors()) as progress:
        measured = run.start(plan, directory, line, progress)
    return _show(measured, directory)


@contextmanager
def _resumable(directory: Path) -> Iterator[None]:
    """A run that is interrupted, or that a dead replica ends, keeps a summary of what is done; how to go on is said."""
    from panscan.bench.run import finish

    try:
        yield
    except (KeyboardInterrupt, PanscanError) as error:
        goes_on = not isinstance(error, InputError | SettingError)  # which would stop it again
        with suppress(PanscanError):  # stopped before there was anything
            finish(directory)
            if goes_on:
                errors().print(f"go on with: panscan bench --resume {shlex.quote(str(directory))}", soft_wrap=True)
        raise


def _resume(options: dict[str, Any]) -> int:
    from panscan.bench import run
    from panscan.cli.progress import SweepProgress
    from panscan.records.store import read_run

    context = click.get_current_context()
    given = [
        option
        for option in context.command.params
        if option.name not in (None, "resume")
        and context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise SettingError(f"--resume takes the run's own settings: leave {given[0].get_error_hint(context)} out")
    directory = Path(options["resume"])
    before = read_run(directory)
    run.check_same_machine(before)
    plan = run.plan_of(before, on_problem=_say_problem)
    done = before.finished()
    if not first_process():
        with SweepProgress(plan, done, errors()) as progress:
            run.follow(plan, done, progress)
        return 0
    repeats = len(plan.cells) * plan.repeats
    errors().print(f"resuming {directory}: {len(before.repeats)} of {repeats} repeats are done", soft_wrap=True)
    with _resumable(directory), SweepProgress(plan, done, errors()) as progress:
        measured = run.resume(plan, directory, progress)
    return _show(measured, directory)


def _show(measured: Any, directory: Path) -> int:
    from panscan.report import HTML_NAME, write_report
    from panscan.report.terminal import print_curves, print_summary

    console = out()
    print_summary(measured, console)
    print_curves(measured, console)
    with errors().status("writing the report"):
        write_report(measured, directory / HTML_NAME)
    for name, file in (("records", "records.jsonl"), ("summary", "summary.csv"), ("report", HTML_NAME)):
        console.print(f"{name}: {directory / file}", soft_wrap=True)
    finished = [cell for cell in measured.cells if measured.outcomes.get(cell, {}).get("outcome") == "done"]
    return 0 if len(finished) == len(measured.cells) else 4


def _cells(options: dict[str, Any]) -> list[Any]:
    from panscan.bench.grid import build_cells
    from panscan.presets.parse import read_grid_file

    flags = given_axes(options)
    if options["no_pan_and_scan"]:
        if flags.get("do_pan_and_scan", ["false"]) != ["false"]:
            raise SettingError("--no-pan-and-scan contradicts --do-pan-and-scan")
        flags["do_pan_and_scan"] = ["false"]
    file = read_grid_file(Path(options["grid_file"])) if options["grid_file"] else None
    presets = [name.strip() for name in options["preset"].split(",")] if options["preset"] else []
    cells = build_cells(flags, file=file, presets=presets)
    if "model" not in flags and any(cell.settings.model_name == "mini" for cell in cells):
        say_mini()
    return cells


def _source(options: dict[str, Any]) -> Any:
    from panscan.bench.workload import DEFAULT_PROMPT, Source

    images = (*options["images"], *options["more_images"])
    dataset = options["dataset"]
    if not images and dataset is None and not options["no_images"]:
        from panscan.bench.workload import sample_dataset

        place = sample_dataset()
        errors().print(f"no --images given: using the bundled sample documents ({place.parent})", soft_wrap=True)
        if options["prompts"] is not None or options["prompt"] is not None:
            images = (str(place.parent),)
        else:
            dataset = str(place)
    if dataset is None and options["prompts"] is None and options["prompt"] is None and not options["no_images"]:
        errors().print(f"no -p given: asking {DEFAULT_PROMPT!r}", soft_wrap=True)
    return Source(
        images=images,
        prompts=options["prompts"],
        prompt=utf8("--prompt", options["prompt"]),
        dataset=dataset,
        no_images=options["no_images"],
        num_samples=options["num_samples"],
        system=utf8("--system", options["system"]),
        raw_prompt=options["raw_prompt"],
        seed=options["seed"],
        dataset_format=options["dataset_format"],
        dataset_split=options["dataset_split"],
    )


def _say_dataset(workload: Any) -> None:
    facts = workload.dataset
    others = f" (other splits: {facts.other_splits})" if facts.other_splits else ""
    errors().print(f"dataset {facts.text}{others}", soft_wrap=True)
    if facts.unscored == facts.used:
        errors().print("none of these questions has answers, so quality cannot be measured", soft_wrap=True)


def _say_problem(problem: InputError) -> None:
    errors().print(f"left out: {problem}", style="yellow", soft_wrap=True)
