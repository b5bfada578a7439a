"""Audit of a quantised checkpoint: its contents, and whether its answers are usable.

AWQ folds scales of a matrix into the norm before it. Gemma multiplies by ``1 + w`` for a norm weight ``w``; a tool that
divides ``w`` instead of ``1 + w`` writes a checkpoint that loads but answers garbage. A comparison with the dense
checkpoint detects this: folding must not change the norm factor times the column norm of the matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from panscan.core import BUNDLED, InputError, ModelError
from panscan.linear.quantized import QuantizedLinear, WeightFormat
from panscan.model.checkpoint import Loaded, Placement, checkpoint_files, load_model
from panscan.model.inventory import Inventory, inventory
from panscan.model.machine import resolve_device, resolve_dtype
from panscan.model.quantization import base_model_of
from panscan.quantize.documents import DatasetSample, load_documents
from panscan.quantize.measure import MeasuredWeights, Measurement, Steps, WeightsToMeasure, measure
from panscan.quantize.source import DenseCheckpoint
from panscan.settings import Settings

__all__ = ["Audit", "AuditOptions", "PartSummary", "audit", "garbage_reason"]

_PARTS = ("decoder", "vision", "projector", "embedding", "head", "other")
_NORMED = (("input_layernorm", "self_attn.q_proj"), ("pre_feedforward_layernorm", "mlp.gate_proj"))
_MOVED = 0.1  # relative change of a column's effect that rounding does not explain
_GARBAGE_TOP1 = 0.5
_GARBAGE_SHARE = 0.25  # of the reference's share of correct answers
_LEAST = 0.05  # minimum of the resulting threshold; below it, a few questions would decide
_FEW = 3  # minimum number of answers to judge repetition
_ENOUGH = 10  # minimum number of answers to judge without a reference


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of an audit.

    Args:
        settings: checkpoint (``model``), device, pan and scan, and generation settings.
        base: the dense checkpoint; None: the one that the model card names, if it is on this machine.
        dataset: labelled questions; None: those of the bundled sample documents.
        verify: whether to run the checkpoint.
        num_samples: maximum number of the dataset's questions.
        seed: random seed for sampling them.
    """

    settings: Settings
    base: str | None = None
    dataset: str | None = None
    verify: bool = True
    num_samples: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PartSummary:
    """Tensors of a part of the model: how many, how many of them quantised, their types and bytes."""

    name: str
    tensors: int
    quantized: int
    stored_as: str
    bytes: int


@dataclass(slots=True)
class Audit:
    """Result of an audit.

    Args:
        name: name of the checkpoint.
        format: description of the quantisation format.
        parts: summary of each part of the model.
        remarks: findings, one sentence each.
        measurement: None if the checkpoint was not run.
        garbage: why its answers are garbage, with the likely cause; None if they are not.
        judged: whether its answers could be judged.
    """

    name: str
    format: str
    parts: list[PartSummary]
    remarks: list[str] = field(default_factory=list)
    measurement: Measurement | None = None
    garbage: str | None = None
    judged: bool = False


def audit(options: AuditOptions, on_step: Steps, on_problem: Callable[[InputError], None]) -> Audit:
    """Inspect a quantised checkpoint and judge its answers.

    Args:
        options: validated options.
        on_step: called with a stage, its finished steps and its total steps.
        on_problem: called for each document that cannot be read.

    Raises:
        ModelError: the checkpoint or the base is not available, or they do not fit each other.
        UnsupportedError: the quantisation format is not supported.
    """
    settings = options.settings
    name = settings.model
    stored = inventory(name, settings.revision)
    found = Audit(name, stored.format or "not quantised, or in a format that Transformers loads", _parts(stored))
    found.remarks += [f"{note}." for note in stored.notes]
    if not options.verify:
        return found
    base = _base(options, found)
    folded = _measure(options, base, found, on_step, on_problem)
    assert found.measurement is not None
    rows = found.measurement.rows
    answered = rows[-1].contains is not None and not folded  # answers alone do not clear damaged norms
    found.judged = answered or rows[-1].figures is not None
    if (reason := garbage_reason(rows[-1], None if base is None else rows[0])) is not None:
        found.garbage = f"{reason}. {_cause(folded, stored, base)}"
    return found


