"""The sweep: cells grouped by loaded model, in seeded random order, repeat by repeat, everything into the records."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from panscan.bench.environment import peak_memory, reset_peak_memory
from panscan.bench.grid import Cell
from panscan.bench.quality import scores_of
from panscan.bench.workload import Item, Source, plans_of, request_of
from panscan.core import PanscanError, Request, Result, SettingError, UnsupportedError, now
from panscan.runners.base import batches
from panscan.runners.settings import Settings

if TYPE_CHECKING:
    from panscan.bench.verify import Verifier
    from panscan.runners.base import Runner

__all__ = ["Observer", "Plan", "Writer", "measure", "run_sweep"]


_COMPARED = 16  # requests of a verdict's sample

Visit = tuple[Cell, int | None]
"""A cell and the repeat to measure; None: compare its answers with the reference's."""


class Writer(Protocol):
    """Takes records, such as a :class:`panscan.bench.records.RecordWriter`."""

    def write(self, records: Sequence[Mapping[str, Any]]) -> None: ...


class Observer(Protocol):
    """Told how a sweep goes on, for people to watch."""

    def loading(self, settings: Settings) -> None: ...
    def ready(self, cell: Cell, repeat: int) -> None: ...
    def batch_done(self) -> None: ...
    def stage(self, what: str) -> None: ...
    def problem(self, cell: Cell, outcome: str, reason: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What a sweep does; the same plan gives the same cells, requests and order.

    Args:
        cells: points to measure.
        items: requests of every cell.
        source: where the items come from.
        repeats: times that each cell is measured.
        warmup: batches run and thrown away before each repeat; a compiling cell runs them all, unless 0.
        seed: of the order of cells, and of the sampler in cells that name none.
        include_content: keep prompts and answers in the records.
        verify: compare each cell's answers with the reference's.
        reference: where a truth may be found, instead of computing it.
        replicas: copies of all of this that run at the same time, each a process with devices of its own.
        gpus_per_replica: GPUs of each copy.
    """

    cells: Sequence[Cell]
    items: Sequence[Item]
    source: Source
    repeats: int = 1
    warmup: int = 1
    seed: int = 0
    include_content: bool = False
    verify: bool = True
    reference: str | None = None
    replicas: int = 1
    gpus_per_replica: int = 1

    @property
    def sample(self) -> list[Item]:
        """The items whose answers are compared, in order."""
        chosen = random.Random(self.seed).sample(range(len(self.items)), min(_COMPARED, len(self.items)))
        return [self.items[index] for index in sorted(chosen)]

    def batches(self, settings: Settings) -> list[list[int]]:
        """Indices of items, batch by batch, in a cell."""
        views = [sum(len(plan.views) for plan in plans_of(item, settings)) for item in self.items]
        return batches(views, settings.batch_size, equal_views=settings.equal_views)

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Why cells cannot run on this machine, by id; found out once, before any model is loaded."""
        from panscan.runners.loading import unsupported_reason

        found = {}
        for cell in self.cells:
            try:
                for item in self.items:
                    plans_of(item, cell.settings)
            except SettingError as error:  # crops without pixels, for one of these images
                found[cell.id] = str(error)
                continue
            if (reason := unsupported_reason(cell.settings)) is not None:
                found[cell.id] = reason
        return found

    def order(self) -> Iterator[list[Visit]]:
        """Visits, one list per loaded model; within a model each repeat visits its cells shuffled.

        A cell is compared right after its last repeat, while what it compiled is there. Quantised weights come after
        the others, whose truth they share.
        """
        by_load = sorted(self.cells, key=lambda cell: (cell.settings.quantization or "", repr(cell.settings.load_key)))
        for key, group in groupby(by_load, key=lambda cell: cell.settings.load_key):
            cells = list(group)
            visits: list[Visit] = []
            for repeat in range(self.repeats):
                for cell in random.Random(f"{self.seed}-{repeat}-{key!r}").sample(cells, len(cells)):
                    visits.append((cell, repeat))
                    if self.verify and repeat == self.repeats - 1:
                        visits.append((cell, None))
            yield visits


def run_sweep(
    plan: Plan, writer: Writer, done: set[tuple[str, int | None]], observer: Observer, verifier: Verifier | None = None
) -> None:
    """Make every visit that is not done yet. What fails is recorded, and the sweep goes on.

    Args:
        plan: what to measure.
        writer: of the run's records, its header already written.
        done: visits that an earlier start of this run finished, with the cell's id.
        observer: told of progress.
        verifier: compares answers, if the plan says so.

    Raises:
        RecordsError: ``--reference`` is of other views or weights.
    """
    if verifier is not None:
        verifier.check_references(plan.cells)
    for visits in plan.order():
        left = [(cell, repeat) for cell, repeat in visits if (cell.id, repeat) not in done]
        for cell in dict.fromkeys(cell for cell, _ in left if cell.id in plan.skipped):
            _outcome(writer, observer, cell, None, "skipped", plan.skipped[cell.id])
        todo = [(cell, repeat) for cell, repeat in left if cell.id not in plan.skipped]
        if todo:
            _run_loaded(plan, todo, writer, observer, verifier)


def _run_loaded(plan: Plan, visits: list[Visit], writer: Writer, observer: Observer, verifier: Verifier | None) -> None:
    """Every visit that shares one loaded model."""
    from panscan.model.machine import release_memory
    from panscan.runners.factory import open_runner

    cells = list(dict.fromkeys(cell for cell, _ in visits))
    if verifier is not None:
        verifier.prepare_quantized(cells)
    observer.loading(cells[0].settings)
    started = now()
    try:
        runner = open_runner(cells[0].settings)
    except Exception as error:  # whatever a load raises is these cells' outcome; the sweep goes on
        failure = _classify(error)
    else:
        try:
            writer.write([_load_record(cells, runner, now() - started)])
            if verifier is not None:
                verifier.prepare(runner, cells)
            _visit(plan, visits, runner, writer, observer, verifier)
        finally:
            runner.close()
        return
    release_memory()
    for cell in cells:
        _outcome(writer, observer, cell, None, *failure)


def _load_record(cells: Sequence[Cell], runner: Runner, seconds: float) -> dict[str, Any]:
    """What was loaded, and what the machine could do with it at best."""
    from panscan.model.ceilings import measure_ceilings
    from panscan.model.config import shape_of_config

    loaded = runner.loaded
    try:
        shape = asdict(shape_of_config(loaded.model.config))
    except UnsupportedError:  # a Gemma 3 of parts that the formulas leave out runs all the same
        shape = None
    ceilings = measure_ceilings(loaded.device, loaded.dtype)
    return {
        "type": "load",
        "cells": [cell.id for cell in cells],
        "seconds": seconds,
        "shape": shape,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weight_bytes": sum(each.numel() * each.element_size() for each in loaded.model.parameters()),
        **asdict(ceilings),
    }


def _visit(
    plan: Plan,
    visits: list[Visit],
    runner: Runner,
    writer: Writer,
    observer: Observer,
    verifier: Verifier | None,
) -> None:
    from panscan.model.machine import release_memory

    broken: set[str] = set()
    for cell, repeat in visits:
        if cell.id in broken or (repeat is None and verifier is None):
            continue
        failure = None
        try:
            runner.configure(cell.settings)
            if repeat is not None:
                records = measure(plan, cell, repeat, runner, observer)
            elif verifier is not None:
                records = [verifier.verify(runner, cell)]
        except Exception as error:  # any failure in a cell is a recorded outcome, never the end of the sweep
            failure = _classify(error)
        if failure is None:
            writer.write(records)
            continue
        release_memory()  # not above: there the traceback still holds what the cell had
        broken.add(cell.id)
        _outcome(writer, observer, cell, repeat, *failure)


def measure(plan: Plan, cell: Cell, repeat: int, runner: Runner, observer: Observer) -> list[dict[str, Any]]:
    """The records of one repeat of one cell: its requests, then the lines that say that all are there."""
    from panscan.model.machine import release_memory

    todo = plan.batches(cell.settings)
    requests = [request_of(item, cell.settings, plan.source) for item in plan.items]
    if runner.loaded.device.type != "cpu":
        release_memory()  # the peak is this cell's, not that of a larger one before it
    warm_started = now()
    for batch in todo if plan.warmup and _compiles(cell.settings) else todo[: plan.warmup]:
        runner.run([requests[index] for index in batch])
    reset_peak_memory()
    observer.ready(cell, repeat)
    started = now()
    records = []
    for number, batch in enumerate(todo):
        results = runner.run(_seeded([requests[index] for index in batch], plan.seed, repeat))
        for index, result in zip(batch, results, strict=True):
            records.append(_request_record(plan, cell, repeat, number, plan.items[index], result))
        observer.batch_done()
    line: dict[str, Any] = {"type": "repeat", "cell": cell.id, "repeat": repeat, "started": started, "ended": now()}
    line |= {"warmup_s": started - warm_started, **peak_memory()}
    line |= {"device": str(runner.loaded.device), "dtype": str(runner.loaded.dtype).removeprefix("torch.")}
    if not cell.settings.sampling.greedy:
        line["sampling_seed"] = _seeded(requests[:1], plan.seed, repeat)[0].sampling.seed
    if repeat < plan.repeats - 1:
        return [*records, line]
    return [*records, line, _cell_record(cell, repeat, "done", None)]


def _seeded(batch: list[Request], seed: int, repeat: int) -> list[Request]:
    """The same batch with a seed for its sampler, moved on so that repeats of a sampled cell are draws of their own."""
    sampling = batch[0].sampling
    if sampling.greedy:
        return batch
    chosen = seed if sampling.seed is None else sampling.seed
    return [replace(request, sampling=replace(sampling, seed=chosen + repeat)) for request in batch]


def _request_record(plan: Plan, cell: Cell, repeat: int, batch: int, item: Item, result: Result) -> dict[str, Any]:
    record: dict[str, Any] = {
        "type": "request",
        "cell": cell.id,
        "repeat": repeat,
        "batch": batch,
        "request": item.id,
        "image": [document.name for document in item.documents],
        "image_sha256": [document.sha256 for document in item.documents],
        "image_size": [[document.width, document.height] for document in item.documents],
        "prompt_sha256": item.prompt_sha256,
        "views": result.views,
        "crops": result.crops,
        "image_tokens": result.image_tokens,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "finish_reason": result.finish_reason,
        "stamps": asdict(result.stamps),
        "error": None,
    }
    if item.answers:
        record["scores"] = scores_of(result.text, item.answers)
    if plan.include_content:
        record["content"] = {"prompt": item.prompt, "answers": list(item.answers), "answer": result.text}
    return record


def _cell_record(cell: Cell, repeat: int | None, outcome: str, reason: str | None) -> dict[str, Any]:
    return {"type": "cell", "cell": cell.id, "repeat": repeat, "outcome": outcome, "reason": reason, "time": now()}


def _outcome(writer: Writer, observer: Observer, cell: Cell, repeat: int | None, outcome: str, reason: str) -> None:
    writer.write([_cell_record(cell, repeat, outcome, reason)])
    observer.problem(cell, outcome, reason)


def _classify(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a failure."""
    from panscan.model.machine import is_out_of_memory

    text = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        return "oom", f"out of memory: {text}"
    if isinstance(error, UnsupportedError):
        return "skipped", text
    return "failed", text if isinstance(error, PanscanError) else f"{type(error).__name__}: {text}"


def _compiles(settings: Settings) -> bool:
    """Whether each new prompt length may cost a compilation, which warm-up must pay instead of the measurement."""
    return settings.compile is not None or settings.cache == "static" or settings.attention == "flex_attention"
