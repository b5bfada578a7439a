"""``panscan quantize``: from options to a published checkpoint with its measurement and model card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import panscan
from panscan.bench.workload import DEFAULT_PROMPT, Item, Source, Workload, load_workload, request_of, sample_dataset
from panscan.core import ImageError, InputError, SettingError
from panscan.core.request import MAX_PAGES
from panscan.model.checkpoint import Placement, load_model, load_shard_of
from panscan.model.machine import release_memory, resolve_device, resolve_dtype
from panscan.model.quantized.weights import KINDS, WeightFormat
from panscan.quantize.card import CardFacts, described_format, model_card
from panscan.quantize.measure import Candidate, Measurement, measure
from panscan.quantize.partial import PartialCheckpoint
from panscan.quantize.source import DenseCheckpoint, weight_format
from panscan.quantize.write import CheckpointWriter, Steps
from panscan.settings import Settings, nearest

__all__ = ["QuantizeOptions", "Quantized", "load_documents", "quantize_checkpoint"]

_HELD_OUT = 5  # one of so many calibration documents is kept for the measurement
_MOST_HELD_OUT = 8
_DATASETS = (".jsonl", ".json", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to quantise, and how.

    Args:
        settings: checkpoint, device, pan and scan, and how answers are generated.
        out: the new checkpoint's directory.
        kind: one of :data:`panscan.model.quantized.weights.KINDS`.
        group_size: of ``int4``; None: the largest usual one that divides every matrix.
        calibration: directories, globs and files of documents, or one dataset; empty: round to nearest.
        prompts: questions about the calibration documents.
        num_samples: calibration prompts at most.
        seed: of the draw of calibration prompts.
        dataset: labelled questions to measure accuracy on.
        max_pages: of one document.
        verify: whether to measure the result.
        overwrite: replace an existing checkpoint of this command.
    """

    settings: Settings
    out: Path
    kind: str
    group_size: int | None = None
    calibration: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    num_samples: int = 128
    seed: int = 0
    dataset: str | None = None
    max_pages: int = MAX_PAGES
    verify: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(f"--quantization takes {', '.join(KINDS)}; got {self.kind!r}{nearest(self.kind, KINDS)}")
        if self.prompts and not self.calibration:
            raise SettingError("--prompt asks about --calibration documents, which are missing")
        if any(not prompt.strip() for prompt in self.prompts):
            raise SettingError("--prompt is empty: give a question")


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished checkpoint.

    Args:
        path: its directory.
        how: format of its decoder matrices.
        dense_bytes: of the checkpoint that it was made from.
        bytes: of its weights.
        measurement: None with ``verify=False``.
        resumed: whether earlier work was continued.
    """

    path: Path
    how: WeightFormat
    dense_bytes: int
    bytes: int
    measurement: Measurement | None
    resumed: bool

    @property
    def described(self) -> str:
        """The format in words."""
        return described_format(self.how)


@dataclass(frozen=True, slots=True)
class _Documents:
    """Calibration prompts, and what the result is measured on."""

    calibration: list[Item]
    calibration_source: Source
    measured: Workload
    measured_source: Source


def quantize_checkpoint(
    options: QuantizeOptions, on_step: Steps, say: Callable[[str], None], on_problem: Callable[[InputError], None]
) -> Quantized:
    """Write a quantised checkpoint, continuing earlier work of the same job.

    Args:
        options: checked.
        on_step: called after each step of a stage.
        say: called with what is done next.
        on_problem: called for each document that cannot be read.

    Raises:
        PanscanError: a document, the checkpoint or the output cannot be used; before hours of work where possible.
    """
    device = resolve_device(options.settings.device)
    documents = _documents(options, on_problem)
    source = DenseCheckpoint(options.settings.model, options.settings.revision)
    how = weight_format(source, options.kind, options.group_size)
    calibrated = bool(documents.calibration) and how.kind == "int4"
    job = _job(source, how, documents, options, calibrated=calibrated)
    with PartialCheckpoint(options.out, job, overwrite=options.overwrite) as target:
        writer = CheckpointWriter(source, how, target, on_step)
        writer.write_dense()
        if calibrated:
            asked = [request_of(item, options.settings, documents.calibration_source) for item in documents.calibration]
            writer.calibrate_layers(asked, device, options.settings.revision)
            release_memory()
        else:
            writer.round_layers()
        writer.finish(calibrated=calibrated)
        found = None
        if options.verify:
            found = _measured(options, how, target.path, documents, say, calibrated=calibrated)
        size = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
        facts = CardFacts(options.settings.model, options.out.name, how, len(documents.calibration) if calibrated else 0)
        target.write_bytes("README.md", model_card(facts, (source.dense_bytes, size), found).encode())
        resumed = target.resumed
        target.publish()
    return Quantized(options.out, how, source.dense_bytes, size, found, resumed)


def load_documents(
    dataset: str | None, on_problem: Callable[[InputError], None], *, num_samples: int | None = None
) -> tuple[Workload, Source]:
    """Return labelled questions of a dataset, by default those of the bundled sample documents."""
    source = Source(dataset=dataset or str(sample_dataset()), num_samples=num_samples)
    return load_workload(source, on_problem=on_problem), source


def _documents(options: QuantizeOptions, on_problem: Callable[[InputError], None]) -> _Documents:
    """Read calibration documents and those of the measurement, before any weight is."""
    items: list[Item] = []
    source = Source()
    if options.calibration:
        items, source = _calibration(options, on_problem)
    if options.dataset is not None or not options.verify:
        measured, measured_source = (
            load_documents(options.dataset, on_problem) if options.dataset else (Workload([]), source)
        )
        return _Documents(items[: options.num_samples], source, measured, measured_source)
    kept, held_out = _split(items)
    if held_out:
        return _Documents(kept[: options.num_samples], source, Workload(held_out), source)
    measured, measured_source = load_documents(None, on_problem)
    return _Documents(kept[: options.num_samples], source, measured, measured_source)


def _calibration(options: QuantizeOptions, on_problem: Callable[[InputError], None]) -> tuple[list[Item], Source]:
    first, *others = options.prompts or (DEFAULT_PROMPT,)
    only = options.calibration[0]
    if len(options.calibration) == 1 and only.endswith(_DATASETS):
        if options.prompts:
            raise SettingError(f"--calibration {only} has its own questions: leave --prompt out")
        source = Source(dataset=only, max_pages=options.max_pages)
    else:
        source = Source(images=options.calibration, prompt=first, max_pages=options.max_pages)
    try:
        items = load_workload(source, on_problem=on_problem).items
    except ImageError as error:
        names = " ".join(options.calibration)
        raise ImageError(f"--calibration {names}: no usable document: {error}") from error
    for prompt in others:
        items += [replace(item, id=f"{item.id}.{prompt[:20]}", prompt=prompt) for item in items[: len(items)]]
    wanted = options.num_samples * _HELD_OUT // (_HELD_OUT - 1) + 1
    return _drawn(items, wanted, options.seed), source


def _drawn(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Return a draw of documents that depends on their contents and the seed, not on their order."""
    key = {item.id: hashlib.sha256(f"{seed} {_digest([item])}".encode()).digest() for item in items}
    return sorted(items, key=lambda item: key[item.id])[:count]