def _measure(
    options: AuditOptions,
    base: DenseCheckpoint | None,
    found: Audit,
    on_step: Steps,
    on_problem: Callable[[InputError], None],
) -> list[str]:
    """Run the checkpoint and its base, and add what was measured; return the norms whose scales were moved wrongly."""
    settings, name = options.settings, options.settings.model
    reads_images = "vision_config" in checkpoint_files(name, settings.revision).config
    wanted = DatasetSample(options.dataset, options.num_samples, options.seed)
    workload, source = load_documents(wanted, on_problem, on_step, reads_images=reads_images)
    device = resolve_device(settings.device)
    placement = Placement(device, resolve_dtype("auto", device))
    folded: list[str] = []

    def load() -> Loaded:
        loaded = load_model(name, placement, revision=settings.revision)
        found.remarks += _formats(loaded)
        if base is not None:
            folded.extend(_misfolded(loaded, base, found))
        return loaded

    dense = None if base is None else WeightsToMeasure("dense", lambda: load_model(base.name, placement))
    quantized = WeightsToMeasure(Path(name).name, load, required=True)
    found.measurement = measure(dense, [quantized], settings, workload, source, on_step)
    return folded


def garbage_reason(row: MeasuredWeights, reference: MeasuredWeights | None) -> str | None:
    """Return why a checkpoint's answers are garbage; None if they are not.

    Args:
        row: measurement of the checkpoint.
        reference: measurement of the dense weights; None if they are not available. Ignored if they gave no answer.
    """
    if reference is not None and not reference.answers:
        reference = None
    if row.figures is not None and row.figures.reason is not None and "overflow" in row.figures.reason:
        return f"hidden states overflow: {row.figures.reason}"
    if row.top1 is not None and row.top1 < _GARBAGE_TOP1:
        return f"only {100 * row.top1:.0f}% of the most probable tokens match the dense model"
    usual = reference.contains if reference is not None else None
    if row.contains is not None and usual is not None and row.contains < _GARBAGE_SHARE * usual >= _LEAST:
        return f"{100 * row.contains:.0f}% of the answers are correct; dense model: {100 * usual:.0f}%"
    if (
        row.answers >= _FEW
        and row.repetitive >= _GARBAGE_TOP1
        and (reference is None or reference.repetitive < row.repetitive / 2)
    ):
        return f"{100 * row.repetitive:.0f}% of the answers endlessly repeat a few tokens"
    if reference is None and row.contains == 0.0 and row.answers >= _ENOUGH:
        return f"none of {row.answers} answers is correct"
    return None


def _base(options: AuditOptions, found: Audit) -> DenseCheckpoint | None:
    """Return the dense checkpoint to compare with, if there is one."""
    if options.base is not None:
        return DenseCheckpoint(options.base)
    try:
        named = base_model_of(options.settings.model, options.settings.revision)
        return DenseCheckpoint(_local(named))
    except (ModelError, LocalEntryNotFoundError) as error:
        reason = str(error).removeprefix(f"--model {options.settings.model}: ").partition(";")[0].partition("\n")[0]
        found.remarks.append(f"No reference: {reason}. Pass --model BASE to compare with the dense model.")
        return None


def _local(name: str) -> str:
    """Return the directory of a hub checkpoint in the cache, so that nothing is downloaded; other names unchanged."""
    if name in BUNDLED or Path(name).expanduser().is_dir():
        return name
    return snapshot_download(name, local_files_only=True)


