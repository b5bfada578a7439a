"""Verify each cell: compare its measured tokens and its next-token distributions with the reference.

References are computed or loaded before any cell is measured, one for each combination of weights and views. Measured
tokens are compared with the reference after every repeat. The distributions are compared after the cell's last repeat,
with the cell's own configuration, while its compiled code is still loaded. Checks that need the bare model (tokens
beyond the reference, margins of tokens that differ between runs) run once all cells of a loaded model are measured.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from panscan.bench.divergence import DivergenceTally, Noise
from panscan.bench.grid import Cell
from panscan.bench.invariance import RunAnswers, answer_again, compare, shared_axis, variants
from panscan.bench.reference import (
    Reference,
    compute_reference,
    eager_settings,
    load_reference,
    observe_eager,
    reference_states,
    save_reference,
    views_digest,
)
from panscan.bench.tokens import Expected, Judge, ReferenceRows, Tokens, compared_with_reference, first_difference
from panscan.core import (
    PanscanError,
    PanscanWarning,
    RecordsError,
    Request,
    Result,
    UnsupportedError,
    canonical_model,
    now,
    same_model,
)
from panscan.core.errors import error_line
from panscan.model.checkpoint import Loaded, stored_format
from panscan.model.machine import is_out_of_memory, release_memory, resolve_device, resolve_dtype
from panscan.model.quantization import unquantized_settings
from panscan.model.reference import weights_digest
from panscan.model.runtime import reference_computation
from panscan.records.schema import AXES, AnyRecord, AxisCheck, InputCheck, TokenCheck, TruthRecord, VerdictRecord
from panscan.records.verdict import merged_axes
from panscan.runners.base import calls
from panscan.runners.processor_check import check_inputs
from panscan.settings import Settings
from panscan.workload.requests import Item, Source, request_of, view_counts

if TYPE_CHECKING:
    from panscan.runners.base import Runner


_WeightsKey = tuple[Any, ...]
_ANY = ""
"""Stands for all views, in place of their digest."""
_UNOBSERVABLE = {"generate_batch": "generate_batch() does not expose its logits"}
"""Runners whose cells cannot be compared with a reference, and why."""
_MAX_BEYOND = 4  # answers per cell that are checked beyond the reference: those that extend furthest
_SUPPLY = "use --reference with a reference of the unquantised model in this --dtype"
_OTHER_WEIGHTS = "vLLM generates different random weights; use a checkpoint instead"


@dataclass(slots=True)
class Verifier:
    """Computes or loads the references of a sweep, and compares its cells with them.

    Args:
        items: sample of the requests to compare.
        source: source of the items.
        steps: maximum number of reference tokens per request.
        directory: directory for computed references; None to store none.
        reference_files: references given with ``--reference``, with their files.
        write: writes records.
        say: receives progress messages.
        recorded: ids of references that the run's records already contain.
        everything: all items, for the invariance checks and for resumed runs.
        invariance: answer each cell's requests again under different conditions.
        follows: load references that another process stores in ``directory``, and compute none.
    """

    items: Sequence[Item]
    source: Source
    steps: int
    directory: Path | None
    reference_files: Sequence[tuple[Path, Reference]]
    write: Callable[[Sequence[AnyRecord]], None]
    say: Callable[[str], None]
    recorded: set[str] = field(default_factory=set)
    everything: Sequence[Item] = ()
    invariance: bool = False
    follows: bool = False
    _references: dict[tuple[str, str], Reference] = field(default_factory=dict)
    _digests: dict[_WeightsKey, str] = field(default_factory=dict)
    _missing: dict[tuple[_WeightsKey, str], str] = field(default_factory=dict)
    _loads: set[_WeightsKey] = field(default_factory=set)
    _runs: dict[str, list[RunAnswers]] = field(default_factory=dict)
    _settings: dict[str, Settings] = field(default_factory=dict)
    _records: dict[str, VerdictRecord] = field(default_factory=dict)
    _longest: dict[str, int] = field(default_factory=dict)

    def check_references(self, cells: Sequence[Cell]) -> None:
        """Check, before any model is loaded, that a ``--reference`` file covers the views of at least one cell.

        Raises:
            RecordsError: no file does.
        """
        if not self.reference_files or not cells:
            return
        self._loads = {_weights_key(cell.settings) for cell in cells}
        known = {reference.views for _, reference in self.reference_files}
        needed = {self._views(cell.settings, pixels) for cell in cells for pixels in ("cpu", "device")}
        if not known & needed:
            raise RecordsError(
                f"--reference {self.reference_files[0][0]} was computed for other views: use the same documents,"
                " prompts, pan-and-scan settings, --preprocess, --num-prompts, --verify-requests and --seed"
            )

    def prepare(self, runner: Runner, cells: Sequence[Cell]) -> None:
        """Load or compute the references of cells that share the runner's weights, before they are measured.

        Raises:
            RecordsError: the ``--reference`` file was computed from other weights.
        """
        settings = cells[0].settings
        if _is_quantized(settings) or _unobservable_reason(settings) is not None:
            return  # quantised cells use the reference of the unquantised weights
        try:
            weights = self._digests[_weights_key(settings)] = weights_digest(runner.loaded.model)
        except UnsupportedError as error:
            self._missing[_weights_key(settings), _ANY] = f"{error}: {_SUPPLY}"
            return
        by_views = {self._views(cell.settings, runner.pixels(cell.settings)): cell for cell in reversed(cells)}
        for cell in reversed(by_views.values()):
            self._prepare_one(runner, cell.settings, weights)
        release_memory()

    def prepare_quantized(self, cells: Sequence[Cell]) -> None:
        """Load or compute the references of quantised cells, before their weights are loaded.

        Loads the unquantised weights if a reference is missing.
        """
        from panscan.runners.factory import open_runner

        settings = cells[0].settings
        if not _is_quantized(settings) or _unobservable_reason(settings) is not None:
            return
        if settings.runner == "vllm":
            self._missing[_weights_key(settings), _ANY] = f"vLLM does not expose its weights: {_SUPPLY}"
            return
        pixels_known = settings.runner != "pipeline"  # only its processor knows how it rounds pixels
        if pixels_known and all(self._reference(cell.settings, cell.settings.preprocess) for cell in cells):
            return
        try:
            plain = unquantized_settings(settings)
            self.say(f"loading {plain.model_name} unquantised to compute the reference")
            runner = open_runner(plain)
        except Exception as error:  # the cells are still measured, without a verdict
            self._missing[_weights_key(settings), _ANY] = _failure_text(error, "loading the unquantised weights")
            return
        try:
            self.prepare(runner, [replace(cell, settings=_unquantized(cell.settings)) for cell in cells])
        finally:
            runner.close()

    def check(self, runner: Runner, cell: Cell, results: Sequence[Result], seed: int | None) -> TokenCheck | None:
        """Compare the tokens of a measured repeat with the reference, and keep them for :meth:`conclude`.

        Args:
            runner: the runner that measured the repeat.
            cell: the measured cell.
            results: one result per request of the repeat.
            seed: sampler seed; None for greedy cells.

        Returns:
            The comparison; None without a reference.
        """
        self._settings[cell.id] = cell.settings
        self._longest[cell.id] = max(result.prompt_tokens for result in results)
        self._keep(cell, RunAnswers("repeats", "", {result.id: result.token_ids for result in results}))
        try:
            if self.follows:
                self._store_digest(runner, cell.settings)
            reference = self._reference(cell.settings, runner.pixels(cell.settings))
            if reference is None:
                return TokenCheck.of(note="no reference for these weights and views") if self.follows else None
            judge = self._judge(runner, cell.settings, reference)
            pairs = zip(self.items, reference.requests, strict=True)
            expected = {item.id: Expected(request.tokens, request.answer) for item, request in pairs}
            return compared_with_reference(judge, expected, results, seed)
        except Exception as error:  # a failed comparison does not invalidate the measurement
            return TokenCheck.of(note=_failure_text(error, "comparing measured tokens"))

    def conclude(self, runner: Runner, cells: Sequence[Cell]) -> Iterator[VerdictRecord]:
        """Yield the final verdict records, with the checks that need the bare model.

        These compare measured tokens beyond the reference, and answers under different conditions with each other.

        Args:
            runner: the runner that measured the cells; releases everything except its model if a check requires it.
            cells: measured cells of this model.
        """
        with ExitStack() as stack:
            rows = _Rows(self, runner, stack)
            for cell in cells:
                record = self._records.pop(cell.id, None)
                if record is None or record.concluded:
                    continue
                started = now()
                self.say("checking tokens beyond the reference")
                beyond, axes = self._concluded(runner, cell, rows)
                seconds = record.seconds + now() - started
                yield structs.replace(record, beyond=beyond, invariance=axes, concluded=True, seconds=seconds)
        for cell in cells:
            del self._runs.get(cell.id, [])[1:]  # cells of models loaded later are compared with the first run

    def verify(self, runner: Runner, cell: Cell) -> VerdictRecord:
        """Return the verdict record of the cell that ``runner`` is configured for."""
        started = now()
        record = VerdictRecord.without_figures(cell.id, "unverified")
        pixels = runner.pixels(cell.settings)
        reference = self._reference(cell.settings, pixels)
        if reference is None:
            record.reason = self._why_missing(cell.settings, pixels)
        else:
            self._record(runner, cell.settings, reference, "reference", 0.0)
            try:
                record = self._compare(runner, cell, reference)
            except Exception as error:  # the cell is unverified, and the sweep continues
                record.reason = _failure_text(error, "comparing answers")
            record.truth = reference.id
            if _comparable(cell.settings):
                self._vary(runner, cell)
        record.concluded = reference is None or not _comparable(cell.settings)
        record.seconds = now() - started
        self._records[cell.id] = record
        return record

    def _vary(self, runner: Runner, cell: Cell) -> None:
        """Answer a cell's requests again under different conditions, for :meth:`conclude` to compare.

        Measured tokens are not recorded, so a resumed run first answers the requests as they were measured.
        """
        requests = [request_of(item, cell.settings, self.source) for item in self.everything]
        views = view_counts(self.everything, cell.settings)
        if requests and not self._runs.get(cell.id):
            self.say("answering again: tokens measured before this run was resumed are not stored")
            try:
                again = answer_again(runner, requests, views)
            except Exception as error:  # the measurement and the other checks remain valid
                self.say(f"not answered again: {_failure_text(error, 'answering again')}")
                return
            self._longest[cell.id] = again.longest
            self._keep(cell, again.variant)
        if not self.invariance:
            return
        for variant in variants(runner, requests, views, self._longest.get(cell.id, 0)):
            self.say(f"answering again: {AXES[variant.axis]}")
            self._keep(cell, variant)

    def _keep(self, cell: Cell, variant: RunAnswers) -> None:
        """Keep answers for later checks: eight bytes per token, and identical answers only once."""
        known = self._runs.setdefault(cell.id, [])
        first = known[0].answers if known else {}
        compact = {
            name: first[name] if name in first and list(first[name]) == list(tokens) else array("q", tokens)
            for name, tokens in variant.answers.items()
        }
        known.append(replace(variant, answers=compact))

    def _judge(self, runner: Runner, settings: Settings, reference: Reference) -> Judge:
        return Judge(runner.loaded, settings, reference.noise[_precision(settings)].margin)

    def _concluded(self, runner: Runner, cell: Cell, rows: _Rows) -> tuple[TokenCheck | None, list[AxisCheck]]:
        """Return the checks that need the bare model: of tokens beyond the reference, and of each axis.

        A failed check leaves a note.
        """
        reference = self._reference(cell.settings, runner.pixels(cell.settings))
        assert reference is not None  # otherwise the record is already concluded
        judge, states = self._judge(runner, cell.settings, reference), rows.of(cell.settings)
        try:
            beyond = self._beyond(cell, reference, judge, states)
        except Exception as error:  # such as quantised weights, or too little memory
            beyond = TokenCheck.of(
                note=f"tokens beyond the reference: {_failure_text(error, 'computing the reference')}"
            )
        return beyond, self._axes(cell, judge, states)

    def _beyond(self, cell: Cell, reference: Reference, judge: Judge, states: ReferenceRows) -> TokenCheck | None:
        """Check measured tokens beyond the end of the reference; None if there are none."""
        beyond: dict[tuple[str, tuple[int, ...]], int] = {}
        runs = [variant for variant in self._runs.get(cell.id, ()) if variant.axis == "repeats"]
        if not runs:
            return TokenCheck.of(note="tokens measured before this run was resumed are not stored")
        for run in runs:
            for item, expected in zip(self.items, reference.requests, strict=True):
                tokens = tuple(run.answers.get(item.id, ()))
                start = first_difference(tokens, expected.tokens)
                start = len(expected.tokens) if start is None else start
                if start < len(tokens):
                    beyond[item.id, tokens] = start
        longest = sorted(beyond, key=lambda answer: beyond[answer] - len(answer[1]))[:_MAX_BEYOND]
        checks = [states.check(judge, *answer, beyond[answer]) for answer in longest]
        return sum(checks, TokenCheck.of()) if checks else None

    def _axes(self, cell: Cell, judge: Judge, states: ReferenceRows) -> list[AxisCheck]:
        """Compare the cell with its other runs, and with cells that differ from it in one axis only."""
        measured, *others = self._runs.get(cell.id) or [RunAnswers("repeats", "", {})]
        checks = [compare(variant, measured.answers, judge, states, same_cell=True) for variant in others]
        for other, settings in self._settings.items():
            if other != cell.id and self._runs.get(other) and (axis := shared_axis(cell.settings, settings)):
                variant = RunAnswers(axis, "other cells of this run", self._runs[other][0].answers)
                checks.append(compare(variant, measured.answers, judge, states, same_cell=False))
        return merged_axes(checks)

    def _views(self, settings: Settings, pixels: str) -> str:
        return views_digest(self.items, settings, self.source, pixels)

    def _requests(self, settings: Settings) -> list[Request]:
        return [request_of(item, settings, self.source) for item in self.items]

    def _reference(self, settings: Settings, pixels: str) -> Reference | None:
        """Return the cell's reference, or None if there is none with noise at this precision.

        If the digest of the weights is unknown (quantised cells), match ``--reference`` files by model name.
        """
        if _unobservable_reason(settings) is not None:
            return None
        views, weights = self._views(settings, pixels), self._digests.get(_weights_key(settings))
        if weights is not None and not self.follows:
            reference = self._references.get((weights, views))
        else:
            known = [reference for _, reference in self.reference_files] + self._followed(views)
            fitting = (candidate for candidate in known if candidate.views == views)
            if weights is None:
                reference = next((candidate for candidate in fitting if _same_model(candidate.model, settings)), None)
            else:
                reference = next((candidate for candidate in fitting if candidate.weights == weights), None)
        return reference if reference is not None and _precision(settings) in reference.noise else None

    def _followed(self, views: str) -> list[Reference]:
        """Return the references for these views that another process of this run has stored, if this one follows it."""
        if not self.follows or self.directory is None:
            return []
        return [load_reference(file) for file in sorted(self.directory.glob(f"*-{views[:8]}.safetensors"))]

    def _store_digest(self, runner: Runner, settings: Settings) -> None:
        """Store the digest of the loaded weights, unless they are quantised."""
        if _weights_key(settings) not in self._digests and not _is_quantized(settings):
            with suppress(UnsupportedError):
                self._digests[_weights_key(settings)] = weights_digest(runner.loaded.model)

    def _why_missing(self, settings: Settings, pixels: str) -> str:
        if (reason := _unobservable_reason(settings)) is not None:
            return reason
        identity = _weights_key(settings)
        found = self._missing.get((identity, self._views(settings, pixels))) or self._missing.get((identity, _ANY))
        return found or "no reference was computed"

    def _prepare_one(self, runner: Runner, settings: Settings, weights: str) -> None:
        pixels = runner.pixels(settings)
        views = self._views(settings, pixels)
        started = now()
        reference, source = self._references.get((weights, views)), "computed"
        if reference is None:
            reference, source = self._found(weights, views, settings)
        plain = eager_settings(settings, pixels, self.steps)
        precision = _precision(settings)
        try:
            if reference is None or precision not in reference.noise:
                with reference_computation(runner.loaded.model):
                    reference = self._computed(runner.loaded, settings, plain, reference, (weights, views))
            self._references[weights, views] = reference
        except Exception as error:  # the cells are still measured, without a verdict
            self._missing[_weights_key(settings), views] = _failure_text(error, "computing the reference")
            return
        self._record(runner, settings, reference, source, now() - started)

    def _computed(
        self, loaded: Loaded, settings: Settings, plain: Settings, reference: Reference | None, digests: tuple[str, str]
    ) -> Reference:
        """Compute and store a reference, or only its noise at the precision of ``settings`` if that is missing."""
        if reference is None:
            names = *digests, settings.model_name
            reference = compute_reference(loaded, plain, self._requests(settings), names, self.steps, self.say)
            self._references[digests] = reference  # kept even if computing its noise runs out of memory
        reference.noise[_precision(settings)] = self._noise(loaded, plain, reference)
        if self.directory is not None:
            save_reference(reference, self.directory / f"{reference.id}.safetensors")
        return reference

    def _found(self, weights: str, views: str, settings: Settings) -> tuple[Reference | None, str]:
        """Return a reference from ``--reference`` or from an earlier start of this run, and its source.

        Raises:
            RecordsError: the ``--reference`` file was computed from other weights, and the run loads only one model.
        """
        matching = [(path, reference) for path, reference in self.reference_files if reference.views == views]
        for _, reference in matching:
            if reference.weights == weights:
                return reference, "reference"
        for path, reference in matching:
            text = f"--reference {path} was computed from other weights ({reference.model}, possibly another --dtype)"
            if len(self._loads) < 2:
                raise RecordsError(text)
            name = f"{settings.model_name} in {_precision(settings)}"
            warnings.warn(f"{text}; computing the reference for {name}", PanscanWarning, stacklevel=2)
        if self.directory is not None:
            path = self.directory / f"{weights[:8]}-{views[:8]}.safetensors"
            if path.exists():
                return load_reference(path), "computed"
        return None, "computed"

    def _noise(self, loaded: Loaded, plain: Settings, reference: Reference) -> Noise:
        """Return the noise of eager attention at the model's precision; zero in float32."""
        if loaded.dtype == torch.float32:
            return Noise(
                [[0.0] * len(expected.tokens) for expected in reference.requests],
                0.0 if reference.image_positions else None,
                0.0,
            )
        tally = DivergenceTally()
        requests = self._requests(plain)
        seen = observe_eager(loaded, plain, requests, reference, self.say)
        for expected, observation in zip(reference.requests, seen, strict=True):
            tally.add(loaded, expected.answer, observation.answer, expected.image, observation.image)
        return tally.noise()

    def _compare(self, runner: Runner, cell: Cell, reference: Reference) -> VerdictRecord:
        settings = cell.settings
        requests = self._requests(settings)
        tally, top_logprobs = DivergenceTally(), None
        todo = calls(view_counts(self.items, settings), settings)
        for number, batch in enumerate(todo):
            self.say(f"comparing answers: batch {number + 1} of {len(todo)}")
            forced = [reference.requests[index].forced_tokens(settings.max_new_tokens) for index in batch]
            for index, seen in zip(batch, runner.observe([requests[i] for i in batch], forced), strict=True):
                expected = reference.requests[index]
                top_logprobs = seen.top_logprobs
                pairs = expected.answer[: len(seen.tokens)], seen.answer, expected.image, seen.image
                tally.add(runner.loaded, *pairs, partial=top_logprobs is not None)
        precision = _precision(settings)
        steps, float32 = settings.max_new_tokens, precision == "fp32"
        record = tally.verdict(cell.id, reference.noise[precision], steps, float32=float32)
        if top_logprobs is not None and record.reason is None:
            record.reason = f"from top {top_logprobs} log-probabilities"
        return record

    def _record(self, runner: Runner, settings: Settings, reference: Reference, source: str, seconds: float) -> None:
        """Write the record of a reference, once, with the comparison of its inputs with Transformers' processor."""
        if reference.id in self.recorded:
            return
        self.recorded.add(reference.id)
        origin = next((path for path, each in self.reference_files if each.id == reference.id), None)
        file = origin if origin is not None else Path("truth") / f"{reference.id}.safetensors"
        chosen = [request_of(item, settings, self.source) for item in _most_varied_first(self.items)]
        try:
            inputs = InputCheck(**check_inputs(runner.loaded.reader, chosen))
        except Exception as error:  # such as a deleted image: the reference remains valid
            inputs = InputCheck(0, 0, None, _failure_text(error, "comparing inputs"))
        truth = TruthRecord(
            truth=reference.id,
            source=source,
            file=str(file),
            model=reference.model,
            requests=len(reference.requests),
            tokens=reference.tokens,
            image_positions=reference.image_positions,
            seconds=seconds,
            inputs=inputs,
        )
        self.write([truth])


