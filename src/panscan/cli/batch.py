"""``panscan batch``: one prompt, or a dataset of questions, over many documents."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import chain
from typing import Any

import click
from rich.text import Text

from panscan.cli.options import (
    InRange,
    axis_options,
    common_options,
    errors,
    external_images_option,
    first_process,
    given_values,
    import_libraries,
    json_schema_option,
    max_pages_option,
    one_preset,
    out,
    read_json_schema,
    read_prompt,
    say_mini,
    show_warnings,
    storage_option,
    typed_again,
    url_options,
    utf8,
)
from panscan.cli.progress import batch_progress
from panscan.core import (
    ImageError,
    ModelError,
    PanscanError,
    RecordsError,
    SettingError,
    UnsupportedError,
    escape_controls,
    now,
)
from panscan.core.ranges import Range
from panscan.settings import Settings, axes, foreign_settings

__all__ = ["command"]

_NOT_HERE = ("runner", *foreign_settings("engine"))
_LIMIT = InRange(Range(whole=True, least=1, most=2**31 - 1))
_PRICE = InRange(Range(above=0, most=1_000_000))
_REPLICAS = InRange(Range(whole=True, least=1, most=1024))
_REASONS = 50  # failed documents that are listed; the file has them all

EPILOG = """\b
Examples
  panscan batch scans/ -p "What is the total?" -o answers.jsonl
  panscan batch "contracts/**/*.pdf" -p "Who signs?" --whole-files -o signers.jsonl
  panscan batch questions.jsonl -o answers.jsonl --model google/gemma-3-4b-it
  panscan batch scans/ -p "What is the total?" -o answers.jsonl --resume
  panscan batch s3://bucket/scans -p "What is the total?" -o s3://bucket/totals.parquet --cost-per-hour 2.5
  panscan batch pages.parquet --prompt-column question -o answers.parquet

One JSON object a line, in the order of the documents; what a later --resume adds comes behind, and what it asks again
takes the place of what had failed. Beside it, answers.jsonl.run.json says how it was made (prompt, settings, versions):
--resume goes on with the same only. What may change on the way are the engine's sizes (--max-num-seqs, --kv-cache-gb,
...), --device, --order, --limit and the documents, which are known by their names as you type them. While a job is not
done, answers.jsonl.held keeps answers that wait for a slower one before them. Half a line that a crash left at the end
moves to answers.jsonl.torn. The ledger, answers.jsonl.ledger.json, counts pages, tokens, retries and time.

Answers for a Parquet file or an object store are written to JSON Lines on this machine first; see docs/batch.md.
"""


@click.command("batch", epilog=EPILOG, short_help="Ask about many documents; goes on where it was stopped.")
@click.argument("sources", nargs=-1, required=True, metavar="DIR|GLOB|FILE|URL|QUESTIONS.jsonl|PAGES.parquet...")
@click.option(
    "-o", "--output", default="answers.jsonl", show_default=True, metavar="FILE|URL",
    help="File or object for the answers (.parquet, else JSONL).",
)  # fmt: skip
@click.option("-p", "--prompt", help="The question; '-' or none reads it from standard input.")
@click.option("--system", help="A system message for every request.")
@click.option("--raw-prompt", is_flag=True, help="Prompts as they are, with <start_of_image>: for base checkpoints.")
@click.option("--whole-files", is_flag=True, help="All pages of a PDF or TIFF in one request, not each in its own.")
@click.option(
    "--limit",
    type=_LIMIT,
    help="Process only the first N documents (pages, questions).",
)
@click.option(
    "--order", type=click.Choice(["input", "finished"]), default="input", show_default=True,
    help="Write answers in the order of the documents, or as they finish.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with this output: what it answers is not asked again.")
@click.option("--retry-failed", is_flag=True, help="With --resume: ask again what failed.")
@click.option("--force", is_flag=True, help="Throw an existing output away.")
@click.option("--image-column", metavar="NAME", help="Image column of Parquet input.  [default: image]")
@click.option("--id-column", metavar="NAME", help="Id column of Parquet input.  [default: id]")
@click.option("--prompt-column", metavar="NAME", help="Prompt column of Parquet input.  [default: question]")
@click.option("--cost-per-hour", type=_PRICE, metavar="PRICE", help="Machine cost per hour, to report page prices.")
@storage_option
@click.option("--preset", help="A preset's name, or a YAML file (see panscan recommend).")
@click.option("--replicas", type=_REPLICAS, help="Run this many replicas of the engine on Ray.")
@click.option("--ray-address", help="Join this Ray cluster instead of starting one.")
@json_schema_option
@external_images_option
@url_options
@max_pages_option
@axis_options(leave_out=_NOT_HERE)
@common_options
def command(**options: Any) -> int:
    """Ask one prompt about many documents, or the questions of a dataset, through panscan's engine.

    Every page of a PDF or TIFF is a document of its own (see --whole-files). A dataset is JSON Lines of
    {image, question} and perhaps id; its images are relative to its file. A document that fails has its reason in its
    line, and the others go on. Whatever ends the job, even kill -9, --resume asks only what was not answered.
    """
    from panscan.batch.answers import AnswerFile
    from panscan.batch.destination import destination, fetch_previous
    from panscan.batch.dispatch import up_to_first_question
    from panscan.batch.job import changed_versions, difference
    from panscan.batch.ledger import LedgerWriter
    from panscan.batch.pending import Answered

    show_warnings(errors())
    given_values(options)  # a mistyped value is refused before documents are searched for
    mode = _mode(options)
    console = errors()  # one for both: a line and a spinner of two consoles would overwrite each other
    with console.status("finding documents"):
        work = _work(options)
        target = destination(options["output"])
        target.refuse_sources(work.files)
    job = _job(options, dataset=work.has_questions)
    header = job.header()
    with console.status("looking for earlier answers"):
        fetch_previous(target, mode)
    if target.url is not None:
        console.print(f"answers are kept in {target.path} and uploaded to {target.name}", soft_wrap=True)
    with AnswerFile(target.path, header, mode, difference) as file:
        for change in changed_versions(file.begun_with, header):
            console.print(f"the file began with {change}: answers may round differently", soft_wrap=True)
        with console.status("looking for what is left"):
            answered = Answered(file, retry_failed=options["retry_failed"])
            tasks = answered.left(work)
            ahead = up_to_first_question(tasks)
        idle = all(task.held for task in ahead)
        ledger = LedgerWriter(file.path, resumed=file.begun, cost_per_hour=options["cost_per_hour"])
        with (
            _resumable(file, job.prompt if options["prompt"] in (None, "-") else None),
            _kept(file, target, ledger, mode, idle=idle) as keep,
        ):
            _answer(job, ahead, tasks, file, answered, work, options, keep)
        if not idle:
            _say_speed(ledger.ledger)
        return _summary(file, options["output"], idle=idle)


class _JobLedger:
    """The ledger of a job, and its uploads if the answers go to an object store."""

    def __init__(self, ledger: Any, uploader: Any) -> None:
        self.ledger, self._uploader = ledger, uploader

    def counted(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the tasks, and count those that are asked again."""
        for task in tasks:
            if task.replaces is not None:
                self.ledger.retried()
            yield task

    def keep(self, record: dict[str, Any]) -> None:
        """Count an answer, and upload it if an upload is due."""
        self.ledger.add(record)
        if self._uploader is not None:
            self._uploader.answered()


