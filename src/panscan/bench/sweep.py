"""The sweep: cells grouped by loaded model, in seeded random order, repeat by repeat, everything into the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from panscan.bench.grid import Cell
from panscan.bench.plan import Observer, SweepPlan, Visit, Writer
from panscan.bench.workload import Item, request_of
from panscan.core import PanscanError, Request, Result, UnsupportedError, now
from panscan.core.errors import brief
from panscan.quality.scores import scores_of
from panscan.records.schema import AnyRecord, CellRecord, LoadRecord, RecordedAnswer, RepeatRecord, RequestRecord
from panscan.settings import ALL_AT_ONCE, Settings

if TYPE_CHECKING:
    from panscan.bench.verify import Verifier
    from panscan.runners.base import Runner

__all__ = ["compiles", "measure", "run_sweep"]

_WARM = 4  # requests of an engine's warm-up


def run_sweep(
    plan: SweepPlan,
    writer: Writer,
    done: set[tuple[str, int | None]],
    observer: Observer,
    verifier: Verifier | None = None,
) -> None:
    """Make every visit that is not done yet. Failures are recorded, and the sweep continues.

    Args:
        plan: what to measure.
        writer: of the run's records, its header already written.
        done: visits that an earlier start of this run finished, with the cell's id.
        observer: receives progress.
        verifier: compares answers, if the plan says so.

    Raises:
        RecordsError: ``--reference`` is of other weights.
    """
    for visits in plan.order():
        left = [(cell, repeat) for cell, repeat in visits if (cell.id, repeat) not in done]
        for cell in dict.fromkeys(cell for cell, _ in left if cell.id in plan.skipped):
            _write_outcome(cell, None, ("skipped", plan.skipped[cell.id]), writer=writer, observer=observer)
        todo = [(cell, repeat) for cell, repeat in left if cell.id not in plan.skipped]
        if todo:
            _run_loaded(plan, todo, writer, observer, verifier)


def _run_loaded(
    plan: SweepPlan, visits: list[Visit], writer: Writer, observer: Observer, verifier: Verifier | None
) -> None:
    """Every visit that shares one loaded model."""
    from panscan.model.machine import release_memory
    from panscan.runners.factory import open_runner

    cells = list(dict.fromkeys(cell for cell, _ in visits))
    compared = [cell for cell, repeat in visits if repeat is None]
    if verifier is not None and compared:
        verifier.prepare_quantized(compared)
    observer.loading(cells[0].settings)
    started = now()
    try:
        runner = open_runner(cells[0].settings)
    except Exception as error:  # whatever a load raises is these cells' outcome; the sweep continues
        failure = _classify(error)
    else:
        try:
            writer.write([_load_record(cells, runner, now() - started)])
            if verifier is not None and compared:
                verifier.prepare(runner, compared)
            _visit(plan, visits, runner, writer=writer, observer=observer, verifier=verifier)
            for record in verifier.conclude(runner, compared) if verifier is not None else ():
                writer.write([record])
        finally:
            runner.close()
        return
    release_memory()
    for cell in cells:
        _write_outcome(cell, None, failure, writer=writer, observer=observer)


def _load_record(cells: Sequence[Cell], runner: Runner, seconds: float) -> LoadRecord:
    """What was loaded, and what the machine could do with it at best."""
    from panscan.model.config import shape_of_config
    from panscan.model.quantization import weights_name

    loaded = runner.loaded
    try:
        shape = asdict(shape_of_config(loaded.model.config))
    except UnsupportedError:  # a Gemma 3 of parts that the formulas leave out runs all the same
        shape = None
    return LoadRecord(
        cells=[cell.id for cell in cells],
        seconds=seconds,
        shape=shape,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=_weight_bytes(loaded.model, cells[0].settings),
        weights=weights_name(loaded.model),
        base_model=_base_model(cells[0].settings),
        **_ceilings(runner),
    )


def _weight_bytes(model: Any, settings: Settings) -> int:
    """Return the size of the weights; only vLLM has those of a quantised checkpoint: ``model`` is dense."""
    from panscan.model.checkpoint import stored_format
    from panscan.model.inventory import inventory
    from panscan.model.quantization import weight_bytes

    if settings.runner == "vllm" and not settings.random_weights and stored_format(settings.model, settings.revision):
        return sum(tensor.bytes for tensor in inventory(settings.model, settings.revision).tensors)
    return weight_bytes(model)


def _base_model(settings: Settings) -> str | None:
    """Return the base model of a quantised checkpoint; None for other checkpoints, or if it is not on this machine."""
    from panscan.model.quantization import unquantized_settings

    try:
        plain = unquantized_settings(settings)
    except PanscanError:
        return None
    return plain.model if plain.model != settings.model else None


def _ceilings(runner: Runner) -> dict[str, float | None]:
    """The machine's two ceilings; None where the model leaves no memory to measure them."""
    from panscan.model.ceilings import measure_ceilings
    from panscan.model.machine import is_out_of_memory

    try:
        return asdict(measure_ceilings(runner.loaded.device, runner.loaded.dtype))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"flops_per_s": None, "bytes_per_s": None}


