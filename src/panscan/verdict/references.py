"""The references of a run's cells: supplied, stored by an earlier start, or computed before any cell is measured.

There is one for each combination of weights and views. Cells with quantised weights use that of the unquantised ones,
and those of vLLM, whose weights are in another process, that of Transformers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from panscan.core import (
    PanscanError,
    PanscanWarning,
    RecordsError,
    Request,
    UnsupportedError,
    canonical_model,
    now,
    same_model,
)
from panscan.core.activity import OnProgress
from panscan.core.errors import error_line
from panscan.model.checkpoint import Loaded, load_reader, stored_format
from panscan.model.hub import model_source
from panscan.model.load import load_meta_model_for
from panscan.model.machine import is_out_of_memory, release_memory, resolve_device, resolve_dtype
from panscan.model.quantization import unquantized_settings
from panscan.model.runtime import reference_computation
from panscan.model.untrusted.adapter import ADAPTER_CONFIG, adapter_weights
from panscan.records.store import AnyRecord
from panscan.records.verdict_records import InputCheck, TruthRecord
from panscan.runners.base import processor_rounding
from panscan.settings import Settings
from panscan.verdict.float32 import weights_digest
from panscan.verdict.inputs import check_inputs
from panscan.verdict.reference import (
    Reference,
    answer_states,
    compute_noise,
    compute_reference,
    eager_settings,
    load_reference,
    save_reference,
)
from panscan.verdict.tokens import ReferenceRows, Tokens
from panscan.workload.requests import Item, Source, plans_of, request_of

if TYPE_CHECKING:
    from panscan.runners.base import Runner

_WeightsKey = tuple[Any, ...]
_ANY = ""
"""Stands for all views, in place of their digest."""
_SUPPLY = "use --reference with a reference of the unquantised model in this --dtype"
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(slots=True)
class References:
    """The references of a run.

    Args:
        items: sample of the requests to compare.
        source: source of the items.
        steps: maximum number of reference tokens per request.
        directory: directory for computed references; None to store none.
        files: references given with ``--reference``, with their files.
        write: writes records.
        say: receives progress messages.
        recorded: ids of references that the run's records already contain.
        follows: load references that another process stores in ``directory``, and compute none.
    """

    items: Sequence[Item]
    source: Source
    steps: int
    directory: Path | None
    files: Sequence[tuple[Path, Reference]]
    write: Callable[[Sequence[AnyRecord]], None]
    say: OnProgress
    recorded: set[str] = field(default_factory=set)
    follows: bool = False
    _known: dict[tuple[str, str], Reference] = field(default_factory=dict)
    _weights: dict[_WeightsKey, str] = field(default_factory=dict)
    _missing: dict[tuple[_WeightsKey, str], str] = field(default_factory=dict)
    _loads: set[_WeightsKey] = field(default_factory=set)
    _heads: dict[_WeightsKey, Loaded] = field(default_factory=dict)

    def views(self, settings: Settings, pixels: str) -> str:
        """Return the digest of the sample's inputs in a cell: documents, views, rounding of the pixels, and prompts."""
        source, facts = self.source, []
        for item in self.items:
            boxes = [[view.box for view in plan.views] for plan in plans_of(item, settings)]
            facts.append([item.document_sha256s, boxes, item.prompt_sha256])
        values = [source.template_kwargs] if source.template_kwargs else []  # absent from earlier references
        text = json.dumps([facts, source.system, source.raw_prompt, pixels, *values])
        return sha256(text.encode()).hexdigest()[:16]

    def requests(self, settings: Settings) -> list[Request]:
        """Return the sample as requests of a cell."""
        return [request_of(item, settings, self.source) for item in self.items]

    def check_files(self, cells: Sequence[Settings]) -> None:
        """Check, before any model is loaded, that a ``--reference`` file covers the views of at least one cell.

        Raises:
            RecordsError: no file does.
        """
        if not self.files or not cells:
            return
        self._loads = set(map(_weights_key, cells))
        known = {reference.views for _, reference in self.files}
        if not known & {self.views(settings, pixels) for settings in cells for pixels in ("cpu", "device")}:
            raise RecordsError(
                f"--reference {self.files[0][0]} was computed for other views: use the same documents,"
                " prompts, pan-and-scan settings, --preprocess, --num-prompts, --verify-requests and --seed"
            )

    def prepare(self, runner: Runner, cells: Sequence[Settings]) -> None:
        """Load or compute the references of cells that share the runner's weights, before they are measured.

        Raises:
            RecordsError: the ``--reference`` file was computed from other weights.
        """
        if not _holds_reference(cells[0]) or _unobservable_reason(cells[0]) is not None:
            return  # see prepare_apart
        key = _weights_key(cells[0])
        try:
            weights = self._weights[key] = _digest_of(runner, cells[0])
        except UnsupportedError as error:
            self._missing[key, _ANY] = f"{error}: {_SUPPLY}"
            return
        by_views = {self.views(settings, runner.pixels(settings)): settings for settings in reversed(cells)}
        for views, settings in reversed(by_views.items()):
            self._prepare_views(runner, settings, weights, views)
        release_memory()

    def prepare_apart(self, cells: Sequence[Settings]) -> None:
        """Load or compute the references of cells whose runner will not hold their weights, before it is opened.

        Those are quantised cells, and all of vLLM. Loads the unquantised weights if a reference is missing.
        """
        from panscan.runners.factory import open_runner

        settings = cells[0]
        if _holds_reference(settings) or _unobservable_reason(settings) is not None:
            return
        try:
            plain = _reference_holder(settings, unquantized_settings(settings))
            if all(self.find(cell, _expected_pixels(cell)) for cell in cells):
                return
            self.say(f"loading {plain.model_name} unquantised to compute the reference")
            runner = open_runner(plain)
        except Exception as error:  # the cells are still measured, without a verdict
            self._missing[_weights_key(settings), _ANY] = failure_text(error, "loading the unquantised weights")
            return
        try:
            self.prepare(runner, [_reference_holder(cell, _unquantized(cell)) for cell in cells])
        finally:
            runner.close()

    def find(self, settings: Settings, pixels: str) -> Reference | None:
        """Return the reference of a cell, or None if there is none with noise at its precision.

        If the digest of the weights is unknown (quantised cells), match ``--reference`` files by model name.
        """
        if _unobservable_reason(settings) is not None:
            return None
        views, weights = self.views(settings, pixels), self._weights.get(_weights_key(settings))
        if weights is not None and not self.follows:
            reference = self._known.get((weights, views))
        else:
            candidates = [reference for _, reference in self.files]
            if self.follows and self.directory is not None:  # what another process of this run has stored
                candidates += [load_reference(path) for path in sorted(self.directory.glob(f"*-{views[:8]}.*"))]
            fitting = (candidate for candidate in candidates if candidate.views == views)
            if weights is None:  # a base model that is unknown may be any
                plain = _unquantized(settings)
                fitting = (r for r in fitting if same_model(r.model, plain.model_name) or _is_quantized(plain))
            else:
                fitting = (candidate for candidate in fitting if candidate.weights == weights)
            reference = next(fitting, None)
        return reference if reference is not None and precision_name(settings) in reference.noise else None

    def with_head(self, runner: Runner, settings: Settings) -> Loaded:
        """Return a model with the reference's output matrix: the runner's, or one of that alone if it is quantised."""
        if settings.quantize_head is None:
            return runner.loaded
        key = _weights_key(settings)
        if key not in self._heads:
            self._heads[key] = load_meta_model_for(_unquantized(settings), head=True)
        return self._heads[key]

    def note_weights(self, runner: Runner, settings: Settings) -> None:
        """Store the digest of the loaded weights, unless they are quantised."""
        if _weights_key(settings) not in self._weights and not _is_quantized(settings):
            with suppress(UnsupportedError):
                self._weights[_weights_key(settings)] = _digest_of(runner, settings)

    def why_missing(self, settings: Settings, pixels: str) -> str:
        """Return why :meth:`find` returns no reference."""
        key = _weights_key(settings)
        known = self._missing.get((key, self.views(settings, pixels))) or self._missing.get((key, _ANY))
        return _unobservable_reason(settings) or known or "no reference was computed"

    def record(self, runner: Runner, settings: Settings, reference: Reference, source: str, seconds: float) -> None:
        """Write the record of a reference, once, with the comparison of its inputs with Transformers' processor."""
        if reference.id in self.recorded:
            return
        self.recorded.add(reference.id)
        stored = Path("truth") / f"{reference.id}.safetensors"
        file = next((path for path, known in self.files if known.id == reference.id), stored)
        device = runner.loaded.device if runner.pixels(settings) == "device" else None
        try:
            inputs = check_inputs(runner.loaded.reader, self.requests(settings), device)
        except Exception as error:  # such as a deleted image: the reference remains valid
            inputs = InputCheck(0, 0, None, failure_text(error, "comparing inputs"))
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

    def _prepare_views(self, runner: Runner, settings: Settings, weights: str, views: str) -> None:
        started = now()
        reference, source = self._known.get((weights, views)), "computed"
        if reference is None:
            reference, source = self._stored(weights, views, settings)
        try:
            if reference is None or precision_name(settings) not in reference.noise:
                plain = eager_settings(settings, runner.pixels(settings), self.steps)
                with reference_computation(runner.loaded.model):
                    reference = self._computed(runner.loaded, plain, reference, (weights, views))
            self._known[weights, views] = reference
        except Exception as error:  # the cells are still measured, without a verdict
            self._missing[_weights_key(settings), views] = failure_text(error, "computing the reference")
            return
        self.record(runner, settings, reference, source, now() - started)

    def _stored(self, weights: str, views: str, settings: Settings) -> tuple[Reference | None, str]:
        """Return a reference from ``--reference`` or from an earlier start of this run, and its source.

        Raises:
            RecordsError: the ``--reference`` file was computed from other weights, and the run loads only one model.
        """
        matching = [(path, reference) for path, reference in self.files if reference.views == views]
        for _, reference in matching:
            if reference.weights == weights:
                return reference, "reference"
        for path, reference in matching:
            text = f"--reference {path} was computed from other weights ({reference.model}, possibly another --dtype)"
            if len(self._loads) < 2:
                raise RecordsError(text)
            name = f"{settings.model_name} in {precision_name(settings)}"
            warnings.warn(f"{text}; computing the reference for {name}", PanscanWarning, stacklevel=2)
        if self.directory is not None:
            path = self.directory / f"{weights[:8]}-{views[:8]}.safetensors"
            if path.exists():
                return load_reference(path), "computed"
        return None, "computed"

    def _computed(
        self, loaded: Loaded, plain: Settings, reference: Reference | None, digests: tuple[str, str]
    ) -> Reference:
        """Compute and store a reference, or only its noise at the precision of ``plain`` if that is missing."""
        requests = self.requests(plain)
        if reference is None:
            reference = compute_reference(loaded, plain, requests, (*digests, plain.model_name), self.steps, self.say)
            self._known[digests] = reference  # kept even if computing its noise runs out of memory
        reference.noise[precision_name(plain)] = compute_noise(loaded, plain, requests, reference, self.say)
        if self.directory is not None:
            save_reference(reference, self.directory / f"{reference.id}.safetensors")
        return reference


