"""``panscan batch``: one prompt, or a dataset of questions, over many documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from panscan.cli.options import (
    axis_options,
    common_options,
    errors,
    given_axes,
    one_preset,
    out,
    read_prompt,
    say_mini,
    show_warnings,
    utf8,
)
from panscan.core import ImageError, PanscanError, SettingError
from panscan.settings import ENGINE_LIMITS, axes, settings_from

__all__ = ["command"]

_NOT_HERE = ("runner", *ENGINE_LIMITS)
_REASONS = 50  # failed documents that are listed; the file has them all
_PERIOD_S = 300.0  # over which the time left is estimated: on a CPU a document may take a minute
_EVERY = 100  # documents between two lines of progress where no bar can be drawn

EPILOG = """\b
Examples
  panscan batch scans/ -p "What is the total?" -o answers.jsonl
  panscan batch "contracts/**/*.pdf" -p "Who signs?" --whole-files -o signers.jsonl
  panscan batch questions.jsonl -o answers.jsonl --model google/gemma-3-4b-it
  panscan batch scans/ -p "What is the total?" -o answers.jsonl --resume

One JSON object a line, in the order of the documents. Beside it, answers.jsonl.run.json says how it was made (prompt,
settings, versions): --resume goes on with the same only. What may change on the way are the engine's sizes
(--max-num-seqs, --kv-cache-gb, ...), --device, --order, --limit and the documents, which are known by their names as
you type them.
"""


@click.command("batch", epilog=EPILOG, short_help="Ask about many documents; goes on where it was stopped.")
@click.argument("sources", nargs=-1, required=True, metavar="DIR|GLOB|FILE|URL|QUESTIONS.jsonl...")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file of answers.")
@click.option("-p", "--prompt", help="The question; '-' or none reads it from standard input.")
@click.option("--system", help="A system message for every request.")
@click.option("--raw-prompt", is_flag=True, help="Prompts as they are, with <start_of_image>: for base checkpoints.")
@click.option("--whole-files", is_flag=True, help="All pages of a PDF or TIFF in one request, not each in its own.")
@click.option("--limit", type=click.IntRange(1), help="The first so many documents (pages, questions).")
@click.option(
    "--order", type=click.Choice(["input", "finished"]), default="input", show_default=True,
    help="Write answers in the order of the documents, or as they finish.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with this output: what it answers is not asked again.")
@click.option("--retry-failed", is_flag=True, help="With --resume: ask again what failed.")
@click.option("--force", is_flag=True, help="Throw an existing output away.")
@click.option("--preset", help="A preset's name, or a YAML file (see panscan recommend).")
@axis_options(leave_out=_NOT_HERE)
@common_options
def command(**options: Any) -> int:
    """Ask one prompt about many documents, or the questions of a dataset, through panscan's engine.

    Every page of a PDF or TIFF is a document of its own (see --whole-files). A dataset is JSON Lines of
    {image, question} and perhaps id; its images are relative to its file. A document that fails has its reason in its
    line, and the others go on. Whatever ends the job, even kill -9, --resume goes on with what is not in the file.
    """
    from panscan.batch.answers import AnswerFile
    from panscan.batch.items import find_work
    from panscan.batch.job import Answered, changed_versions, difference
    from panscan.model.runtime import quiet_libraries

    show_warnings(errors())
    quiet_libraries()
    mode = _mode(options)
    console = errors()  # one for both: a line and a spinner of two consoles would overwrite each other

    def on_problem(problem: ImageError) -> None:
        console.print(f"left out: {problem}", style="yellow", soft_wrap=True)

    with console.status("finding documents"):
        work = find_work(
            options["sources"], whole_files=options["whole_files"], limit=options["limit"], on_problem=on_problem
        )
    job = _job(options, dataset=work.has_questions)
    header = job.header()
    with AnswerFile(options["output"], header, mode, difference) as file:
        for change in changed_versions(file.begun_with, header):
            console.print(f"the file began with {change}: answers may round differently", soft_wrap=True)
        with console.status("looking for what is left"):
            answered = Answered(file, retry_failed=options["retry_failed"])
            left = answered.left(work)
            first = next(left, None)
        if first is not None:
            _answer(job, chain([first], left), file, answered, work, in_order=options["order"] == "input")
        return _summary(file, options["output"])


def _answer(job: Any, items: Any, file: Any, answered: Any, work: Any, *, in_order: bool) -> None:
    from panscan.batch.job import answer
    from panscan.engine.engine import Engine

    with errors().status(Text(f"loading {job.settings.model_name}")):
        engine = Engine.from_settings(job.settings)
    window = 4 * max(job.settings.max_num_seqs, 16) if in_order else None
    with engine, _resumable(), _progress(errors(), lambda: work.expected - answered.skipped) as on_answer:
        answer(engine, job, items, file.write, window=window, on_answer=on_answer)


def _job(options: dict[str, Any], *, dataset: bool) -> Any:
    from panscan.batch.job import Job
    from panscan.model.machine import resolve_device, resolve_dtype

    if dataset and options["prompt"] is not None:
        raise SettingError("a dataset brings its own questions: leave -p out")
    prompt = None if dataset else read_prompt(options["prompt"])
    chosen = one_preset(options["preset"], "batch", [name for name in axes() if name not in _NOT_HERE])
    given = given_axes(options, lists=False)
    settings = settings_from({**chosen, **{name: values[0] for name, values in given.items()}, "runner": "engine"})
    if settings.model == "mini" and not settings.random_weights and options["model"] is None:
        say_mini()
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)  # "auto" may be another one where the job is resumed
    settings = replace(
        settings, dtype=next(name for name in ("fp32", "bf16", "fp16") if resolve_dtype(name, device) == dtype)
    )
    return Job(
        settings=settings,
        prompt=prompt,
        system=utf8("--system", options["system"]),
        raw_prompt=options["raw_prompt"],
        whole_files=options["whole_files"],
    )


def _mode(options: dict[str, Any]) -> Any:
    if options["resume"] and options["force"]:
        raise SettingError("--resume goes on with the output and --force throws it away: give one of them")
    if options["retry_failed"] and not options["resume"]:
        raise SettingError("--retry-failed needs --resume")
    return "resume" if options["resume"] else "force" if options["force"] else "new"


@contextmanager
def _resumable() -> Iterator[None]:
    """A job that is interrupted, or that its engine or its disk ends, says how to go on."""
    try:
        yield
    except (KeyboardInterrupt, PanscanError):
        given = [word for word in click.get_current_context().obj["arguments"] if word not in ("--force", "--resume")]
        errors().print(f"go on with: {shlex.join(['panscan', *given, '--resume'])}", soft_wrap=True)
        raise


@contextmanager
def _progress(console: Console, expected: Any) -> Iterator[Any]:
    """A bar with the time left; gives what moves it on by one answer. Where no bar can be drawn, lines."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    answers = failed = 0
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=_PERIOD_S) as bar:
        task = bar.add_task("answering", total=expected())

        def on_answer(record: dict[str, Any]) -> None:
            nonlocal answers, failed
            answers += 1
            failed += record["error"] is not None
            text = f"answering ({failed} failed)" if failed else "answering"
            bar.update(task, advance=1, total=expected(), description=text)
            if not shown and answers % _EVERY == 0:
                console.print(f"{text}: {answers} of {expected()}", soft_wrap=True)

        yield on_answer


def _summary(file: Any, path: Path) -> int:
    from panscan.batch.job import tally

    found = tally(file.records(), _REASONS)
    for name, reason in found.reasons:
        text = reason if reason.startswith(name) else f"{name}: {reason}"
        errors().print(f"failed: {text}", style="yellow", soft_wrap=True)
    if found.failed > len(found.reasons):
        errors().print(f"failed: {found.failed - len(found.reasons)} more; see 'error' in {path}", soft_wrap=True)
    failed = f", {found.failed} failed (ask them again with --resume --retry-failed)" if found.failed else ""
    out().print(f"{found.answered} answered{failed}: {path}", soft_wrap=True)
    return 3 if found.failed else 0
