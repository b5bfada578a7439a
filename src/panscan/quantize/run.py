"""``panscan quantize``: from options to a published checkpoint with its measurement and model card."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import panscan
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.core.errors import OnProblem
from panscan.model.checkpoint import Placement, load_model, load_shard_of
from panscan.model.machine import release_memory, resolve_device, resolve_dtype
from panscan.quantize.audit import garbage_reason
from panscan.quantize.calibration import check_prompt_memory
from panscan.quantize.card import model_card
from panscan.quantize.measure import Measurement, WeightsToMeasure, measure
from panscan.quantize.partial import CARD_FILE, PartialCheckpoint, resolved_output
from panscan.quantize.source import DenseCheckpoint
from panscan.quantize.write import CheckpointWriter
from panscan.settings import Settings
from panscan.workload.calibration import (
    CalibrationSource,
    digest_of,
    load_calibration,
    load_documents,
)
from panscan.workload.requests import Item, Source, Workload, plans_of, request_of

_NO_CALIBRATION = CalibrationSource()
_BYTES_PER_TOKEN = 4  # of a question, roughly


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of :func:`quantize_checkpoint`.

    Args:
        settings: checkpoint, device, pan and scan, and generation settings.
        out: directory of the new checkpoint.
        kind: one of :data:`panscan.core.weight_formats.WEIGHT_KINDS`.
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


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished checkpoint.

    Args:
        path: directory of the checkpoint.
        described: format of its decoder matrices in words.
        dense_bytes: size of the dense checkpoint.
        bytes: size of the quantised checkpoint's weights.
        measurement: comparison with the dense model; None with ``verify=False``.
        garbage: why its answers are garbage; None if they are not, or were not measured.
    """

    path: Path
    described: str
    dense_bytes: int
    bytes: int
    measurement: Measurement | None
    garbage: str | None = None


def quantize_checkpoint(options: QuantizeOptions, on_problem: OnProblem) -> Quantized:
    """Write a quantised checkpoint, resuming earlier work of the same job.

    Args:
        options: validated options.
        on_problem: called for each document that cannot be read.

    Raises:
        PanscanError: a document, the checkpoint or the output cannot be used; raised before any long work if possible.
    """
    out = resolved_output(options.out, overwrite=options.overwrite)
    job = _QuantizeJob(options, on_problem)
    with PartialCheckpoint(out, job.identity(), overwrite=options.overwrite) as target:
        job.write(target)
        measurement = job.measured(str(target.path)) if options.verify else None
        sizes = job.source.dense_bytes, sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
        described = job.weight_format.facts.words.format(group_size=job.weight_format.group_size)
        card = model_card(options.settings.model, out.name, described, len(job.prompts), sizes, measurement)
        target.write_bytes(CARD_FILE, card.encode())
        target.publish()
    garbage = None if measurement is None else garbage_reason(measurement.rows[1], measurement.rows[0])
    return Quantized(options.out, described, *sizes, measurement, garbage)


class _QuantizeJob:
    """A dense checkpoint, the format of the new one, and the documents: all that is known before weights are read.

    Args:
        options: validated options.
        on_problem: called for each document that cannot be read.

    Attributes:
        prompts: calibration prompts; empty if weights are rounded.
    """

    @activity("reading the checkpoint")
    def __init__(self, options: QuantizeOptions, on_problem: OnProblem) -> None:
        self._settings, wanted = options.settings, options.calibration
        settings = self._settings
        self._device = resolve_device(settings.device)
        self._dtype = resolve_dtype("auto", self._device)
        self.source = source = DenseCheckpoint(settings.model, settings.revision)
        prompts: list[Item] = []
        held_out: list[Item] = []
        self._origin = Source()
        if wanted.sources:
            if not source.files.reads_images:
                raise SettingError(f"--calibration: {source.name} does not read images; leave out --calibration")
            prompts, held_out, self._origin = load_calibration(wanted, on_problem)
        self._measured_on = Workload(held_out), self._origin
        if options.dataset is not None or (options.verify and not held_out):
            sample = options.dataset, wanted.num_samples, wanted.seed
            self._measured_on = load_documents(*sample, on_problem, reads_images=source.files.reads_images)
        self.weight_format = source.format_of(options.kind, options.group_size)
        self.prompts = prompts if self.weight_format.facts.grouped else []
        lengths = [
            sum(plan.prompt_tokens for plan in plans_of(item, settings)) + len(item.prompt.encode()) // _BYTES_PER_TOKEN
            for item in self.prompts
        ]
        check_prompt_memory(lengths, source.files.config, self._dtype)

    def identity(self) -> dict[str, Any]:
        """Return what decides the contents of the weights' files."""
        calibration = f"{digest_of(self.prompts)} {self._settings.pan_and_scan!r} {self._dtype}"
        return {
            "panscan": panscan.__version__,
            "weights": self.source.fingerprint(),
            "quantization": self.weight_format.kind,
            "group_size": self.weight_format.group_size if self.weight_format.facts.grouped else None,
            "calibration": hashlib.sha256(calibration.encode()).hexdigest()[:16] if self.prompts else None,
        }

    def write(self, target: PartialCheckpoint) -> None:
        """Write all files that loading needs."""
        writer = CheckpointWriter(self.source, self.weight_format, target)
        target.check_space(writer.bytes)
        writer.write_dense()
        if self.prompts:
            requests = [request_of(item, self._settings, self._origin) for item in self.prompts]
            writer.calibrate_layers(requests, self._device, self._settings.revision)
            release_memory()
        else:
            writer.round_layers(self._device)
        writer.finish(calibrated=bool(self.prompts))

    def measured(self, path: str) -> Measurement:
        """Measure the checkpoint against the dense one, and beside round-to-nearest if it is calibrated."""
        settings, kind = self._settings, self.weight_format.kind
        placement = Placement(self._device, self._dtype)
        method = "GPTQ" if self.prompts else "rounded"
        candidates = [WeightsToMeasure(f"{kind} ({method})", lambda: load_model(path, placement))]
        if self.prompts:
            place, rounded = (settings.model, 0, 1, self._dtype, self._device), self.weight_format
            load = partial(load_shard_of, *place, revision=settings.revision, weight_format=rounded)
            candidates.append(WeightsToMeasure(f"{kind} (rounded)", load))
        dense = WeightsToMeasure("dense", lambda: load_model(settings.model, placement, revision=settings.revision))
        return measure(dense, candidates, settings, *self._measured_on)
