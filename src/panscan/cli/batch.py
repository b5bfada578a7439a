"""``panscan batch``: one prompt, or a dataset of questions, over many documents."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import chain
from typing import Any

import click

from panscan.cli.console import import_libraries, note, print_json, show
from panscan.cli.models import check_checkpoint, warn_demonstration, warn_mini
from panscan.cli.progress import batch_progress
from panscan.cli.values import (
    engine_settings,
    given_values,
    print_skipped,
    public_words,
    read_bounded,
    read_prompt,
    read_structures,
    read_template_kwargs,
    utf8,
)
from panscan.cli.verb import verb
from panscan.core import (
    ModelError,
    PanscanError,
    RecordsError,
    SettingError,
    UnsupportedError,
    escape_controls,
    now,
)
from panscan.core.activity import activity
from panscan.core.text import count
from panscan.core.tools import MAX_TOOLS_BYTES
from panscan.settings import Options, Settings

_REASONS = 50  # failed documents that are listed; the file has them all

EPILOG = """\
Documents without an answer are asked again with --resume, after any interruption.
Beside answers.jsonl, answers.jsonl.run.json has the prompt, settings and versions, which
--resume must repeat, and answers.jsonl.ledger.json counts pages, tokens and time.
See docs/batch.md for Parquet, object stores and the other files.

\b
Examples
  panscan batch scans/ -p "What is the total?" -o answers.jsonl
  panscan batch "contracts/**/*.pdf" -p "Who signs?" --whole-files -o signers.jsonl
  panscan batch questions.jsonl -o answers.jsonl --model google/gemma-3-4b-it
  panscan batch scans/ -p "What is the total?" -o answers.jsonl --resume
  panscan batch pages.parquet --prompt-column question -o answers.parquet
  panscan batch s3://bucket/scans -p "What is the total?" -o s3://bucket/totals.parquet
