"""Everything that ``panscan plan`` found, and the same as plain data."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from panscan.plan.advice import (
    Caution,
    LayoutAdvice,
    Rejection,
    advise,
    command_words,
    rejections,
    warnings_for,
)
from panscan.plan.fleet import Fleet, Traffic, with_replicas
from panscan.plan.layouts import Layout, PlanInputs
from panscan.plan.models import PlannedModel

__all__ = ["PlanAnswer", "answer_data", "weights_name"]


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Layouts and, with traffic, fleets, best first. ``limit``: number of available GPUs, if known."""

    model: PlannedModel
    inputs: PlanInputs
    layouts: list[Layout]
    limit: int | None
    traffic: Traffic | None = None
    fleets: tuple[Fleet, ...] = ()

    @property
    def fitting(self) -> list[Layout]:
        """Layouts that fit, best first."""
        return [each for each in self.layouts if each.speed is not None]

    @property
    def simulated(self) -> list[Layout]:
        """Layouts that a fleet is chosen from: those with the recommended kind of weights."""
        best = advise(self.layouts, self.inputs.goal)
        kind = None if best is None else best.layout.variant.weights
        return [each for each in self.fitting if each.variant.weights == kind]

    @property
    def advice(self) -> LayoutAdvice | None:
        """The recommendation; with fleets, the one with the fewest GPUs."""
        found = advise(self.layouts, self.inputs.goal)
        if found is None or not self.fleets:
            return found
        return replace(found, layout=with_replicas(self.fleets[0]), faster=None, gain=None)

    @property
    def unmet(self) -> bool:
        """Whether no fleet meets the limits."""
        return bool(self.fleets) and self.fleets[0].replicas is None

    @property
    def within_limit(self) -> bool | None:
        """Whether there are enough GPUs for the best fleet; None without a fleet or a known number of GPUs."""
        needed = self.fleets[0].gpus if self.fleets else None
        return None if needed is None or self.limit is None else needed <= self.limit

    @property
    def rejections(self) -> list[Rejection]:
        """Layouts that do not fit, and why."""
        return rejections(self.layouts)

    @property
    def cautions(self) -> list[Caution]:
        """Warnings that apply."""
        return warnings_for(self.inputs, self.layouts)

    @property
    def verbs(self) -> tuple[str, ...]:
        """Commands that can run the model: batch jobs need documents."""
        return ("serve", "batch") if self.inputs.shape.vision is not None else ("serve",)

    def command(self, verb: str, layout: Layout) -> str:
        """The command line that runs a layout."""
        inputs = self.inputs
        reads = inputs.shape.vision is not None
        words = command_words(verb, layout, self.model.id, inputs.options, inputs.gpu, reads_images=reads)
        return shlex.join(words)


def weights_name(layout: Layout) -> str:
    """Return the data type of a layout's weights."""
    return layout.variant.weights or layout.variant.dtype


def answer_data(found: PlanAnswer) -> dict[str, Any]:
    """Return everything as plain data, times in milliseconds."""
    inputs, advice = found.inputs, found.advice
    data: dict[str, Any] = {
        "model": found.model.id,
        "gpu": {"name": inputs.gpu.name, "label": inputs.gpu.label, "sources": list(inputs.gpu.sources)},
        "count": inputs.count,
        "within_count": found.within_limit,
        "goal": inputs.goal,
        "mix": asdict(inputs.mix),
        "recommended": None,
        "layouts": [_layout_data(each) for each in found.fitting],
        "does_not_fit": [asdict(each) for each in found.rejections],
        "warnings": [asdict(each) for each in found.cautions],
        "fleets": [_fleet_data(each) for each in found.fleets],
    }
    if advice is not None and not found.unmet:
        data["recommended"] = {
            **_layout_data(advice.layout),
            "rule": advice.rule,
            "commands": {verb: found.command(verb, advice.layout) for verb in found.verbs},
        }
        if advice.faster is not None:
            data["faster_not_exact"] = {
                **_layout_data(advice.faster),
                "gain": advice.gain,
                "commands": {verb: found.command(verb, advice.faster) for verb in found.verbs},
            }
    return data


def _layout_data(layout: Layout) -> dict[str, Any]:
    speed, variant = layout.speed, layout.variant
    assert speed is not None  # it fits
    times = ("ttft", "tpot_alone", "tpot_full", "e2e")
    return {
        "replicas": layout.replicas,
        "tensor_parallel_size": variant.tensor_parallel_size,
        "weights": weights_name(layout),
        "exact": layout.exact,
        "memory": asdict(layout.memory),
        "requests_at_once_per_replica": layout.running,
        "requests_per_s": asdict(speed.requests_per_s),
        **{
            f"{name}_ms": {part: 1e3 * seconds for part, seconds in asdict(getattr(speed, name)).items()}
            for name in times
        },
        "prefill_bound": speed.prefill_bound,
        "decode_bound": speed.decode_bound,
        "prefill_share": speed.prefill_share,
        "basis": speed.basis,
        "measured": speed.measured,
    }


def _fleet_data(fleet: Fleet) -> dict[str, Any]:
    return {
        "tensor_parallel_size": fleet.layout.variant.tensor_parallel_size,
        "weights": weights_name(fleet.layout),
        "exact": fleet.layout.exact,
        "replicas": fleet.replicas,
        "replicas_range": list(fleet.replicas_range),
        "gpus": fleet.gpus,
        "rate_of_one": fleet.rate_of_one,
        "breaks_at": fleet.breaks_at,
        "level": asdict(fleet.level),
    }