@contextmanager
def _kept(file: Any, target: Any, ledger: Any, mode: str, *, idle: bool) -> Iterator[_JobLedger]:
    """Yield an object that counts and uploads answers; complete the output when the job ends."""
    from panscan.batch.destination import Uploader

    uploader = None if target.url is None else Uploader(target, replace=mode == "force")
    try:
        yield _JobLedger(ledger, uploader)
        file.finish()
    except (KeyboardInterrupt, PanscanError):
        if file.begun and not idle:
            with suppress(RecordsError):  # the first error counts
                ledger.end(file.records(), "stopped")
        raise
    if not idle:
        ledger.end(file.records(), "finished")
    target.finish()
    if uploader is not None:
        with errors().status("uploading"):
            uploader.finish()


def _work(options: dict[str, Any]) -> Any:
    from panscan.batch.items import find_work

    def on_problem(problem: ImageError) -> None:
        errors().print(f"left out: {problem}", style="yellow", soft_wrap=True)

    return find_work(
        options["sources"],
        whole_files=options["whole_files"],
        limit=options["limit"],
        max_pages=options["max_pages"],
        on_problem=on_problem,
        external_images=options["allow_external_images"],
        columns=_columns(options),
        has_prompt=options["prompt"] is not None,
    )


def _columns(options: dict[str, Any]) -> Any:
    from panscan.batch.tables import TableColumns

    names = {name: options[f"{name}_column"] for name in ("image", "id", "prompt")}
    return TableColumns(**names) if any(name is not None for name in names.values()) else None


def _say_speed(ledger: Any) -> None:
    if (speed := ledger.pages_per_second) is None:
        return
    pages = sum(start.successful_pages for start in ledger.starts)
    text = f"{pages} pages in {ledger.seconds:.1f} s: {speed:.3g} pages/s (model load: {ledger.load_seconds:.1f} s)"
    if (price := ledger.price_per_million_pages) is not None:
        text += f"; price per million pages: {price:,.2f}"
    errors().print(text, soft_wrap=True)