@dataclass(slots=True)
class _Rows:
    """Hidden states of the reference for the cells of a loaded model.

    The model enters its reference computation when the first hidden states are requested.
    """

    verifier: Verifier
    runner: Runner
    stack: ExitStack
    _by_views: dict[str, ReferenceRows] = field(default_factory=dict)
    _entered: bool = False

    def of(self, settings: Settings) -> ReferenceRows:
        pixels = self.runner.pixels(settings)
        views = self.verifier._views(settings, pixels)
        if views not in self._by_views:
            plain = eager_settings(settings, pixels, self.verifier.steps)
            self._by_views[views] = ReferenceRows(lambda request, tokens: self._compute(plain, request, tokens))
        return self._by_views[views]

    def _compute(self, plain: Settings, request: str, tokens: Tokens) -> torch.Tensor:
        if not self._entered:
            self.runner.drop()
            release_memory()
            self.stack.enter_context(reference_computation(self.runner.loaded.model))
            self._entered = True
        item = next(item for item in (*self.verifier.items, *self.verifier.everything) if item.id == request)
        built = request_of(item, plain, self.verifier.source)
        return reference_states(self.runner.loaded, plain, built, list(tokens))


def _most_varied_first(items: Sequence[Item]) -> list[Item]:
    """Return the items, starting with one for each combination of image shapes (portrait, landscape, square)."""
    kinds: dict[Any, Item] = {}
    for item in items:
        shapes = tuple((each.width > each.height) - (each.width < each.height) for each in item.documents)
        kinds.setdefault(shapes, item)
    first = sorted(kinds.values(), key=lambda item: -max((len({d.width, d.height}) for d in item.documents), default=0))
    return [*first, *(item for item in items if item not in first)]


