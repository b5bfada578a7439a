"""The sweep: cells grouped by loaded model, in seeded random order, repeat by repeat, everything into the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from panscan.bench.grid import Cell
from panscan.bench.plan import FinishedVisits, Observer, SweepPlan, Visit, Writer
from panscan.core import PanscanError, Request, Result, UnsupportedError, now
from panscan.core.errors import brief, error_line
from panscan.records.metrics import RepeatWork, work_of
from panscan.records.request_records import RecordedAnswer, RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, LoadRecord
from panscan.records.scores import scores_of
from panscan.records.store import AnyRecord, Repeat, Run
from panscan.settings import ALL_AT_ONCE, Settings
from panscan.workload.requests import Item, request_of

if TYPE_CHECKING:
    from panscan.runners.base import Runner
    from panscan.verdict.cells import Verifier


_WARM = 4  # requests of an engine's warm-up
_REPORTED = (
    *("views", "crops", "image_tokens", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("finish_reason", "stamps"),
)
"""Fields that records and results of requests share."""


def run_sweep(
    plan: SweepPlan,
    writer: Writer,
    done: FinishedVisits,
    observer: Observer,
    verifier: Verifier | None = None,
    *,
    previous: Run | None = None,
) -> None:
    """Make every visit that is not done yet. Failures are recorded, and the sweep continues.

    Args:
        plan: what to measure.
        writer: of the run's records, its header already written.
        done: visits that an earlier start of this run finished, with the cell's id.
        observer: receives progress.
        verifier: compares answers, if the plan says so.
        previous: the run so far, if it is continued.

    Raises:
        RecordsError: ``--reference`` is of other weights.
    """
    sweep = _Sweep(plan, writer, observer, verifier, set(done), set(plan.skipped))
    if previous is not None:
        sweep.work.update((cell.id, list(map(work_of, previous.repeats_of(cell.id)))) for cell in plan.cells)
    for cell in plan.cells:
        if cell.id in plan.skipped and (cell.id, 0) not in done:
            sweep.write_outcome(cell, None, ("skipped", plan.skipped[cell.id]))
    loads = deque(plan.order())
    with closing(sweep):
        while loads:
            if todo := sweep.remaining(loads.popleft()):
                sweep.run_loaded(todo, loads)


@dataclass(slots=True)
class _Sweep:
    """A sweep in progress. Arguments: those of :func:`run_sweep`; cells that failed or are skipped; the work of each
    cell; and the open runner, if there is one: the next cells may need its model with other adapters."""

    plan: SweepPlan
    writer: Writer
    observer: Observer
    verifier: Verifier | None
    done: FinishedVisits
    broken: set[str] = field(default_factory=set)
    work: dict[str, list[RepeatWork]] = field(default_factory=dict)
    runner: Runner | None = None

    def close(self) -> None:
        """Close the open runner."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None

    def remaining(self, visits: Iterable[Visit]) -> list[Visit]:
        """Return the visits that are neither done nor hopeless."""
        return [
            (cell, repeat)
            for cell, repeat in visits
            if (cell.id, repeat) not in self.done and cell.id not in self.broken
        ]

    def run_loaded(self, visits: list[Visit], loads: deque[list[Visit]]) -> None:
        """Load a model and make visits with it, and those of the next ``loads`` until one needs another model."""
        from panscan.model.machine import release_memory

        key = visits[0][0].settings.load_key
        later = self.remaining(chain(visits, *loads))
        cells = list(dict.fromkeys(cell for cell, _ in later if cell.settings.load_key == key))
        compared = [cell for cell in cells if (cell.id, None) not in self.done]
        verifier = self.verifier if compared else None
        if not self._takes_adapters(cells[0].settings):
            self.close()
        if verifier is not None:
            verifier.references.prepare_apart([cell.settings for cell in compared])
        self.observer.loading(cells[0].settings)
        started = now()
        try:
            runner = self._open(cells[0].settings)
        except Exception as error:  # whatever a load raises is these cells' outcome; the sweep continues
            failure = _classify(error)
        else:
            self.writer.write([_load_record(cells, runner, now() - started)])
            if verifier is not None:
                verifier.references.prepare(runner, [cell.settings for cell in compared])
            while visits:
                self._visit(visits, runner)
                visits = self._following(loads, key)
            verified = [cell for cell in compared if (cell.id, None) in self.done]
            for record in verifier.conclude(runner, verified) if verifier is not None else ():
                self.writer.write([record])
            return
        self.close()
        release_memory()
        for cell in cells:
            self.write_outcome(cell, None, failure)

    def _following(self, loads: deque[list[Visit]], key: object) -> list[Visit]:
        """Take the next visits if they need no other model. Those between may be done, as the interval was narrow."""
        while loads and not self.remaining(loads[0]):
            loads.popleft()
        same = bool(loads) and loads[0][0][0].settings.load_key == key
        return self.remaining(loads.popleft()) if same else []

    def _takes_adapters(self, settings: Settings) -> bool:
        """Return whether the open runner's model may only need other adapters, and no other model in between."""
        from panscan.model.load import takes_adapters

        if self.runner is None or (self.verifier is not None and settings.quantized):
            return False
        with suppress(PanscanError):  # opening raises it again
            return takes_adapters(self.runner.settings, settings)
        return False

    def _open(self, settings: Settings) -> Runner:
        """Return a runner of these settings: the open one with other adapters, or else another one."""
        from panscan.runners.factory import open_runner

        if self.runner is None or not self.runner.switch_adapters(settings):
            self.close()
            self.runner = open_runner(settings)
        return self.runner

    def _visit(self, visits: list[Visit], runner: Runner) -> None:
        from panscan.model.machine import release_memory

        queue = deque(visits)
        while queue:
            cell, repeat = queue.popleft()
            if cell.id in self.broken or (cell.id, repeat) in self.done or (repeat is None and self.verifier is None):
                continue
            try:
                runner.configure(cell.settings)
                if repeat is not None:
                    line, requests = measure(self.plan, cell, repeat, runner, self.observer, self.verifier)
                    records: list[AnyRecord] = [*requests, line]
                elif self.verifier is not None:
                    records = [self.verifier.verify(runner, cell)]
            except Exception as error:  # any failure in a cell is a recorded outcome, never the end of the sweep
                failure = _classify(error)
            else:
                if repeat is not None and self._is_last(cell, (line, requests)):
                    records.append(_cell_record(cell, repeat, "done", None))
                    queue.appendleft((cell, None))
                self.writer.write(records)
                self.done.add((cell.id, repeat))
                continue
            release_memory()  # not above: there the traceback still holds what the cell had
            self.write_outcome(cell, repeat, failure)

    def _is_last(self, cell: Cell, repeat: Repeat) -> bool:
        """Return whether a repeat is its cell's last one; then no other is measured."""
        work = self.work.setdefault(cell.id, [])
        work.append(work_of(repeat))
        last = self.plan.is_last(repeat[0].repeat, work)
        if last:
            self.done.update((cell.id, later) for later in range(self.plan.most_repeats))
        return last

    def write_outcome(self, cell: Cell, repeat: int | None, failure: tuple[str, str]) -> None:
        """Record the outcome and the reason of a cell that is not measured further, and report it."""
        self.broken.add(cell.id)
        self.writer.write([_cell_record(cell, repeat, *failure)])
        self.observer.problem(cell, *failure)


