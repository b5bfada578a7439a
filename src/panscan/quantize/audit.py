"""Audit of a quantised checkpoint: its contents, and whether its answers are usable.

AWQ folds scales of a matrix into the norm before it. Gemma multiplies by ``1 + w`` for a norm weight ``w``; a tool that
divides ``w`` instead of ``1 + w`` writes a checkpoint that loads but answers garbage. A comparison with the dense
checkpoint detects this: folding must not change the norm factor times the column norm of the matrix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from panscan.core import BUNDLED, ModelError
from panscan.core.activity import activity
from panscan.core.errors import OnProblem
from panscan.model.checkpoint import Loaded, Placement, load_model
from panscan.model.files import checkpoint_files
from panscan.model.hub import cached_snapshot
from panscan.model.inventory import Inventory, inventory
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat
from panscan.model.machine import resolve_device, resolve_dtype
from panscan.model.quantization import base_model_of
from panscan.quantize.measure import MeasuredWeights, Measurement, WeightsToMeasure, measure
from panscan.quantize.source import DenseCheckpoint
from panscan.settings import Settings
from panscan.workload.calibration import load_documents

_NORMED = (("input_layernorm", "self_attn.q_proj"), ("pre_feedforward_layernorm", "mlp.gate_proj"))
_MOVED = 0.1  # relative change of a column's effect that rounding does not explain
_GARBAGE_TOP1 = 0.5
_GARBAGE_SHARE = 0.25  # of the reference's share of correct answers
_LEAST = 0.05  # minimum of the resulting threshold; below it, a few questions would decide
_FEW = 3  # minimum number of answers to judge repetition
_ENOUGH = 10  # minimum number of answers to judge without a reference


@dataclass(slots=True)
class Audit:
    """Result of an audit.

    Args:
        name: name of the checkpoint.
        stored: its tensors.
        remarks: findings, one sentence each.
        measurement: None if the checkpoint was not run.
        garbage: why its answers are garbage, with the likely cause; None if they are not.
        judged: whether its answers could be judged.
    """

    name: str
    stored: Inventory
    remarks: list[str] = field(default_factory=list)
    measurement: Measurement | None = None
    garbage: str | None = None
    judged: bool = False


def audit(
    settings: Settings,
    on_problem: OnProblem,
    *,
    base: str | None = None,
    dataset: str | None = None,
    verify: bool = True,
    num_samples: int = 128,
    seed: int = 0,
) -> Audit:
    """Inspect a quantised checkpoint and judge its answers.

    Args:
        settings: checkpoint (``model``), device, pan and scan, and generation settings.
        on_problem: called for each document that cannot be read.
        base: the dense checkpoint; None: the one that the model card names, if it is on this machine.
        dataset: labelled questions; None: those of the bundled sample documents.
        verify: whether to run the checkpoint.
        num_samples: maximum number of the dataset's questions.
        seed: random seed for sampling them.

    Raises:
        ModelError: the checkpoint or the base is not available, or they do not fit each other.
        UnsupportedError: the quantisation format is not supported.
    """
    name = settings.model
    with activity("reading the checkpoint"):
        stored = inventory(name, settings.revision)
    result = Audit(name, stored)
    result.remarks += [f"{note}." for note in stored.notes]
    if not verify:
        return result
    checkpoint = _base_checkpoint(base, settings, result)
    reads_images = checkpoint_files(name, settings.revision).reads_images
    documents = load_documents(dataset, num_samples, seed, on_problem, reads_images=reads_images)
    device = resolve_device(settings.device)
    placement = Placement(device, resolve_dtype("auto", device))
    folded: list[str] = []

    def load() -> Loaded:
        loaded = load_model(name, placement, revision=settings.revision)
        linears = [module for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
        formats = Counter(linear.weight_format for linear in linears)
        result.remarks += [f"{count} matrices: {_format_text(kind)}." for kind, count in formats.most_common()]
        if checkpoint is not None:
            folded.extend(_misfolded(loaded, checkpoint, result))
        return loaded

    dense = None if checkpoint is None else WeightsToMeasure("dense", lambda: load_model(checkpoint.name, placement))
    quantized = WeightsToMeasure(Path(name).name, load, required=True)
    result.measurement = measure(dense, [quantized], settings, *documents)
    *reference, row = result.measurement.rows
    answered = row.contains is not None and not folded  # answers alone do not clear damaged norms
    result.judged = answered or row.figures is not None
    if (reason := garbage_reason(row, *reference)) is not None:
        result.garbage = f"{reason}. {_likely_cause(folded, stored, has_base=checkpoint is not None)}"
    return result


def garbage_reason(row: MeasuredWeights, reference: MeasuredWeights | None = None) -> str | None:
    """Return why a checkpoint's answers are garbage; None if they are not.

    Args:
        row: measurement of the checkpoint.
        reference: measurement of the dense weights; None if they are not available. Ignored if they gave no answer.
    """
    if reference is not None and not reference.answers:
        reference = None
    if row.figures is not None and "overflow" in (problem := row.figures.reason or ""):
        return f"hidden states overflow: {problem}"
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


def _base_checkpoint(base: str | None, settings: Settings, result: Audit) -> DenseCheckpoint | None:
    """Return the dense checkpoint to compare with, if there is one. Only one that the user named is downloaded."""
    if base is not None:
        return DenseCheckpoint(base)
    try:
        named = base_model_of(settings.model, settings.revision)
        is_local = named in BUNDLED or Path(named).expanduser().is_dir()
        return DenseCheckpoint(named if is_local else str(cached_snapshot(named)))
    except ModelError as error:
        reason = str(error).removeprefix(f"--model {settings.model}: ").partition(";")[0].partition("\n")[0]
        result.remarks.append(f"No reference: {reason}. Pass --model BASE to compare with the dense model.")
        return None


def _format_text(weight_format: WeightFormat) -> str:
    grouped, bits = weight_format.facts.grouped, f"{weight_format.facts.bits} bits"
    details = {
        "one scale per output channel": not grouped,
        "weights only": grouped,
        "with zero points": weight_format.zero_points,
        "symmetric": not weight_format.zero_points,
        "channels reordered by activation (act-order)": weight_format.ordered,
        "inputs quantised per token": not grouped and weight_format.quantizes_inputs,
    }
    return ", ".join([str(weight_format), bits, *(text for text, applies in details.items() if applies)])


def _misfolded(loaded: Loaded, base: DenseCheckpoint, result: Audit) -> list[str]:
    """Return the norms whose scales were moved wrongly; remark on norms that differ from the base's.

    Raises:
        ModelError: the base is of another shape.
    """
    layers = loaded.model.get_decoder().layers
    if len(layers) != len(base.layers):
        raise ModelError(
            f"--model {base.name} has {len(base.layers)} layers, {result.name} {len(layers)}: use its base model"
        )
    changed, wrong = 0, []
    for number, layer in enumerate(layers):
        for norm, matrix in _NORMED:
            tensor = base.layers[number][matrix]
            dense_norm = tensor.replace(f"{matrix}.weight", f"{norm}.weight")
            weight, dense = layer.get_submodule(norm).weight.float().cpu(), base.read(dense_norm).float()
            if weight.shape != dense.shape:
                raise ModelError(f"--model {base.name}: {dense_norm} has another shape than in {result.name}")
            if torch.allclose(weight, dense, rtol=_MOVED, atol=1e-3):
                continue
            changed += 1
            linear = layer.get_submodule(matrix)
            stored = linear.dequantized() if isinstance(linear, QuantizedLinear) else linear.weight.float()
            columns, dense_columns = stored.norm(dim=0).cpu(), base.read(tensor).float().norm(dim=0)
            effect = ((1 + weight) * columns) / ((1 + dense) * dense_columns).clamp_min(1e-9)
            if float((effect.abs() - 1).abs().median()) > _MOVED:
                wrong.append(f"{number}.{norm}")
    if changed:
        effect_text = (
            f"in {len(wrong)} of them the matrices do not compensate" if wrong else "the matrices compensate for it"
        )
        result.remarks.append(f"{changed} norms differ from those of {base.name}; {effect_text}.")
    return wrong


def _likely_cause(folded: list[str], stored: Inventory, *, has_base: bool) -> str:
    fold = "scales were folded into RMSNorm weights w, but Gemma multiplies by 1 + w"
    if folded:
        return f"Likely cause: {fold} (AWQ; {len(folded)} norms, e.g. {folded[0]}): quantise without folding"
    if stored.folds_scales and not has_base:
        return f"Likely cause for AWQ on Gemma: {fold}; --model BASE checks it"
    if stored.quantized("vision") or stored.quantized("projector"):
        return "Likely cause: the vision tower or projector is quantised: leave both in bf16"
    return "Cause unknown: the weights may be damaged, or made for another base model"