@dataclass(slots=True)
class ReferenceStates:
    """Hidden states of the reference for the cells of a loaded model.

    The model enters its reference computation when the first hidden states are requested, and leaves it with ``stack``.
    Its runner then releases everything except the model.
    """

    references: References
    everything: Sequence[Item]
    runner: Runner
    stack: ExitStack
    _by_views: dict[str, ReferenceRows] = field(default_factory=dict)
    _entered: bool = False

    def of(self, settings: Settings) -> ReferenceRows:
        """Return the hidden states along answers of a cell."""
        views = self.references.views(settings, self.runner.pixels(settings))
        if views not in self._by_views:
            self._by_views[views] = ReferenceRows(
                lambda request, tokens: self.along(settings, [(request, tokens)], torch.float32)[0]
            )
        return self._by_views[views]

    def along(
        self, settings: Settings, answers: Sequence[tuple[str, Tokens]], dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Return the hidden states before each token of answers, float32 ``[tokens, hidden]``, in eager attention.

        Args:
            settings: settings of a cell.
            answers: request id and tokens of each.
            dtype: precision of the computation; None: the model's own.
        """
        if not self._entered:
            self.runner.drop()
            release_memory()
            self.stack.enter_context(reference_computation(self.runner.loaded.model))
            self._entered = True
        loaded = self.runner.loaded
        plain = eager_settings(settings, self.runner.pixels(settings), self.references.steps)
        items = {item.id: item for item in (*self.everything, *self.references.items)}
        requests = [request_of(items[request], plain, self.references.source) for request, _ in answers]
        return answer_states(loaded, plain, requests, [list(tokens) for _, tokens in answers], dtype or loaded.dtype)


def precision_name(settings: Settings) -> str:
    """Return the name of a cell's precision, with ``auto`` resolved."""
    return _PRECISIONS[resolve_dtype(settings.dtype, resolve_device(settings.device))]


def failure_text(error: Exception, doing: str) -> str:
    """Return an error as a reason in records; out of memory with the activity and, if one helps, a hint."""
    if is_out_of_memory(error):
        hint = "" if doing == "comparing answers" else ": load a reference with --reference"
        return f"out of memory while {doing}{hint}"
    return error_line(error)


def _unobservable_reason(settings: Settings) -> str | None:
    """Return why a cell cannot be compared with a reference; None if it can."""
    if settings.runner == "vllm" and settings.random_weights:
        return "vLLM generates different random weights; use a checkpoint instead"
    return "generate_batch() does not expose its logits" if settings.runner == "generate_batch" else None


def _holds_reference(settings: Settings) -> bool:
    """Return whether a cell's runner holds the weights of its reference: unquantised ones, in this process."""
    return settings.runner != "vllm" and not _is_quantized(settings)


def _reference_holder(settings: Settings, plain: Settings) -> Settings:
    """Return the settings of a runner that holds the weights of a cell's reference: ``plain``, but for vLLM."""
    if settings.runner != "vllm":
        return plain
    return replace(plain, runner="pipeline", vllm_attention=None)  # it rounds pixels as vLLM does, by the processor


def _expected_pixels(settings: Settings) -> str:
    """Return the rounding of a cell's pixels before its runner is opened; see :meth:`Runner.pixels`.

    Raises:
        ModelError: the checkpoint's processor cannot be loaded.
    """
    if settings.runner not in ("pipeline", "vllm"):
        return settings.preprocess
    return processor_rounding(load_reader(settings.model, settings.revision))


def _weights_key(settings: Settings) -> _WeightsKey:
    """Return the settings that determine the unquantised weights; local directories as resolved paths."""
    plain = _unquantized(settings)
    return canonical_model(plain.model), plain.revision, plain.random_weights, plain.model_shape, precision_name(plain)


def _digest_of(runner: Runner, settings: Settings) -> str:
    """Return the digest of the loaded weights and of the files of their adapters.

    An adapter may change only a few rows, which the digest of the weights may not read.

    Raises:
        UnsupportedError: as :func:`panscan.verdict.float32.weights_digest`.
    """
    weights = weights_digest(runner.loaded.model)
    adapters = () if settings.random_weights else model_source(settings.model, settings.revision).adapters
    if not adapters:
        return weights
    digest = sha256(weights.encode())
    for adapter in adapters:
        digest.update((adapter.directory / ADAPTER_CONFIG).read_bytes())
        digest.update(adapter_weights(adapter.directory).read_bytes())
    return digest.hexdigest()[:16]


@cache
def _is_quantized(settings: Settings) -> bool:
    """Return whether the weights are quantised, on load or in their checkpoint."""
    if settings.quantized or settings.random_weights:
        return bool(settings.quantized)
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