def _load_record(cells: Sequence[Cell], runner: Runner, seconds: float) -> LoadRecord:
    """What was loaded, and what the machine could do with it at best."""
    from panscan.model.quantization import unquantized_settings, weights_name

    loaded, settings, base = runner.loaded, cells[0].settings, None
    with suppress(PanscanError):  # the base of a quantised checkpoint may not be on this machine
        base = unquantized_settings(settings).model
    try:
        shape = asdict(loaded.shape())
    except UnsupportedError:  # a Gemma 3 of parts that the formulas leave out runs all the same
        shape = None
    return LoadRecord(
        cells=[cell.id for cell in cells],
        seconds=seconds,
        shape=shape,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=_weight_bytes(loaded.model, settings),
        weights=weights_name(loaded.model),
        base_model=base if base != settings.model else None,
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


def measure(
    plan: SweepPlan, cell: Cell, repeat: int, runner: Runner, observer: Observer, verifier: Verifier | None = None
) -> Repeat:
    """Return the records of one repeat of one cell: the line that says that all requests are there, and the requests.

    Args:
        plan: the sweep.
        cell: that ``runner`` is configured for.
        repeat: its number, starting at 0.
        runner: answers the requests.
        observer: receives progress.
        verifier: compares the measured tokens, after the measurement.
    """
    from panscan.model import machine

    todo = plan.batches(cell.settings)
    requests = [request_of(item, cell.settings, plan.source) for item in plan.items]
    if runner.loaded.device.type != "cpu":
        machine.release_memory()  # the peak is this cell's, not that of a larger one before it
    warm_started = now()
    for batch in _warmup(plan, cell.settings, todo):
        runner.run([requests[index] for index in batch])
    runner.reset_peak_memory()
    observer.ready(cell, repeat)
    started = now()
    answered = []
    for number, batch in enumerate(todo):
        results = runner.run(_seeded([requests[index] for index in batch], plan.seed, repeat))
        answered += [(number, index, result) for index, result in zip(batch, results, strict=True)]
        observer.batch_done()
    ended = now()
    # Scoring an answer takes time that is no part of the measurement.
    records = [
        _request_record(plan, cell, plan.items[index], result, repeat=repeat, batch=number)
        for number, index, result in answered
    ]
    line = RepeatRecord(
        cell=cell.id,
        repeat=repeat,
        started=started,
        ended=ended,
        warmup_s=started - warm_started,
        **runner.peak_memory(),
        device=str(runner.loaded.device),
        dtype=str(runner.loaded.dtype).removeprefix("torch."),
    )
    if not cell.settings.sampling.greedy:
        line.sampling_seed = _seeded(requests[:1], plan.seed, repeat)[0].sampling.seed
    if verifier is not None:
        line.tokens = verifier.check(runner, cell, [result for _, _, result in answered], line.sampling_seed)
    return line, records


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
        **asked_fields(item),
        **{name: getattr(result, name) for name in _REPORTED},
        error=None if result.error is None else str(result.error),
        tags=item.tag_values,
        scores=scores_of(result.text, item.answers),
        empty=bool(item.answers) and not result.text.strip(),
        content=RecordedAnswer(item.prompt, list(item.answers), result.text) if plan.include_content else None,
    )


def asked_fields(item: Item) -> dict[str, Any]:
    """Return the fields of a request's record that say what was asked."""
    return {
        "image": [document.name for document in item.documents],
        "image_sha256": [document.sha256 for document in item.documents],
        "image_size": [(document.width, document.height) for document in item.documents],
        "prompt_sha256": item.prompt_sha256,
    }


def _cell_record(cell: Cell, repeat: int | None, outcome: str, reason: str | None) -> CellRecord:
    return CellRecord(cell=cell.id, repeat=repeat, outcome=outcome, reason=reason, time=now())


def _classify(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a failure."""
    from panscan.model.machine import is_out_of_memory

    if is_out_of_memory(error):
        return "oom", f"out of memory: {brief(error, 300)}"
    return "skipped" if isinstance(error, UnsupportedError) else "failed", error_line(error, 300)


def compiles(settings: Settings) -> bool:
    """Return whether a new prompt length may be compiled, which belongs in the warm-up."""
    return settings.compile is not None or settings.cache == "static" or settings.attention == "flex_attention"
