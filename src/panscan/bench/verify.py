"""The verdict of each cell: its measured tokens and its next-token distributions against the truth's.

One truth per weights and views is found or computed before cells are measured. The tokens of every measured repeat are
compared with it right away. The distributions follow after a cell's last repeat, through the cell's own path, while
what it compiled is there. What needs the bare model again (tokens beyond the truth's, margins of tokens that differ
between runs) waits until all cells of a loaded model are measured.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from panscan.bench.divergence import DivergenceTally, Noise
from panscan.bench.grid import Cell
from panscan.bench.invariance import RunAnswers, answer_again, compare, shared_axis, variants
from panscan.bench.tokens import Expected, Judge, ReferenceRows, Tokens, compared_with_truth, first_difference
from panscan.bench.truth import (
    Truth,
    compute_truth,
    eager_settings,
    load_truth,
    observe_eager,
    reference_states,
    save_truth,
    views_digest,
)
from panscan.bench.workload import Item, Source, plans_of, request_of
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
from panscan.model.checkpoint import Loaded, stored_format
from panscan.model.machine import is_out_of_memory, release_memory, resolve_device, resolve_dtype
from panscan.model.quantization import unquantized_settings
from panscan.model.reference import weights_digest
from panscan.model.runtime import reference_computation
from panscan.records.schema import Record
from panscan.records.verdict import AXES, AxisCheck, TokenCheck, merged_axes
from panscan.runners.base import calls
from panscan.runners.processor_check import check_inputs
from panscan.settings import Settings

if TYPE_CHECKING:
    from panscan.runners.base import Runner


__all__ = ["Verifier"]

_Identity = tuple[Any, ...]
_ANY = ""
"""In place of a fingerprint of views: all of them."""
_UNOBSERVABLE = {"generate_batch": "generate_batch() does not expose its logits"}
"""Runners whose cells need no truth, because nothing of theirs could be compared with it."""
_SCORED = 4  # answers of a cell that are followed beyond the truth, the longest ones
_BRING = "use --reference with a truth of the unquantised model in this --dtype"
_OTHER_WEIGHTS = "vLLM draws other random weights: compare it on a checkpoint"


@dataclass(slots=True)
class Verifier:
    """Knows the truths of a sweep.

    Args:
        items: the sample that is compared.
        source: of the items.
        steps: tokens of each request at most.
        directory: where truths are stored; None stores none.
        references: truths from elsewhere, with their files.
        write: takes records.
        say: receives progress messages.
        recorded: ids of truths that the run's records name already.
        everything: all items; they are answered again if ``invariance`` is to be checked.
        invariance: whether to answer the requests of each cell again under other conditions.
        follows: take truths from ``directory`` that another process puts there, and compute none.
    """

    items: Sequence[Item]
    source: Source
    steps: int
    directory: Path | None
    references: Sequence[tuple[Path, Truth]]
    write: Callable[[Sequence[Mapping[str, Any]]], None]
    say: Callable[[str], None]
    recorded: set[str] = field(default_factory=set)
    everything: Sequence[Item] = ()
    invariance: bool = False
    follows: bool = False
    _truths: dict[tuple[str, str], Truth] = field(default_factory=dict)
    _digests: dict[_Identity, str] = field(default_factory=dict)
    _missing: dict[tuple[_Identity, str], str] = field(default_factory=dict)
    _loads: set[_Identity] = field(default_factory=set)
    _runs: dict[str, list[RunAnswers]] = field(default_factory=dict)
    _settings: dict[str, Settings] = field(default_factory=dict)
    _records: dict[str, Record] = field(default_factory=dict)
    _longest: dict[str, int] = field(default_factory=dict)

    def check_references(self, cells: Sequence[Cell]) -> None:
        """Whether references were made of any views of these cells, which this machine can run.

        Raises:
            RecordsError: of none; before a model is loaded.
        """
        if not self.references or not cells:
            return
        self._loads = {_identity(cell.settings) for cell in cells}
        known = {truth.views for _, truth in self.references}
        asked = {self._views(cell.settings, pixels) for cell in cells for pixels in ("cpu", "device")}
        if not known & asked:
            raise RecordsError(
                f"--reference {self.references[0][0]} is of other views: documents, prompts, pan-and-scan settings"
                ", --preprocess, --num-samples, --verify-requests and --seed must be those of a cell"
            )

    def prepare(self, runner: Runner, cells: Sequence[Cell]) -> None:
        """Have the truth of each of these cells, which ``runner``'s weights serve, before they are measured.

        Raises:
            RecordsError: a reference is of other weights.
        """
        settings = cells[0].settings
        if _is_quantized(settings) or _unobservable_reason(settings) is not None:
            return  # its truth is that of the unquantised weights
        try:
            weights = self._digests[_identity(settings)] = weights_digest(runner.loaded.model)
        except UnsupportedError as error:
            self._missing[_identity(settings), _ANY] = f"{error}: {_BRING}"
            return
        for cell in _one_per_views(cells, lambda each: self._views(each.settings, runner.pixels(each.settings))):
            self._prepare_one(runner, cell.settings, weights)
        release_memory()

    def prepare_quantized(self, cells: Sequence[Cell]) -> None:
        """The same for cells of quantised weights, before these are loaded: loads the unquantised ones if need be."""
        from panscan.runners.factory import open_runner

        settings = cells[0].settings
        if not _is_quantized(settings) or _unobservable_reason(settings) is not None:
            return
        if settings.runner == "vllm":
            self._missing[_identity(settings), _ANY] = f"vLLM does not show its weights: {_BRING}"
            return
        known = settings.runner != "pipeline"  # whose pixels only its processor knows
        if known and all(self._truth(cell.settings, cell.settings.preprocess) for cell in cells):
            return
        try:
            plain = unquantized_settings(settings)
            self.say(f"loading {plain.model_name} unquantised to compute the truth")
            runner = open_runner(plain)
        except Exception as error:  # whatever it is, cells go without a verdict, not the run without cells
            self._missing[_identity(settings), _ANY] = _reason(error, "loading the unquantised weights")
            return
        try:
            self.prepare(runner, [replace(cell, settings=_unquantized(cell.settings)) for cell in cells])
        finally:
            runner.close()

    def check(self, runner: Runner, cell: Cell, results: Sequence[Result], seed: int | None) -> Record | None:
        """Compare a measured repeat's tokens with the truth's, and keep them for :meth:`conclude`.

        Args:
            runner: the runner that measured the repeat.
            cell: the measured cell.
            results: one result per request of the repeat.
            seed: sampler seed; None for greedy cells.

        Returns:
            The fields of :class:`panscan.records.verdict.TokenCheck`; None without a truth.
        """
        self._settings[cell.id] = cell.settings
        self._longest[cell.id] = max(result.prompt_tokens for result in results)
        self._keep(cell, RunAnswers("repeats", "", {result.id: result.token_ids for result in results}))
        try:
            if self.follows:
                self._digest(runner, cell.settings)
            truth = self._truth(cell.settings, runner.pixels(cell.settings))
            if truth is None:
                return asdict(TokenCheck(note="no truth of these weights and views")) if self.follows else None
            judge = self._judge(runner, cell.settings, truth)
            asked = zip(self.items, truth.requests, strict=True)
            expected = {item.id: Expected(each.tokens, each.answer) for item, each in asked}
            return asdict(compared_with_truth(judge, expected, results, seed))
        except Exception as error:  # the measurement stands, whatever keeps its tokens from being compared
            return asdict(TokenCheck(note=_reason(error, "comparing measured tokens")))

    def conclude(self, runner: Runner, cells: Sequence[Cell]) -> Iterator[Record]:
        """Yield final verdict records, with the checks that need the bare model: measured tokens beyond the truth
        against the reference's choices, and answers under different conditions against each other.

        Args:
            runner: the runner that measured the cells; it may release everything except its model.
            cells: measured cells of this model.
        """
        with ExitStack() as stack:
            rows = _Rows(self, runner, stack)
            for cell in cells:
                record = self._records.pop(cell.id, None)
                if record is None or record["concluded"]:
                    continue
                started = now()
                self.say("checking tokens after the reference's last one")
                extra = self._concluded(runner, cell, rows)
                yield record | extra | {"concluded": True, "seconds": record["seconds"] + now() - started}
        for cell in cells:
            del self._runs.get(cell.id, [])[1:]  # the first run of a cell is compared with cells of other loads

    def verify(self, runner: Runner, cell: Cell) -> Record:
        """The verdict record of a cell that ``runner`` is configured for."""
        started = now()
        record: Record = {"type": "verdict", "cell": cell.id, "verdict": "unverified", "reason": None, "truth": None}
        record |= dict.fromkeys(("answer", "image", "top1", "equal_tokens"))
        pixels = runner.pixels(cell.settings)
        truth = self._truth(cell.settings, pixels)
        if truth is None:
            record["reason"] = self._why_missing(cell.settings, pixels)
        else:
            self._record(runner, cell.settings, truth, "reference", 0.0)
            record["truth"] = truth.id
            try:
                record |= self._compare(runner, cell.settings, truth)
            except Exception as error:  # a cell that cannot be observed is unverified; the sweep continues
                record["reason"] = _reason(error, "comparing answers")
            if _comparable(cell.settings):
                self._vary(runner, cell)
        concluded = truth is None or not _comparable(cell.settings)
        self._records[cell.id] = record | {"concluded": concluded, "seconds": now() - started}
        return self._records[cell.id]

    def _vary(self, runner: Runner, cell: Cell) -> None:
        """Answer a cell's requests again under other conditions, for :meth:`conclude` to compare; of a resumed run,
        whose measured tokens are not stored, first as they were measured."""
        requests = [request_of(item, cell.settings, self.source) for item in self.everything]
        views = [sum(len(plan.views) for plan in plans_of(item, cell.settings)) for item in self.everything]
        if requests and not self._runs.get(cell.id):
            self.say("answering again: tokens measured before this run was resumed are not stored")
            try:
                again = answer_again(runner, requests, views)
            except Exception as error:  # the measurement and the verdict so far stand
                self.say(f"not answered again: {_reason(error, 'answering again')}")
                return
            self._longest[cell.id] = again.longest
            self._keep(cell, again.variant)
        if not self.invariance:
            return
        for variant in variants(runner, requests, views, self._longest.get(cell.id, 0)):
            self.say(f"answering again: {AXES[variant.axis]}")
            self._keep(cell, variant)

    def _keep(self, cell: Cell, variant: RunAnswers) -> None:
        """Keep answers, eight bytes a token; equal ones once."""
        known = self._runs.setdefault(cell.id, [])
        first = known[0].answers if known else {}
        compact = {
            name: first[name] if name in first and list(first[name]) == list(tokens) else array("q", tokens)
            for name, tokens in variant.answers.items()
        }
        known.append(replace(variant, answers=compact))

    def _judge(self, runner: Runner, settings: Settings, truth: Truth) -> Judge:
        return Judge(runner.loaded, settings, truth.noise[_precision(settings)].margin)

    def _concluded(self, runner: Runner, cell: Cell, rows: _Rows) -> Record:
        """Both comparisons; one that fails leaves a note, and the verdict so far stands."""
        truth = self._truth(cell.settings, runner.pixels(cell.settings))
        assert truth is not None  # the record would be concluded
        judge, reference = self._judge(runner, cell.settings, truth), rows.of(cell.settings)
        try:
            beyond = self._beyond(cell, truth, judge, reference)
        except Exception as error:  # quantised weights, no memory: whatever keeps the reference from computing
            beyond = TokenCheck(note=f"tokens beyond the truth: {_reason(error, 'computing the reference')}")
        axes = [asdict(axis) for axis in self._axes(cell, judge, reference)]
        return {"beyond": None if beyond is None else asdict(beyond), "invariance": axes}

    def _beyond(self, cell: Cell, truth: Truth, judge: Judge, reference: ReferenceRows) -> TokenCheck | None:
        """Measured tokens that the truth does not reach; None if there are none."""
        left: dict[tuple[str, tuple[int, ...]], int] = {}
        runs = [variant for variant in self._runs.get(cell.id, ()) if variant.axis == "repeats"]
        if not runs:
            return TokenCheck(note="tokens measured before this run was resumed are not stored")
        for run in runs:
            for item, expected in zip(self.items, truth.requests, strict=True):
                tokens = tuple(run.answers.get(item.id, ()))
                start = first_difference(tokens, expected.tokens)
                start = len(expected.tokens) if start is None else start
                if start < len(tokens):
                    left[item.id, tokens] = start
        longest = sorted(left, key=lambda answer: left[answer] - len(answer[1]))[:_SCORED]
        if not longest:
            return None
        total = TokenCheck()
        for request, tokens in longest:
            total += reference.check(judge, request, tokens, left[request, tokens])
        return total

    def _axes(self, cell: Cell, judge: Judge, reference: ReferenceRows) -> list[AxisCheck]:
        """Invariance: other runs of this cell, and cells that differ from it in one axis only."""
        own, *others = self._runs.get(cell.id) or [RunAnswers("repeats", "", {})]
        found = [compare(each, own.answers, judge, reference, same_cell=True) for each in others]
        for other, settings in self._settings.items():
            if other != cell.id and self._runs.get(other) and (axis := shared_axis(cell.settings, settings)):
                variant = RunAnswers(axis, "other cells of this run", self._runs[other][0].answers)
                found.append(compare(variant, own.answers, judge, reference, same_cell=False))
        return merged_axes(found)

    def _views(self, settings: Settings, pixels: str) -> str:
        return views_digest(self.items, settings, self.source, pixels)

    def _requests(self, settings: Settings) -> list[Request]:
        return [request_of(item, settings, self.source) for item in self.items]

    def _truth(self, settings: Settings, pixels: str) -> Truth | None:
        """The truth of a cell with its noise. Of quantised weights, one from elsewhere is taken by the model's name."""
        if _unobservable_reason(settings) is not None:
            return None
        views, weights = self._views(settings, pixels), self._digests.get(_identity(settings))
        precision = _precision(settings)
        if self.follows:
            found = self._followed(views, settings)
        elif weights is not None:
            found = self._truths.get((weights, views))
        else:
            found = next(
                (t for _, t in self.references if t.views == views and _same_model(t.model, settings)),
                None,
            )
        return found if found is not None and precision in found.noise else None

    def _digest(self, runner: Runner, settings: Settings) -> None:
        """Know the weights that are loaded; those of quantised ones are known by the model's name only."""
        if _identity(settings) not in self._digests and not _is_quantized(settings):
            with suppress(UnsupportedError):
                self._digests[_identity(settings)] = weights_digest(runner.loaded.model)

    def _followed(self, views: str, settings: Settings) -> Truth | None:
        """The truth of these views and weights that another process of this run has found or stored."""
        files = [] if self.directory is None else sorted(self.directory.glob(f"*-{views[:8]}.safetensors"))
        weights = self._digests.get(_identity(settings))
        found = [truth for _, truth in self.references] + [load_truth(file) for file in files]
        fitting = [each for each in found if each.views == views and _same_model(each.model, settings)]
        return next((each for each in fitting if weights in (None, each.weights)), None)

    def _why_missing(self, settings: Settings, pixels: str) -> str:
        if (reason := _unobservable_reason(settings)) is not None:
            return reason
        identity = _identity(settings)
        found = self._missing.get((identity, self._views(settings, pixels))) or self._missing.get((identity, _ANY))
        return found or "no truth was computed"

    def _prepare_one(self, runner: Runner, settings: Settings, weights: str) -> None:
        pixels = runner.pixels(settings)
        views = self._views(settings, pixels)
        started = now()
        truth, source = self._truths.get((weights, views)), "computed"
        if truth is None:
            truth, source = self._found(weights, views, settings)
        plain = eager_settings(settings, pixels, self.steps)
        precision = _precision(settings)
        try:
            if truth is None or precision not in truth.noise:
                with reference_computation(runner.loaded.model):
                    truth = self._computed(runner.loaded, settings, plain, truth, (weights, views))
            self._truths[weights, views] = truth
        except Exception as error:  # without a truth cells are unverified, and measured all the same
            self._missing[_identity(settings), views] = _reason(error, "computing the truth")
            return
        self._record(runner, settings, truth, source, now() - started)

    def _computed(
        self, loaded: Loaded, settings: Settings, plain: Settings, truth: Truth | None, digests: tuple[str, str]
    ) -> Truth:
        """Compute the missing parts of a truth, its noise at the precision of ``settings`` among them, and store it."""
        if truth is None:
            names = *digests, settings.model_name
            truth = compute_truth(loaded, plain, self._requests(settings), names, self.steps, self.say)
            self._truths[digests] = truth  # its noise may not fit into memory
        truth.noise[_precision(settings)] = self._noise(loaded, plain, truth)
        if self.directory is not None:
            save_truth(truth, self.directory / f"{truth.id}.safetensors")
        return truth

    def _found(self, weights: str, views: str, settings: Settings) -> tuple[Truth | None, str]:
        """A truth of an earlier start of this run, or of ``--reference``."""
        there = [(path, truth) for path, truth in self.references if truth.views == views]
        for _, truth in there:
            if truth.weights == weights:
                return truth, "reference"
        for path, truth in there:
            text = f"--reference {path} is of other weights: it was made of {truth.model}, perhaps in another --dtype"
            if len(self._loads) < 2:
                raise RecordsError(text)
            name = f"{settings.model_name} in {_precision(settings)}"
            warnings.warn(f"{text}; the truth of {name} is computed here", PanscanWarning, stacklevel=2)
        if self.directory is not None:
            path = self.directory / f"{weights[:8]}-{views[:8]}.safetensors"
            if path.exists():
                return load_truth(path), "computed"
        return None, "computed"

    def _noise(self, loaded: Loaded, plain: Settings, truth: Truth) -> Noise:
        """The yardstick. In float32 eager attention is the truth itself, and the noise its floor."""
        if loaded.dtype == torch.float32:
            return Noise(
                [[0.0] * len(expected.tokens) for expected in truth.requests],
                0.0 if truth.image_positions else None,
                0.0,
            )
        tally = DivergenceTally()
        requests = self._requests(plain)
        seen = observe_eager(loaded, plain, requests, truth, self.say)
        for expected, observation in zip(truth.requests, seen, strict=True):
            tally.add(loaded, expected.answer, observation.answer, expected.image, observation.image)
        return tally.noise()

    def _compare(self, runner: Runner, settings: Settings, truth: Truth) -> Record:
        requests = self._requests(settings)
        tally, top_logprobs = DivergenceTally(), None
        views = [sum(len(plan.views) for plan in plans_of(item, settings)) for item in self.items]
        todo = calls(views, settings)
        for number, batch in enumerate(todo):
            self.say(f"comparing answers: batch {number + 1} of {len(todo)}")
            forced = [truth.requests[index].forced_tokens(settings.max_new_tokens) for index in batch]
            for index, seen in zip(batch, runner.observe([requests[i] for i in batch], forced), strict=True):
                expected = truth.requests[index]
                top_logprobs = seen.top_logprobs
                pairs = expected.answer[: len(seen.tokens)], seen.answer, expected.image, seen.image
                tally.add(runner.loaded, *pairs, partial=top_logprobs is not None)
        precision = _precision(settings)
        note = {} if top_logprobs is None else {"reason": f"from top {top_logprobs} log-probabilities"}
        return note | tally.verdict(truth.noise[precision], settings.max_new_tokens, float32=precision == "fp32")

    def _record(self, runner: Runner, settings: Settings, truth: Truth, source: str, seconds: float) -> None:
        """Write a truth's line, once, with the comparison of its inputs with those of Transformers' processor."""
        if truth.id in self.recorded:
            return
        self.recorded.add(truth.id)
        origin = next((path for path, each in self.references if each.id == truth.id), None)
        file = origin if origin is not None else Path("truth") / f"{truth.id}.safetensors"
        facts = {"truth": truth.id, "source": source, "file": str(file), "model": truth.model, "seconds": seconds}
        counts = {"requests": len(truth.requests), "tokens": truth.tokens, "image_positions": truth.image_positions}
        chosen = [request_of(item, settings, self.source) for item in _unlike(self.items)]
        try:
            inputs = check_inputs(runner.loaded.reader, chosen)
        except Exception as error:  # an image that is gone meanwhile, an unusual processor: the truth stands
            inputs = {"requests": 0, "views": 0, "difference": None, "note": _reason(error, "comparing inputs")}
        self.write([{"type": "truth", **facts, **counts, "inputs": inputs}])