"""


@verb("batch", EPILOG)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
def command(options: Options, sources: tuple[str, ...]) -> int:
    """Answer one prompt over many documents, or the questions of a dataset.

    SOURCE is a directory, glob, file, URL, JSON Lines file of {image, question} or Parquet file. Each page of a PDF or
    TIFF is a document, unless --whole-files is given. If a document fails, its line says why.
    """
    from panscan.batch.answers import AnswerFile, refuse_answers
    from panscan.batch.destination import Uploader, destination, fetch_previous
    from panscan.batch.dispatch import up_to_first_question
    from panscan.batch.job import changed_versions, difference
    from panscan.batch.ledger import LedgerWriter
    from panscan.batch.pending import AnsweredItems

    given_values(options)  # a mistyped value is refused before documents are searched for
    mode = _mode(options)
    with activity("finding documents"):
        work = _found_work(options, sources)
        target = destination(options.answers_path)
        files = (options.json_schema, options.grammar, options.tools)
        target.refuse_sources([*work.files, *filter(None, files)])
    if mode == "new" and target.url is None and target.path.is_file():
        refuse_answers(target.path)  # before PyTorch is imported
    job = _job(options, work)
    header = job.header()
    with activity("looking for earlier answers"):
        fetch_previous(target, mode)
    if target.url is not None:
        note(f"answers are kept in {target.path} and uploaded to {target.name}")
    with AnswerFile(target.path, header, mode, difference) as file:
        for change in changed_versions(file.original_header, header):
            note(f"the file began with {change}: answers may round differently")
        with activity("looking for pending documents"):
            answered = AnsweredItems(file, retry_failed=options.retry_failed)
            tasks = answered.pending(work)
            ahead = up_to_first_question(tasks)
        idle = not ahead
        ledger = LedgerWriter(file.path, resumed=file.begun, cost_per_hour=options.cost_per_hour)
        uploader = None if target.url is None else Uploader(target, replace=mode == "force")
        piped = job.prompt if options.prompt in (None, "-") else None
        with _resumable(file, piped):
            with _completed(file, ledger, answered, idle=idle):
                if not idle:
                    _answer_tasks(job, ahead, tasks, file, answered, work, options, ledger, uploader)
            target.finish()
            if uploader is not None:
                with activity("uploading"):
                    uploader.finish()
        if not idle:
            _print_speed(ledger.ledger)
        failures = _print_failures(file, options.answers_path)
        if options.json:
            counts = json.loads(ledger.path.read_text("utf-8")) if ledger.path.exists() else {}
            print_json({"answers": options.answers_path, **counts})
        else:
            _print_counts(file, failures, options.answers_path, idle=idle)
        return 3 if failures else 0


@contextmanager
def _completed(file: Any, ledger: Any, answered: Any, *, idle: bool) -> Iterator[None]:
    """Sort the answers and count them when the job ends, in whatever way."""
    try:
        yield
    except (KeyboardInterrupt, PanscanError):
        if file.begun and not idle:
            with suppress(RecordsError):  # the first error counts
                file.finish(answered.order, answered.superseded)
                ledger.end(file.records(), "stopped")
        raise
    file.finish(answered.order, answered.superseded)
    # A start that was killed after its last answer leaves no ledger, or one without that start's counts.
    if not idle or (file.begun and not ledger.is_complete(file.records())):
        ledger.end(file.records(), "finished")


def _found_work(options: Options, sources: tuple[str, ...]) -> Any:
    from panscan.workload.items import TableColumns, find_work

    names = (options.image_column, options.id_column, options.prompt_column)
    return find_work(
        sources,
        whole_files=options.whole_files,
        limit=options.limit,
        max_pages=options.max_pages,
        on_problem=print_skipped,
        external_images=options.allow_external_images,
        columns=(TableColumns(*names) if any(name is not None for name in names) else None),
        has_prompt=options.prompt is not None,
    )


def _print_speed(ledger: Any) -> None:
    if (speed := ledger.pages_per_second) is None:
        return
    pages = sum(start.successful_pages for start in ledger.starts)
    text = f"{count(pages, 'page')} in {ledger.seconds:.1f} s: {speed:.3g} pages/s"
    text += f" (model load: {ledger.load_seconds:.1f} s)"
    if (price := ledger.price_per_million_pages) is not None:
        text += f"; price per million pages: {price:,.2f}"
    note(text)


def _answer_tasks(
    job: Any,
    ahead: Any,
    tasks: Any,
    file: Any,
    answered: Any,
    work: Any,
    options: Options,
    ledger: Any,
    uploader: Any,
) -> None:
    from panscan.batch.dispatch import answer

    def counted() -> Iterator[Any]:
        warned = False
        for task in chain(ahead, tasks):
            if task.retries:
                ledger.retried()
            if task.needs_engine and not warned:
                images = task.item.images
                warned = warn_demonstration(job.settings, images if isinstance(images, tuple) else [""])
            yield task

    with ExitStack() as stack:
        engine = None
        if ahead[-1].needs_engine:
            with activity(f"loading {job.settings.model_name}"):
                started = now()
                stack.enter_context(redirect_stdout(sys.stderr))  # Ray reports killed processes on standard output
                engine = stack.enter_context(_engine(job.settings, options.replicas, options.ray_address))
                ledger.loaded(now() - started)
        show_progress = stack.enter_context(batch_progress(lambda: work.expected - answered.skipped))

        def on_answer(record: Any) -> None:
            show_progress(record)
            ledger.add(record)
            if uploader is not None:
                uploader.answered()

        answer(engine, job, counted(), file, proven=answered.any_succeeded, on_answer=on_answer)


def _engine(settings: Settings, replicas: int | None, ray_address: str | None) -> Any:
    """Load the engine, in this process or in replicas.

    Raises:
        PanscanError: the model cannot be loaded.
    """
    if replicas is None and ray_address is None:
        from panscan.engine.engine import Engine

        return Engine.from_settings(settings)
    from panscan.serve.batch_engine import BatchEngine

    return BatchEngine(settings, replicas or 1, ray_address)


def _job(options: Options, work: Any) -> Any:
    from panscan.batch.job import Job, with_resolved_dtype

    if work.has_questions and options.prompt is not None:
        raise SettingError("a dataset has its own questions: remove -p")
    prompt = None if work.has_questions else read_prompt(options.prompt, work.lacking)
    settings = engine_settings(options, "batch")
    warn_mini(options, settings)
    if options.ray_address is None and not options.resume:  # a finished job needs no checkpoint
        check_checkpoint(settings)
    on_ray = options.ray_address is not None or options.replicas is not None
    import_libraries(model=not on_ray and not options.resume)
    # The precision is part of what a job may not change.
    if options.ray_address is None or settings.device == "cpu":
        settings = with_resolved_dtype(settings)
    elif settings.dtype == "auto":
        raise SettingError("--dtype: auto depends on the cluster's machines; give --dtype bf16 with --ray-address")
    return Job(
        settings=settings,
        prompt=prompt,
        system=utf8("--system", options.system),
        raw_prompt=options.raw_prompt,
        whole_files=options.whole_files,
        max_pages=options.max_pages,
        **read_structures(options, ignore_eos=settings.ignore_eos),
        tools=_tools(options),
        tool_choice=options.tool_choice,
        image_column=options.image_column,
        template_kwargs=read_template_kwargs(options.template_kwargs),
    )


def _tools(options: Options) -> str | None:
    """Return the definitions of --tools as JSON.

    Raises:
        InputError: the file cannot be read.
        SettingError: it is no JSON.
    """
    text = read_bounded(options.tools, "--tools", MAX_TOOLS_BYTES)
    if text is None:
        return None
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError) as error:
        limit = f"valid JSON of at most {MAX_TOOLS_BYTES:,} bytes"
        raise SettingError(f"--tools {options.tools}: not {limit}: {error}") from None


def _mode(options: Options) -> Any:
    if options.resume and options.force:
        raise SettingError("--resume continues the output and --force replaces it: use only one")
    if options.retry_failed and not options.resume:
        raise SettingError("--retry-failed needs --resume")
    return "resume" if options.resume else "force" if options.force else "new"


@contextmanager
def _resumable(file: Any, piped: str | None) -> Iterator[None]:
    """A job that is interrupted, or that its engine or its disk ends, says how to go on.

    ``piped``: the prompt, if it came from standard input, which cannot be read twice.
    """
    try:
        yield
    except (KeyboardInterrupt, PanscanError) as error:
        # A setting or a model that is wrong would be as wrong the next time.
        if not isinstance(error, SettingError | ModelError | UnsupportedError):
            added = [*(() if piped is None else ("-p", piped)), *(("--resume",) if file.begun else ())]
            without = [*(() if piped is None else ("prompt",)), *(("force", "resume") if file.begun else ())]
            words = public_words(without)
            end = words.index("--") if "--" in words else len(words)
            words[end:end] = added
            secrets = " your credentials for ***" if "***" in "".join(words) else ""
            line = f"resume with{secrets}: {shlex.join(words)}"
            line = escape_controls(line) if sys.stderr.isatty() else line
            # Bytes: a prompt's tabs, or a name that is not Unicode, must reach the terminal as they are.
            click.echo(os.fsencode(line), err=True)
        raise


def _print_failures(file: Any, path: str) -> int:
    """Print why requests failed, and return how many did."""
    failures = 0
    for answer in file.records():
        if answer.error is None:
            continue
        failures += 1
        if failures <= _REASONS:
            text = answer.error if answer.error.startswith(answer.id) else f"{answer.id}: {answer.error}"
            note(f"failed: {text}", "yellow")
    if failures > _REASONS:
        note(f"failed: {failures - _REASONS} more; see 'error' in {path}")
    return failures


def _print_counts(file: Any, failures: int, path: str, *, idle: bool) -> None:
    succeeded = sum(1 for _ in file.records()) - failures
    answered = f"nothing left to ask: {succeeded} answered already" if idle else f"{succeeded} answered"
    failed = f", {failures} failed (ask them again with --resume --retry-failed)" if failures else ""
    show(f"{answered}{failed}: {path}")