def _parts(stored: Inventory) -> list[PartSummary]:
    found = []
    for part in _PARTS:
        facts = [each for each in stored.tensors if each.part == part]
        if facts:
            types = Counter(each.stored_as for each in facts)
            shown = ", ".join(name for name, _ in types.most_common(3))
            quantized = sum(each.quantized for each in facts)
            found.append(PartSummary(part, len(facts), quantized, shown, sum(each.bytes for each in facts)))
    return found


def _formats(loaded: Loaded) -> list[str]:
    """Return one sentence for each format of the loaded decoder matrices."""
    formats = Counter(each.weight_format for each in loaded.model.modules() if isinstance(each, QuantizedLinear))
    return [f"{count} matrices: {_described(weight_format)}." for weight_format, count in formats.most_common()]


def _described(weight_format: WeightFormat) -> str:
    if weight_format.kind != "int4":
        inputs = "inputs quantised per token" if weight_format.quantizes_inputs else "weights only"
        return f"{weight_format.kind}, 8 bits, one scale per output channel, symmetric, {inputs}"
    zeros = "with zero points" if weight_format.zero_points else "symmetric"
    order = "channels reordered by activation (act-order)" if weight_format.ordered else "channels in original order"
    return f"int4, 4 bits, groups of {weight_format.group_size}, {zeros}, {order}, weights only"


def _misfolded(loaded: Loaded, base: DenseCheckpoint, found: Audit) -> list[str]:
    """Return the norms whose scales were moved wrongly; remark on norms that differ from the base's.

    Raises:
        ModelError: the base is of another shape.
    """
    layers = getattr(loaded.model.model, "language_model", loaded.model.model).layers
    if len(layers) != len(base.layers):
        raise ModelError(
            f"--model {base.name} has {len(base.layers)} layers, {found.name} {len(layers)}: use its base model"
        )
    changed, wrong = 0, []
    for number, layer in enumerate(layers):
        for norm, matrix in _NORMED:
            tensor = base.layers[number][matrix]
            stem = tensor.removesuffix(f"{matrix}.weight")
            ours, dense = layer.get_submodule(norm).weight.float().cpu(), base.read(f"{stem}{norm}.weight").float()
            if ours.shape != dense.shape:
                raise ModelError(f"--model {base.name}: {stem}{norm}.weight has another shape than in {found.name}")
            if torch.allclose(ours, dense, rtol=_MOVED, atol=1e-3):
                continue
            changed += 1
            columns, dense_columns = _columns(layer.get_submodule(matrix)), base.read(tensor).float().norm(dim=0)
            effect = ((1 + ours) * columns) / ((1 + dense) * dense_columns).clamp_min(1e-9)
            if float((effect.abs() - 1).abs().median()) > _MOVED:
                wrong.append(f"{number}.{norm}")
    if changed:
        effect_text = (
            f"in {len(wrong)} of them the matrices do not compensate" if wrong else "the matrices compensate for it"
        )
        found.remarks.append(f"{changed} norms differ from those of {base.name}; {effect_text}.")
    return wrong


def _columns(linear: torch.nn.Module) -> torch.Tensor:
    """Return the norm of each column of a matrix."""
    weight = linear.dequantized() if isinstance(linear, QuantizedLinear) else linear.get_parameter("weight").float()
    norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=0)
    return norms.cpu()


def _cause(folded: list[str], stored: Inventory, base: DenseCheckpoint | None) -> str:
    """Return the likely cause of garbage."""
    fold = "scales were folded into RMSNorm weights w, but Gemma multiplies by 1 + w"
    if folded:
        return f"Likely cause: {fold} (AWQ; {len(folded)} norms, e.g. {folded[0]}): quantise without folding"
    if stored.format is not None and "awq" in stored.format.lower() and base is None:
        return f"Likely cause for AWQ on Gemma: {fold}; --model BASE checks it"
    if stored.quantized("vision") or stored.quantized("projector"):
        return "Likely cause: the vision tower or projector is quantised: leave both in bf16"
    return "Cause unknown: the weights may be damaged, or made for another base model"
