"""A run directory's life: created with its header, measured, resumed from what it holds."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from panscan.analysis.summary import write_summary
from panscan.bench.grid import Cell
from panscan.bench.plan import FinishedVisits, Observer, SweepPlan
from panscan.bench.replicas import run_replicas, slots
from panscan.bench.sweep import run_sweep
from panscan.core import RecordsError
from panscan.core.activity import OnProgress
from panscan.core.errors import OnProblem
from panscan.model.bundled import fingerprints
from panscan.records.environment import bundled_weights, environment, new_run_record
from panscan.records.load_runs import is_load_run
from panscan.records.schema import Environment, RecordedCell, RunRecord, RunSettings
from panscan.records.store import AnyRecord, RecordWriter, Run, read_run
from panscan.settings import recorded_settings
from panscan.workload.requests import Source, content_digest, load_workload

if TYPE_CHECKING:
    from panscan.verdict.cells import Verifier


_PLAN = ("repeats", "warmup", "seed", "include_content", "verify", "replicas", "gpus_per_replica")
"""Fields of a plan that a run's header has."""
_VERIFY = ("verify_requests", "verify_tokens", "verify_budget", "check_invariance", "precision", "max_accuracy_loss")
"""Further ones, which runs of older versions lack."""
_SAME = ("panscan", "cpu", "gpus")
"""What a run's environment must have in common with the machine that continues it."""


def start(plan: SweepPlan, directory: Path, command: Sequence[str], observer: Observer) -> Run:
    """Measure a plan into a new run directory.

    Raises:
        RecordsError: the directory cannot be written.
    """
    with RecordWriter(directory) as writer:
        if writer.previous is not None:
            raise RecordsError(f"{directory} already holds a run: choose another name, or --resume {directory}")
        verifier = verifier_of(plan, writer.write, observer.stage, directory)
        writer.write([header(plan, command)])
        _sweep(plan, writer, set(), observer, verifier)
    return finish(directory)


def resume(plan: SweepPlan, directory: Path, observer: Observer) -> Run:
    """Continue a run; finished repeats are not measured again.

    Raises:
        RecordsError: the directory holds no run, or one of another schema.
    """
    with RecordWriter(directory) as writer:
        if writer.previous is None:
            raise RecordsError(f"--resume {directory}: there is no run")
        verifier = verifier_of(plan, writer.write, observer.stage, directory, writer.previous)
        previous = writer.previous
        measured = {cell for cell, record in previous.outcomes.items() if record.outcome == "done"}
        done = previous.finished() | {(cell, repeat) for cell in measured for repeat in range(plan.most_repeats)}
        _sweep(plan, writer, done, observer, verifier)
    return finish(directory)


def _sweep(
    plan: SweepPlan,
    writer: RecordWriter,
    done: FinishedVisits,
    observer: Observer,
    verifier: Verifier | None,
) -> None:
    """Run the sweep in this process, or in one process per replica; replicas build their own verifiers."""
    if plan.replicas * plan.gpus_per_replica == 1:
        run_sweep(plan, writer, done, observer, verifier, previous=writer.previous)
    else:
        run_replicas(plan, writer.path.parent, writer, done, observer)


def verifier_of(
    plan: SweepPlan,
    write: Callable[[Sequence[AnyRecord]], None],
    say: OnProgress,
    directory: Path | None,
    previous: Run | None = None,
    *,
    follows: bool = False,
) -> Verifier | None:
    """Return the verifier of a plan; None if the plan does not verify.

    Args:
        plan: plan of the run.
        write: writes records.
        say: receives progress messages.
        directory: run directory, which stores references; None to store none.
        previous: the run so far.
        follows: another process computes the references and stores them in the directory.

    Raises:
        RecordsError: ``--reference`` has no reference, or none for the views of any cell.
    """
    if not plan.verify:
        return None
    from panscan.verdict.cells import Verifier
    from panscan.verdict.reference import find_references
    from panscan.verdict.references import References

    references = References(
        items=plan.sample,
        source=plan.source,
        steps=min(plan.verify_tokens, max(cell.settings.max_new_tokens for cell in plan.cells)),
        directory=None if directory is None else directory / "truth",
        files=[] if plan.reference is None else find_references(Path(plan.reference)),
        write=write,
        say=say,
        recorded=set(previous.truths) if previous is not None else set(),
        follows=follows,
    )
    references.check_files([cell.settings for cell in plan.cells if cell.id not in plan.skipped])
    return Verifier(references, plan.items, plan.check_invariance, plan.verify_budget / 100)


def check_plan(plan: SweepPlan) -> None:
    """Check that a plan can run on this machine, before its run directory is made and a model is loaded.

    Raises:
        SettingError: settings exclude each other, or are not supported with replicas.
        UnsupportedError: the replicas need more GPUs than are visible.
        RecordsError: ``--reference`` has no reference, or none for the views of any cell.
    """
    if plan.replicas * plan.gpus_per_replica > 1:
        slots(plan)
    if plan.reference is not None:
        verifier_of(plan, lambda _: None, lambda _: None, None)