def _answer(
    job: Any, ahead: Any, tasks: Any, file: Any, answered: Any, work: Any, options: dict[str, Any], keep: _JobLedger
) -> None:
    from panscan.batch.dispatch import answer, answers_ahead

    with ExitStack() as stack:
        engine = None
        if ahead and ahead[-1].needs_engine:
            with errors().status(Text(escape_controls(f"loading {job.settings.model_name}"))):
                began = now()
                stack.enter_context(redirect_stdout(sys.stderr))  # Ray reports killed processes on standard output
                engine = stack.enter_context(_engine(job.settings, options["replicas"], options["ray_address"]))
                keep.ledger.loaded(now() - began)
        show = stack.enter_context(batch_progress(errors(), lambda: work.expected - answered.skipped))

        def on_answer(record: dict[str, Any]) -> None:
            show(record)
            keep.keep(record)

        in_order = options["order"] == "input"
        answer(
            engine,
            job,
            keep.counted(chain(ahead, tasks)),
            file,
            window=answers_ahead(job.settings, options["replicas"] or 1) if in_order else None,
            proven=answered.any_succeeded,
            on_answer=on_answer,
        )


def _engine(settings: Settings, replicas: int | None, ray_address: str | None) -> Any:
    """Load the model, in this process or in replicas.

    Raises:
        PanscanError: the model cannot be loaded.
    """
    if replicas is None and ray_address is None:
        from panscan.engine.engine import Engine

        return Engine.from_settings(settings)
    from panscan.serve.cluster_engine import ClusterEngine

    return ClusterEngine(settings, replicas or 1, ray_address)


def _job(options: dict[str, Any], *, dataset: bool) -> Any:
    from panscan.batch.job import Job, with_resolved_dtype

    if dataset and options["prompt"] is not None:
        raise SettingError("a dataset brings its own questions: leave -p out")
    prompt = None if dataset else read_prompt(options["prompt"])
    preset = one_preset(options["preset"], "batch", [name for name in axes() if name not in _NOT_HERE])
    settings = Settings(**{**preset, **given_values(options), "runner": "engine"})
    if settings.model == "mini" and not settings.random_weights and options["model"] is None:
        say_mini()
    import_libraries()
    return Job(
        settings=with_resolved_dtype(settings) if _precision_is_known(settings, options["ray_address"]) else settings,
        prompt=prompt,
        system=utf8("--system", options["system"]),
        raw_prompt=options["raw_prompt"],
        whole_files=options["whole_files"],
        max_pages=options["max_pages"],
        json_schema=read_json_schema(options["json_schema"], ignore_eos=settings.ignore_eos),
        image_column=options["image_column"],
    )


def _precision_is_known(settings: Settings, ray_address: str | None) -> bool:
    """Return whether this machine can resolve the precision, which is part of what a job may not change.

    Raises:
        SettingError: the precision is ``auto``, and depends on the machines of a cluster.
    """
    if ray_address is None or settings.device == "cpu":
        return True
    if settings.dtype == "auto":
        raise SettingError("--dtype: auto depends on the cluster's machines; give --dtype bf16 with --ray-address")
    return False


def _mode(options: dict[str, Any]) -> Any:
    if options["resume"] and options["force"]:
        raise SettingError("--resume goes on with the output and --force throws it away: give one of them")
    if options["retry_failed"] and not options["resume"]:
        raise SettingError("--retry-failed needs --resume")
    return "resume" if options["resume"] else "force" if options["force"] else "new"


@contextmanager
def _resumable(file: Any, piped: str | None) -> Iterator[None]:
    """A job that is interrupted, or that its engine or its disk ends, says how to go on.

    ``piped``: the prompt, if it came from standard input, which cannot be read twice.
    """
    try:
        yield
    except (KeyboardInterrupt, PanscanError) as error:
        # A setting or a model that is wrong would be as wrong the next time.
        if first_process() and not isinstance(error, SettingError | ModelError | UnsupportedError):
            from panscan.images.fetch import conceal

            context = click.get_current_context()
            again = [*(() if piped is None else ("-p", piped)), *(("--resume",) if file.begun else ())]
            without = [*(("force", "resume") if file.begun else ()), *(() if piped is None else ("prompt",))]
            words = ["panscan", "batch", *typed_again(context, without=without, extra=again)]
            sources = context.params["sources"]
            words = [conceal(word) if word in sources else word for word in words]
            line = f"go on with: {shlex.join(words)}"
            line = escape_controls(line) if sys.stderr.isatty() else line
            # Bytes: a prompt's tabs, or a name that is not Unicode, must reach the terminal as they are.
            click.echo(os.fsencode(line), err=True)
        raise


def _summary(file: Any, path: str, *, idle: bool) -> int:
    from panscan.batch.pending import tally

    found = tally(file.records(), _REASONS)
    for name, reason in found.reasons:
        text = reason if reason.startswith(name) else f"{name}: {reason}"
        errors().print(f"failed: {text}", style="yellow", soft_wrap=True)
    if found.failed > len(found.reasons):
        errors().print(f"failed: {found.failed - len(found.reasons)} more; see 'error' in {path}", soft_wrap=True)
    answered = f"nothing left to ask: {found.answered} answered already" if idle else f"{found.answered} answered"
    failed = f", {found.failed} failed (ask them again with --resume --retry-failed)" if found.failed else ""
    out().print(f"{answered}{failed}: {path}", soft_wrap=True)
    return 3 if found.failed else 0