@dataclass(slots=True)
class _Rows:
    """The reference's hidden states for any cell of a loaded model, which is put into its reference computation when
    the first of them is asked for."""

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
        asked = request_of(item, plain, self.verifier.source)
        return reference_states(self.runner.loaded, plain, asked, list(tokens))


def _unlike(items: Sequence[Item]) -> list[Item]:
    """The items, those first whose images differ in kind: upright, wide, square, several, none."""
    kinds: dict[Any, Item] = {}
    for item in items:
        shapes = tuple((each.width > each.height) - (each.width < each.height) for each in item.documents)
        kinds.setdefault(shapes, item)
    first = sorted(kinds.values(), key=lambda item: -max((len({d.width, d.height}) for d in item.documents), default=0))
    return [*first, *(item for item in items if item not in first)]


def _comparable(settings: Settings) -> bool:
    return settings.sampling.greedy and settings.repetition_penalty in (None, 1)


def _unobservable_reason(settings: Settings) -> str | None:
    """Why nothing of a cell could be compared with a truth; None if it can."""
    if settings.runner == "vllm" and settings.random_weights:
        return _OTHER_WEIGHTS
    return _UNOBSERVABLE.get(settings.runner)


def _identity(settings: Settings) -> _Identity:
    """Return the settings that decide the values of unquantised weights; a local directory by its resolved path."""
    plain = _unquantized(settings)
    return canonical_model(plain.model), plain.revision, plain.random_weights, plain.model_shape, _precision(plain)