def finish(directory: Path) -> Run:
    """Read a run's records back and write what is derived from them."""
    run = read_run(directory)
    write_summary(run, directory / "summary.csv")
    return run


def plan_to_resume(run: Run, *, on_problem: OnProblem, later: Mapping[str, Any] | None = None) -> SweepPlan:
    """Return the plan that continues a run on this machine.

    Raises:
        RecordsError: it is a load run, or began on another machine or with other libraries; or see :func:`plan_of`.
    """
    if is_load_run(run):
        raise RecordsError(f"--resume {run.path.parent}: a run of panscan load cannot be resumed; start a new one")
    check_same_machine(run)
    return plan_of(run, on_problem=on_problem, later=later)


def plan_of(run: Run, *, on_problem: OnProblem, later: Mapping[str, Any] | None = None) -> SweepPlan:
    """The plan that a run was started with, its documents and prompts read again.

    Args:
        run: the run so far.
        on_problem: called for each file that cannot be used.
        later: fields of its :class:`~panscan.workload.requests.Source` that count if the run's version had none.

    Raises:
        RecordsError: documents or prompts are not what they were, or the header is another version's.
    """
    settings = run.header.settings
    chosen = {name: getattr(settings, name) for name in (*_PLAN, *_VERIFY) if getattr(settings, name) is not None}
    try:
        recorded_source = settings.source or {}
        source = Source(**{**(later or {}), **recorded_source, "images": tuple(recorded_source["images"])})
        cells = [_cell_of(recorded) for recorded in run.header.cells]
        if missing := [name for name in ("workload_sha256", *_PLAN) if getattr(settings, name) is None]:
            raise KeyError(missing[0])
    except (KeyError, TypeError) as error:
        raise RecordsError(f"--resume {run.path.parent}: its header is another version's ({error})") from error
    items = load_workload(source, on_problem=on_problem).items
    if content_digest(items) != settings.workload_sha256:
        raise RecordsError(
            f"--resume {run.path.parent}: documents or prompts have changed since the run began"
            " (resume from the folder in which it was started, or start a new run)"
        )
    return SweepPlan(cells=cells, items=items, source=source, reference=settings.reference, **chosen)


def check_same_machine(run: Run) -> None:
    """A run's repeats are compared with each other, so all come from one hardware, libraries and bundled weights.

    Raises:
        RecordsError: naming what differs.
    """
    then, here = run.header.machine, msgspec.convert(environment(), Environment)
    facts = [(name, *(msgspec.to_builtins(getattr(place, name)) for place in (then, here))) for name in _SAME]
    facts += [(name, then.packages.get(name), here.packages.get(name)) for name in ("torch", "transformers")]
    for name, before, after in facts:
        if before != after:
            raise RecordsError(
                f"--resume {run.path.parent}: the run began with {name} {before}, here it is {after}: start a new run"
            )
    weights = bundled_weights(run)
    for name, now in fingerprints(weights).items():
        if weights[name] != now:
            raise RecordsError(
                f"--resume {run.path.parent}: the weights of {name} have changed since the run began"
                f" (weights {weights[name] or 'of an older version'}, now {now}): start a new run"
            )


def new_directory(output_dir: Path, model: str) -> Path:
    """Make a directory for a new run, named by time and model; no other run gets the same.

    Raises:
        RecordsError: it cannot be made.
    """
    slug = re.sub(r"[^a-zA-Z0-9.]+", "-", Path(model).name).strip("-").lower() or "model"
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            directory = output_dir / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                break
    except OSError as error:
        raise RecordsError(f"--output-dir {output_dir}: cannot be written: {error.strerror}") from error
    return directory


def header(plan: SweepPlan, command: Sequence[str]) -> RunRecord:
    """The run line of a plan's records."""
    bundled = fingerprints(cell.settings.model for cell in plan.cells if not cell.settings.random_weights)
    settings = RunSettings(
        source=asdict(plan.source),
        workload_sha256=content_digest(plan.items),
        requests=len(plan.items),
        reference=plan.reference,
        dataset=plan.dataset,
        quality_metric=plan.quality_metric,
        **{name: getattr(plan, name) for name in (*_PLAN, *_VERIFY)},
    )
    return new_run_record(command, settings, [_recorded_cell(cell) for cell in plan.cells], bundled)


def _recorded_cell(cell: Cell) -> RecordedCell:
    return RecordedCell(cell.id, asdict(cell.settings), cell.preset, [*map(_recorded_cell, cell.aliases)])


def _cell_of(recorded: RecordedCell) -> Cell:
    settings, aliases = recorded_settings(recorded.settings), tuple(map(_cell_of, recorded.aliases))
    return Cell(recorded.cell, settings, recorded.preset, aliases)
