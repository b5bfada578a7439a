"""What stands behind a report's figures: models, hardware and versions, the reference. Pure.

Texts may come from outside: each writer cleans and escapes what it writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.core.text import clean, count, number_text
from panscan.records.environment import bundled_weights, has_random_weights
from panscan.records.schema import LoadRecord
from panscan.records.store import Run
from panscan.records.verdict_records import InputCheck, TruthRecord

_WORDS = {
    "panscan": "panscan",
    "commit": "commit",
    "python": "Python",
    "platform": "system",
    "cpu": "CPU",
    "cpu_count": "logical CPUs",
    "torch_threads": "PyTorch threads",
    "memory_bytes": "memory",
    "packages": "packages",
    "bundled": "bundled weights",
    "cuda": "CUDA",
    "gpus": "GPUs",
}

_BYTES = ((2**30, "GiB"), (2**20, "MiB"))
_RATES = ((1e12, "T"), (1e9, "G"))


class RunFacts:
    """What every report says of its run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.run_id, self.created = run.header.run_id, run.header.created
        self.command = clean(shlex.join(run.header.command))
        self.environment = environment(run)


def model_names(run: Run) -> list[str]:
    """The models of a run's cells, each once."""
    names = (
        f"{cell.settings.get('model_shape')} shape, random weights"
        if cell.settings.get("random_weights")
        else cell.settings.get("model", "unknown model")
        for cell in run.cells.values()
    )
    return list(dict.fromkeys(names))


def weights_note(run: Run) -> str:
    """What the answers of random weights and of the demonstration model are worth; empty for other models."""
    bundled = bundled_weights(run)
    if run.cells and has_random_weights(run.cells.values(), bundled):
        return "These weights are random: times are real, answers are noise."
    if "mini" in bundled:
        return "mini is a demonstration model that reads panscan's sample documents: its accuracy is not Gemma 3's."
    return ""


def machine(run: Run) -> str:
    """The hardware in a few words."""
    facts = run.header.machine
    names = [str(gpu.name) for gpu in facts.gpus]
    if names:
        return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return facts.cpu or "unknown hardware"


def environment(run: Run) -> list[tuple[str, str]]:
    """Everything that the run kept of where it took place, as (name, text)."""
    facts = [
        (_WORDS.get(name, name), _environment_text(name, value))
        for name, value in run.header.environment.items()
        if value not in (None, [], {})
    ]
    loads = {id(load): load for load in run.loads.values()}
    return [*facts, *map(_load_text, loads.values())]


def _load_text(load: LoadRecord) -> tuple[str, str]:
    parts = [f"{_with_unit(load.weight_bytes, _BYTES)} of weights, loaded in {number_text(load.seconds)} s"]
    if load.flops_per_s:
        parts.append(f"{_with_unit(load.flops_per_s, _RATES)}FLOP/s in a large product")
    if load.bytes_per_s:
        parts.append(f"{_with_unit(load.bytes_per_s, _RATES)}B/s in a large copy")
    return f"loaded on {load.device}, {load.dtype}", ", ".join(parts)


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits, in the largest unit that the value reaches; else in the smallest."""
    size, unit = next((step for step in units if value >= step[0]), units[-1])
    return f"{number_text(value / size)} {unit}"


def _environment_text(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return _with_unit(value, _BYTES)
    if name in ("packages", "bundled"):
        return ", ".join(f"{package} {version}" for package, version in value.items())
    if name == "gpus":
        return "; ".join(
            f"{gpu.get('name')}, {_with_unit(gpu.get('memory_bytes') or 0, _BYTES)}, driver {gpu.get('driver')}"
            for gpu in value
        )
    return str(value)


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """A reference, and the settings that were compared with it.

    Args:
        truth: the record of the reference.
        settings: names of the compared settings.
        origin: "computed" or "loaded from FILE", with the seconds.
        compared_seconds: time of all comparisons, excluded from all timings as is that of the reference.
        inputs: result of the comparison of its inputs with Transformers' processor; empty if not compared.
    """

    truth: TruthRecord
    settings: tuple[str, ...]
    origin: str
    compared_seconds: float
    inputs: str


def references(run: Run, names: Mapping[str, str]) -> list[ReferenceSummary]:
    """Return the references of a run.

    Args:
        run: the run.
        names: names of the cells by id.
    """
    summaries = []
    for name, truth in run.truths.items():
        compared = [verdict for verdict in run.verdicts.values() if verdict.truth == name]
        computed = truth.source == "computed"
        origin = "computed" if computed else f"loaded from {truth.file} (--reference)"
        summaries.append(
            ReferenceSummary(
                truth,
                tuple(names[verdict.cell] for verdict in compared if verdict.cell in names),
                f"{origin} in {number_text(truth.seconds)} s",
                sum(verdict.seconds for verdict in compared),
                _inputs(truth.inputs),
            )
        )
    return summaries


def _inputs(checked: InputCheck | None) -> str:
    if checked is None:
        return ""
    what = f"{count(checked.requests, 'request')} with {count(checked.views, 'view')}"
    note = f" ({checked.note})" if checked.note else ""
    if checked.difference is not None:
        return f"The inputs are NOT those of Transformers' own processor: {checked.difference}{note}."
    same = "boxes, token ids and pixels are bit-identical"
    return f"The inputs of {what} also went through Transformers' own processor: {same}{note}."