def _split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Return calibration prompts, and prompts about other documents for the measurement."""
    documents = list(dict.fromkeys(item.documents for item in items))
    count = min(len(documents) // _HELD_OUT, _MOST_HELD_OUT)
    held_out = set(documents[len(documents) - count :])
    return [item for item in items if item.documents not in held_out], [
        item for item in items if item.documents in held_out
    ]


def _job(
    source: DenseCheckpoint, how: WeightFormat, documents: _Documents, options: QuantizeOptions, *, calibrated: bool
) -> dict[str, Any]:
    """Return what decides the contents of the weights' files."""
    job: dict[str, Any] = {
        "panscan": panscan.__version__,
        "weights": source.fingerprint(),
        "quantization": how.kind,
        "group_size": how.group_size if how.kind == "int4" else None,
        "calibration": None,
    }
    if calibrated:
        dtype = resolve_dtype("auto", resolve_device(options.settings.device))
        views = repr(options.settings.pan_and_scan)
        text = f"{_digest(documents.calibration)} {views} {dtype}"
        job["calibration"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return job


def _digest(items: Sequence[Item]) -> str:
    facts = [[[document.sha256 for document in item.documents], item.prompt_sha256] for item in items]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _measured(
    options: QuantizeOptions, how: WeightFormat, path: Path, documents: _Documents, say: Callable[[str], None],
    *, calibrated: bool,
) -> Measurement:  # fmt: skip
    """Measure the checkpoint against the dense one, and beside round-to-nearest if it is calibrated."""
    settings = options.settings
    device = resolve_device(settings.device)
    dtype = resolve_dtype("auto", device)
    placement = Placement(device, dtype)
    method = "GPTQ" if calibrated else "round to nearest"
    candidates = [Candidate(f"{how.kind}, {method}", lambda: load_model(str(path), placement))]
    if calibrated:
        plain = lambda: load_shard_of(settings.model, 0, 1, dtype, device, revision=settings.revision, how=how)[0]  # noqa: E731 - one use
        candidates.append(Candidate(f"{how.kind}, round to nearest", plain))
    dense = Candidate("dense", lambda: load_model(settings.model, placement, revision=settings.revision))
    return measure(dense, candidates, settings, documents.measured, documents.measured_source, say)