def _visit(
    plan: SweepPlan,
    visits: list[Visit],
    runner: Runner,
    *,
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
                records = measure(plan, cell, repeat, runner, observer, verifier)
            elif verifier is not None:
                records = [verifier.verify(runner, cell)]
        except Exception as error:  # any failure in a cell is a recorded outcome, never the end of the sweep
            failure = _classify(error)
        if failure is None:
            writer.write(records)
            continue
        release_memory()  # not above: there the traceback still holds what the cell had
        broken.add(cell.id)
        _write_outcome(cell, repeat, failure, writer=writer, observer=observer)


def measure(
    plan: SweepPlan, cell: Cell, repeat: int, runner: Runner, observer: Observer, verifier: Verifier | None = None
) -> list[AnyRecord]:
    """The records of one repeat of one cell: its requests, then the lines that say that all are there.

    Args:
        plan: the sweep.
        cell: that ``runner`` is configured for.
        repeat: its number, starting at 0.
        runner: answers the requests.
        observer: receives progress.
        verifier: compares the measured tokens, after the measurement.
    """
    from panscan.model import machine
    from panscan.runners.base import TracksPeakMemory

    todo = plan.batches(cell.settings)
    requests = [request_of(item, cell.settings, plan.source) for item in plan.items]
    if runner.loaded.device.type != "cpu":
        machine.release_memory()  # the peak is this cell's, not that of a larger one before it
    memory = runner if isinstance(runner, TracksPeakMemory) else machine
    warm_started = now()
    for batch in _warmup(plan, cell.settings, todo):
        runner.run([requests[index] for index in batch])
    memory.reset_peak_memory()
    observer.ready(cell, repeat)
    started = now()
    answered = []
    for number, batch in enumerate(todo):
        results = runner.run(_seeded([requests[index] for index in batch], plan.seed, repeat))
        answered += [(number, index, result) for index, result in zip(batch, results, strict=True)]
        observer.batch_done()
    ended = now()
    # Scoring an answer takes time that is no part of the measurement.
    records: list[AnyRecord] = [
        _request_record(plan, cell, plan.items[index], result, repeat=repeat, batch=number)
        for number, index, result in answered
    ]
    line = RepeatRecord(
        cell=cell.id,
        repeat=repeat,
        started=started,
        ended=ended,
        warmup_s=started - warm_started,
        **memory.peak_memory(),
        device=str(runner.loaded.device),
        dtype=str(runner.loaded.dtype).removeprefix("torch."),
    )
    if not cell.settings.sampling.greedy:
        line.sampling_seed = _seeded(requests[:1], plan.seed, repeat)[0].sampling.seed
    if verifier is not None:
        line.tokens = verifier.check(runner, cell, [result for _, _, result in answered], line.sampling_seed)
    done = [_cell_record(cell, repeat, "done", None)] if repeat == plan.repeats - 1 else []
    return [*records, line, *done]


def _warmup(plan: SweepPlan, settings: Settings, todo: list[list[int]]) -> list[list[int]]:
    """Batches that are run and thrown away. The engine's only batch holds all requests: some of them warm it too."""
    if plan.warmup and compiles(settings):
        return todo
    if settings.runner in ALL_AT_ONCE:
        return [todo[0][:_WARM]] * plan.warmup
    return todo[: plan.warmup]


def _seeded(batch: list[Request], seed: int, repeat: int) -> list[Request]:
    """The same batch with a seed for its sampler, moved on so that repeats of a sampled cell are draws of their own."""
    sampling = batch[0].sampling
    if sampling.greedy:
        return batch
    chosen = seed if sampling.seed is None else sampling.seed
    return [replace(request, sampling=replace(sampling, seed=chosen + repeat)) for request in batch]


def _request_record(
    plan: SweepPlan, cell: Cell, item: Item, result: Result, *, repeat: int, batch: int
) -> RequestRecord:
    return RequestRecord(
        cell=cell.id,
        repeat=repeat,
        batch=batch,
        request=item.id,
        image=[document.name for document in item.documents],
        image_sha256=[document.sha256 for document in item.documents],
        image_size=[(document.width, document.height) for document in item.documents],
        prompt_sha256=item.prompt_sha256,
        views=result.views,
        crops=result.crops,
        image_tokens=result.image_tokens,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
        finish_reason=result.finish_reason,
        stamps=result.stamps,
        error=None if result.error is None else str(result.error),
        tags=item.tag_values,
        scores=scores_of(result.text, item.answers),
        empty=bool(item.answers) and not result.text.strip(),
        content=RecordedAnswer(item.prompt, list(item.answers), result.text) if plan.include_content else None,
    )


def _cell_record(cell: Cell, repeat: int | None, outcome: str, reason: str | None) -> CellRecord:
    return CellRecord(cell=cell.id, repeat=repeat, outcome=outcome, reason=reason, time=now())


def _write_outcome(
    cell: Cell, repeat: int | None, failure: tuple[str, str], *, writer: Writer, observer: Observer
) -> None:
    outcome, reason = failure
    writer.write([_cell_record(cell, repeat, outcome, reason)])
    observer.problem(cell, outcome, reason)


def _classify(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a failure."""
    from panscan.model.machine import is_out_of_memory

    text = brief(error, 300)
    if is_out_of_memory(error):
        return "oom", f"out of memory: {text}"
    if isinstance(error, UnsupportedError):
        return "skipped", text
    return "failed", text if isinstance(error, PanscanError) else f"{type(error).__name__}: {text}"


def compiles(settings: Settings) -> bool:
    """Return whether a new prompt length may be compiled, which belongs in the warm-up."""
    return settings.compile is not None or settings.cache == "static" or settings.attention == "flex_attention"
