"""``panscan quantize``: from options to a published checkpoint with its measurement and model card."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import panscan
from panscan.bench.workload import Item, Source, Workload, plans_of, request_of
from panscan.core import InputError, SettingError
from panscan.linear.quantized import WeightFormat
from panscan.model.checkpoint import Loaded, Placement, load_model, load_shard_of
from panscan.model.machine import release_memory, resolve_device, resolve_dtype
from panscan.quantize.audit import garbage_reason
from panscan.quantize.calibration import check_prompt_memory
from panscan.quantize.card import CardFacts, described_format, model_card
from panscan.quantize.documents import CalibrationSource, DatasetSample, digest_of, load_calibration, load_documents
from panscan.quantize.measure import Measurement, Steps, WeightsToMeasure, measure
from panscan.quantize.partial import CARD_FILE, PartialCheckpoint, resolved_output
from panscan.quantize.source import DenseCheckpoint, choose_format
from panscan.quantize.write import CheckpointWriter
from panscan.settings import Settings, check_weight_kind

__all__ = ["QuantizeOptions", "Quantized", "quantize_checkpoint"]

_NO_CALIBRATION = CalibrationSource()
_BYTES_PER_TOKEN = 4  # of a question, roughly


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of :func:`quantize_checkpoint`.

    Args:
        settings: checkpoint, device, pan and scan, and generation settings.
        out: directory of the new checkpoint.
        kind: one of :data:`panscan.settings.WEIGHT_KINDS`.
        group_size: ``int4`` group size; None: the largest supported size that divides every matrix.
        calibration: documents to calibrate ``int4`` on; without sources, weights are rounded to nearest.
        dataset: labelled questions to measure accuracy on; the size of ``calibration``'s sample limits them too.
        verify: whether to measure the result.
        overwrite: replace an existing checkpoint of this command.
    """

    settings: Settings
    out: Path
    kind: str
    group_size: int | None = None
    calibration: CalibrationSource = _NO_CALIBRATION
    dataset: str | None = None
    verify: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_weight_kind(self.kind)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished checkpoint.

    Args:
        path: directory of the checkpoint.
        weight_format: format of its decoder matrices.
        dense_bytes: size of the dense checkpoint.
        bytes: size of the quantised checkpoint's weights.
        measurement: comparison with the dense model; None with ``verify=False``.
        resumed: whether the job resumed earlier work.
        garbage: why its answers are garbage; None if they are not, or were not measured.
    """

    path: Path
    weight_format: WeightFormat
    dense_bytes: int
    bytes: int
    measurement: Measurement | None
    resumed: bool
    garbage: str | None = None

    @property
    def described(self) -> str:
        """The format in words."""
        return described_format(self.weight_format)


@dataclass(frozen=True, slots=True)
class _Documents:
    """Calibration prompts, and what the result is measured on."""

    calibration: list[Item]
    calibration_source: Source
    measured: Workload
    measured_source: Source


def quantize_checkpoint(
    options: QuantizeOptions, on_step: Steps, on_problem: Callable[[InputError], None]
) -> Quantized:
    """Write a quantised checkpoint, resuming earlier work of the same job.

    Args:
        options: validated options.
        on_step: called after each step of a stage.
        on_problem: called for each document that cannot be read.

    Raises:
        PanscanError: a document, the checkpoint or the output cannot be used; raised before any long work if possible.
    """
    out = resolved_output(options.out, overwrite=options.overwrite)
    device = resolve_device(options.settings.device)
    source = DenseCheckpoint(options.settings.model, options.settings.revision)
    documents = _documents(options, source, on_problem, on_step)
    weight_format = choose_format(source, options.kind, options.group_size)
    calibrated = bool(documents.calibration) and weight_format.kind == "int4"
    if calibrated:
        dtype = resolve_dtype("auto", device)
        check_prompt_memory(_lengths(documents.calibration, options.settings), source.files.config, dtype)
    job = _job(source, weight_format, documents, options, calibrated=calibrated)
    with PartialCheckpoint(out, job, overwrite=options.overwrite) as target:
        writer = CheckpointWriter(source, weight_format, target, on_step)
        target.check_space(writer.bytes)
        _write(writer, options, documents, device, calibrated=calibrated)
        found = None
        if options.verify:
            found = _measured(options, weight_format, target.path, documents, on_step, calibrated=calibrated)
        size = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
        prompts = len(documents.calibration) if calibrated else 0
        facts = CardFacts(options.settings.model, out.name, weight_format, prompts)
        target.write_bytes(CARD_FILE, model_card(facts, (source.dense_bytes, size), found).encode())
        resumed = target.resumed
        target.publish()
    garbage = None if found is None else garbage_reason(found.rows[1], found.rows[0])
    return Quantized(options.out, weight_format, source.dense_bytes, size, found, resumed, garbage)


def _write(
    writer: CheckpointWriter,
    options: QuantizeOptions,
    documents: _Documents,
    device: torch.device,
    *,
    calibrated: bool,
) -> None:
    """Write all files that loading needs."""
    writer.write_dense()
    if calibrated:
        asked = [request_of(item, options.settings, documents.calibration_source) for item in documents.calibration]
        writer.calibrate_layers(asked, device, options.settings.revision)
        release_memory()
    else:
        writer.round_layers(device)
    writer.finish(calibrated=calibrated)


def _documents(
    options: QuantizeOptions, source: DenseCheckpoint, on_problem: Callable[[InputError], None], on_step: Steps
) -> _Documents:
    """Read calibration documents and those of the measurement, before any weight is read."""
    calibration: list[Item] = []
    held_out: list[Item] = []
    origin = Source()
    if options.calibration.sources:
        if not source.reads_images:
            raise SettingError(f"--calibration: {source.name} does not read images; leave out --calibration")
        calibration, held_out, origin = load_calibration(options.calibration, on_problem, on_step)
    if options.dataset is None and (held_out or not options.verify):
        return _Documents(calibration, origin, Workload(held_out), origin)
    wanted = DatasetSample(options.dataset, options.calibration.num_samples, options.calibration.seed)
    measured = load_documents(wanted, on_problem, on_step, reads_images=source.reads_images)
    return _Documents(calibration, origin, *measured)


def _lengths(items: list[Item], settings: Settings) -> list[int]:
    """Return the estimated number of tokens of each prompt."""
    return [
        sum(plan.prompt_tokens for plan in plans_of(item, settings)) + len(item.prompt.encode()) // _BYTES_PER_TOKEN
        for item in items
    ]


def _job(
    source: DenseCheckpoint,
    weight_format: WeightFormat,
    documents: _Documents,
    options: QuantizeOptions,
    *,
    calibrated: bool,
) -> dict[str, Any]:
    """Return what decides the contents of the weights' files."""
    job: dict[str, Any] = {
        "panscan": panscan.__version__,
        "weights": source.fingerprint(),
        "quantization": weight_format.kind,
        "group_size": weight_format.group_size if weight_format.kind == "int4" else None,
        "calibration": None,
    }
    if calibrated:
        dtype = resolve_dtype("auto", resolve_device(options.settings.device))
        views = repr(options.settings.pan_and_scan)
        text = f"{digest_of(documents.calibration)} {views} {dtype}"
        job["calibration"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return job


def _measured(
    options: QuantizeOptions,
    weight_format: WeightFormat,
    path: Path,
    documents: _Documents,
    on_step: Steps,
    *,
    calibrated: bool,
) -> Measurement:
    """Measure the checkpoint against the dense one, and beside round-to-nearest if it is calibrated."""
    settings = options.settings
    device = resolve_device(settings.device)
    dtype = resolve_dtype("auto", device)
    placement = Placement(device, dtype)
    method = "GPTQ" if calibrated else "rounded"
    candidates = [WeightsToMeasure(f"{weight_format.kind} ({method})", lambda: load_model(str(path), placement))]
    if calibrated:

        def load_rounded() -> Loaded:
            return load_shard_of(
                settings.model, 0, 1, dtype, device, revision=settings.revision, weight_format=weight_format
            )[0]

        candidates.append(WeightsToMeasure(f"{weight_format.kind} (rounded)", load_rounded))
    dense = WeightsToMeasure("dense", lambda: load_model(settings.model, placement, revision=settings.revision))
    return measure(dense, candidates, settings, documents.measured, documents.measured_source, on_step)