@cache
def _is_quantized(settings: Settings) -> bool:
    """Whether the weights are quantised, on load or in their checkpoint."""
    if settings.quantization is not None or settings.random_weights:
        return settings.quantization is not None
    with suppress(PanscanError):  # of a checkpoint that cannot be loaded: loading it says so
        return stored_format(settings.model, settings.revision) is not None
    return False


@cache
def _unquantized(settings: Settings) -> Settings:
    """The settings of the unquantised weights; the same settings if nothing names those of a checkpoint."""
    try:
        return unquantized_settings(settings)
    except PanscanError:
        return settings


def _precision(settings: Settings) -> str:
    """The name of a cell's precision: ``auto`` is resolved."""
    dtype = resolve_dtype(settings.dtype, resolve_device(settings.device))
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _same_model(name: str, settings: Settings) -> bool:
    """Return whether a truth of this model applies to a cell; any truth does if the base model is unknown."""
    plain = _unquantized(settings)
    return same_model(name, plain.model_name) or _is_quantized(plain)


def _one_per_views(cells: Sequence[Cell], views: Callable[[Cell], str]) -> list[Cell]:
    return list({views(cell): cell for cell in reversed(cells)}.values())[::-1]


def _reason(error: Exception, doing: str) -> str:
    text = " ".join(str(error).split())[:200]
    if is_out_of_memory(error):
        hint = "" if doing == "comparing answers" else ": load a reference with --reference"
        return f"out of memory while {doing}{hint}"
    return text if isinstance(error, PanscanError) else f"{type(error).__name__}: {text}"