def _comparable(settings: Settings) -> bool:
    return settings.sampling.greedy and settings.repetition_penalty in (None, 1)


def _unobservable_reason(settings: Settings) -> str | None:
    """Return why a cell cannot be compared with a reference; None if it can."""
    if settings.runner == "vllm" and settings.random_weights:
        return _OTHER_WEIGHTS
    return _UNOBSERVABLE.get(settings.runner)


def _weights_key(settings: Settings) -> _WeightsKey:
    """Return the settings that determine the unquantised weights; local directories as resolved paths."""
    plain = _unquantized(settings)
    return canonical_model(plain.model), plain.revision, plain.random_weights, plain.model_shape, _precision(plain)


@cache
def _is_quantized(settings: Settings) -> bool:
    """Return whether the weights are quantised, on load or in their checkpoint."""
    if settings.quantization is not None or settings.random_weights:
        return settings.quantization is not None
    with suppress(PanscanError):  # loading the checkpoint reports the error
        return stored_format(settings.model, settings.revision) is not None
    return False


@cache
def _unquantized(settings: Settings) -> Settings:
    """Return the settings of the unquantised weights; the same settings if a quantised checkpoint names no base."""
    try:
        return unquantized_settings(settings)
    except PanscanError:
        return settings


def _precision(settings: Settings) -> str:
    """Return the name of a cell's precision, with ``auto`` resolved."""
    dtype = resolve_dtype(settings.dtype, resolve_device(settings.device))
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _same_model(name: str, settings: Settings) -> bool:
    """Return whether a reference of this model applies to a cell; always if its base model is unknown."""
    plain = _unquantized(settings)
    return same_model(name, plain.model_name) or _is_quantized(plain)


def _failure_text(error: Exception, doing: str) -> str:
    if is_out_of_memory(error):
        hint = "" if doing == "comparing answers" else ": load a reference with --reference"
        return f"out of memory while {doing}{hint}"
    return error_line(error)
