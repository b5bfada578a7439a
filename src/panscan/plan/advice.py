"""What ``panscan plan`` answers: the recommended layout or fleet, its commands, what does not fit, and warnings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from typing import Any

from panscan.core.gpu_features import supports
from panscan.core.groups import grouped
from panscan.engine.options import EngineOptions
from panscan.plan.fleet import Fleet, Traffic, with_replicas
from panscan.plan.gpus import all_gpus
from panscan.plan.layouts import GPUS_PER_HOST, Goal, Layout, PlanInputs, find_layouts, layout_of
from panscan.plan.models import PlannedModel
from panscan.settings import WEIGHT_KINDS

_GAIN = 1.1  # from which a quantised layout is worth mentioning beside an exact one


@dataclass(frozen=True, slots=True)
class LayoutAdvice:
    """The recommended layout.

    Args:
        layout: the layout to run.
        rule: why it is recommended.
        faster: the best quantised layout, if it is better than a recommended exact one by at least 10%.
        gain: how many times better ``faster`` is at the goal; None without it.
    """

    layout: Layout
    rule: str
    faster: Layout | None = None
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """Layouts that do not fit for the same reason: weights, and the GPUs per replica."""

    weights: str
    tensor_parallel_sizes: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Caution:
    """One warning: a short name for scripts, and the text."""

    name: str
    text: str


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
        return [layout for layout in self.layouts if layout.fits]

    @property
    def simulated(self) -> list[Layout]:
        """Layouts that a fleet is chosen from: those with the recommended kinds of weights and KV cache."""
        best = advise(self.layouts, self.inputs.goal)
        kind = None if best is None else best.layout.kind
        return [layout for layout in self.fitting if layout.kind == kind]

    @property
    def advice(self) -> LayoutAdvice | None:
        """The recommendation; with fleets, the one with the fewest GPUs."""
        best = advise(self.layouts, self.inputs.goal)
        if best is None or not self.fleets:
            return best
        return replace(best, layout=with_replicas(self.fleets[0]), faster=None, gain=None)

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
    def verbs(self) -> tuple[str, ...]:
        """Commands that can run the model: batch jobs need documents."""
        return ("serve", "batch") if self.inputs.shape.vision is not None else ("serve",)

    def command(self, verb: str, layout: Layout) -> str:
        """The command line that runs a layout."""
        return shlex.join(command_words(self.inputs, verb, layout, self.model.id))


def advise(layouts: Iterable[Layout], goal: Goal) -> LayoutAdvice | None:
    """Return the recommendation; None if nothing fits.

    An exact layout is recommended wherever one fits. A quantised one is recommended only if no exact layout is among
    the layouts, because the kinds of weights were restricted or because none fits; it is labelled as not exact.

    Args:
        layouts: layouts as :func:`panscan.plan.layouts.find_layouts` returns them, best first.
        goal: what "best" means.
    """
    layouts = list(layouts)
    best = next((layout for layout in layouts if layout.fits), None)
    exact = _best_exact(layouts)
    if best is None:
        return None
    if exact is None:
        why = f"--kv-cache-dtype {best.variant.kv_cache_dtype} rounds keys and values"
        if any(layout.exact for layout in layouts):
            why = "unquantised weights and KV cache do not fit"
        elif best.variant.quantize_head is not None:
            why = "--quantize-head rounds the embedding and output matrix"
        elif best.variant.quantize_vision is not None:
            why = "--quantize-vision rounds the vision tower"
        elif all(layout.variant.weights for layout in layouts):
            why = "--quantization excludes unquantised weights"
        return LayoutAdvice(best, f"no layout is exact, because {why}")
    rule = "unquantised weights and KV cache, which give the reference's answers"
    if goal == "latency":
        gain = exact.speed.e2e.value / best.speed.e2e.value
    else:
        gain = best.speed.requests_per_s.value / exact.speed.requests_per_s.value
    return LayoutAdvice(exact, rule, best, gain) if gain >= _GAIN else LayoutAdvice(exact, rule)


def _best_exact(layouts: Iterable[Layout]) -> Layout | None:
    return next((layout for layout in layouts if layout.fits and layout.exact), None)


def command_words(inputs: PlanInputs, verb: str, layout: Layout, model: str) -> list[str]:
    """Return the words of a ``panscan serve`` or ``panscan batch`` command that runs a layout.

    Args:
        inputs: the plan's; sizes that differ from the defaults become options.
        verb: ``serve`` or ``batch``.
        layout: what to run.
        model: value of ``--model``.
    """
    words = ["panscan", verb]
    if verb == "batch":
        words += ["scans/", "-p", "What is the total?", "-o", "answers.jsonl"]
    variant, on_gpu = layout.variant, inputs.gpu.capability is not None
    values = {
        "model": model,
        "replicas": layout.replicas if layout.replicas > 1 else None,
        "tensor_parallel_size": variant.tensor_parallel_size if variant.tensor_parallel_size > 1 else None,
        "quantization": variant.weights,
        "quantize_head": variant.quantize_head,
        "quantize_vision": variant.quantize_vision,
        "device": None if on_gpu else "cpu",
        "preprocess": "device" if on_gpu and inputs.shape.vision is not None else None,
    }
    default, options = asdict(EngineOptions()), asdict(inputs.options) | {"kv_cache_dtype": variant.kv_cache_dtype}
    others = (name for name in options if options[name] != default[name] and name != "preprocess")
    values |= {name: str(options[name]).lower() for name in others}
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def rejections(layouts: Iterable[Layout]) -> list[Rejection]:
    """Return why layouts do not fit, those with the same weights and reason as one."""
    groups = grouped(
        ((layout.variant.weights_name, layout.reason), layout.variant.tensor_parallel_size)
        for layout in layouts
        if layout.reason is not None
    )
    return [Rejection(weights, tuple(sizes), reason) for (weights, reason), sizes in groups.items()]


def warnings_for(inputs: PlanInputs, layouts: Sequence[Layout]) -> list[Caution]:
    """Return warnings about common misconceptions and hardware limits that apply to this setup."""
    gpu, reads_images = inputs.gpu, inputs.shape.vision is not None
    sizes = {layout.variant.tensor_parallel_size for layout in layouts if layout.fits}
    why = "" if 1 in sizes else " (often used for models larger than one GPU)"
    fp8 = (
        f"{gpu.label} has no fp8 tensor cores. At best, fp8 checkpoints are dequantised to bf16 there, which saves"
        " memory but not compute. Use int8."
    )
    if gpu.assumed or supports("fp8", gpu.capability):
        fp8 = f"{gpu.label}: no fp8 rate given: add fp8=TFLOP/s to --gpu if it has fp8 tensor cores."
    cache = _cache_note(layouts)
    candidates = [
        (bool(cache), "kv_cache", cache),
        (
            gpu.capability is not None and inputs.count > 1,
            "device_map",
            f'device_map="auto" in Transformers{why} places layers on several GPUs, but only one GPU works at a time:'
            " it adds memory, not speed. Use --tensor-parallel-size or --replicas.",
        ),
        (supports("triton", gpu.capability) and "fp8" not in gpu.flops_per_s, "fp8", fp8),
        (
            supports("flash_attention_2", gpu.capability) and reads_images,
            "flash_attention",
            "attn_implementation=flash_attention_2 in Transformers makes image tokens causal: Gemma 3 needs attention"
            " in both directions within an image. panscan's engine does it exactly.",
        ),
        (bool(gpu.note), "gpu", f"{gpu.label}: {gpu.note}."),
        (
            max(sizes, default=1) > 1 and gpu.link.startswith("PCIe"),
            "link",
            f"{gpu.label} is linked by {gpu.link}: each all-reduce of a tensor-parallel group waits for it. Prefer one"
            " GPU per replica where the model fits.",
        ),
    ]
    return [Caution(name, text) for applies, name, text in candidates if applies]


def _cache_note(layouts: Sequence[Layout]) -> str:
    """Return what an int8 KV cache changes in the best exact layout; empty if memory does not limit its requests."""
    exact = _best_exact(layouts)
    for layout in layouts:
        if exact is not None and layout.variant == replace(exact.variant, kv_cache_dtype="int8"):
            return (
                f"The KV cache limits the exact layout to {exact.running} requests at once per replica."
                f" --kv-cache-dtype int8 (not exact: docs/quantization.md) holds {layout.running}."
            )
    return ""


def what_would_fit(inputs: PlanInputs) -> list[str]:
    """Return changes, each of which makes the model fit: an int8 KV cache alone, or other weights, GPUs or counts."""
    changes = []
    eight_bit = replace(inputs.options, kv_cache_dtype="int8")
    if inputs.options.kv_cache_dtype == "fp8" and _best_with(inputs, options=eight_bit):
        return ["--kv-cache-dtype int8"]
    others = tuple(kind for kind in (None, *WEIGHT_KINDS) if kind not in inputs.kinds)
    if best := _best_with(inputs, kinds=others):
        changes.append(f"--quantization {best.variant.weights or 'none'}")
    for count, kind in product((2, 4, GPUS_PER_HOST), inputs.kinds):
        layout = layout_of(replace(inputs, count=count), kind, count) if count > inputs.count else None
        if layout is not None and layout.fits:
            changes.append(f"--count {count} (--tensor-parallel-size {count}, {layout.variant.weights_name})")
            break
    larger = []  # for each kind of weights, unquantised ones first
    others_by_memory = sorted(all_gpus().values(), key=lambda gpu: gpu.memory_bytes)
    gpus = [gpu for gpu in others_by_memory if gpu.capability is not None and gpu.name != inputs.gpu.name]
    for kind in inputs.kinds:
        fitting = (gpu.name for gpu in gpus if _best_with(inputs, gpu=gpu, kinds=(kind,), ceilings=None))
        larger += [f"--gpu {name} ({kind or 'bf16'})" for name in islice(fitting, 1)]
    return [*changes, " or ".join(larger[:2])] if larger else changes


def _best_with(inputs: PlanInputs, **changes: Any) -> Layout | None:
    """Return the best layout with other inputs; None if none fits."""
    best = find_layouts(replace(inputs, **changes))[:1]
    return best[0] if best and best[0].fits else None


def answer_data(answer: PlanAnswer) -> dict[str, Any]:
    """Return everything as plain data, times in milliseconds."""
    inputs, advice = answer.inputs, answer.advice
    data: dict[str, Any] = {
        "model": answer.model.id,
        "gpu": {"name": inputs.gpu.name, "label": inputs.gpu.label, "sources": list(inputs.gpu.sources)},
        "count": inputs.count,
        "within_count": answer.within_limit,
        "goal": inputs.goal,
        "mix": asdict(inputs.mix),
        "recommended": None,
        "layouts": [_layout_data(layout) for layout in answer.fitting],
        "does_not_fit": [asdict(rejection) for rejection in rejections(answer.layouts)],
        "warnings": [asdict(caution) for caution in warnings_for(inputs, answer.layouts)],
        "fleets": [_fleet_data(fleet) for fleet in answer.fleets],
    }
    if advice is not None and not answer.unmet:
        data["recommended"] = {"rule": advice.rule, **_advised_data(answer, advice.layout)}
        if advice.faster is not None:
            data["faster_not_exact"] = {"gain": advice.gain, **_advised_data(answer, advice.faster)}
    return data


def _advised_data(answer: PlanAnswer, layout: Layout) -> dict[str, Any]:
    return {**_layout_data(layout), "commands": {verb: answer.command(verb, layout) for verb in answer.verbs}}


def _layout_data(layout: Layout) -> dict[str, Any]:
    speed, times = layout.speed, ("ttft", "tpot_alone", "tpot_full", "e2e")
    others = ("prefill_bound", "decode_bound", "prefill_share", "basis", "measured")
    return {
        "replicas": layout.replicas,
        **_variant_data(layout),
        "memory": asdict(layout.memory),
        "requests_at_once_per_replica": layout.running,
        "requests_per_s": asdict(speed.requests_per_s),
        **{
            f"{name}_ms": {part: 1e3 * seconds for part, seconds in asdict(getattr(speed, name)).items()}
            for name in times
        },
        **{name: getattr(speed, name) for name in others},
    }


def _fleet_data(fleet: Fleet) -> dict[str, Any]:
    level = asdict(fleet.level)
    level["goodput"]["seconds"] = level.pop("seconds")  # where scripts look for it
    return {
        **_variant_data(fleet.layout),
        "replicas": fleet.replicas,
        "replicas_range": fleet.replicas_range,
        "gpus": fleet.gpus,
        "rate_of_one": fleet.rate_of_one,
        "breaks_at": fleet.breaks_at,
        "level": level,
    }


def _variant_data(layout: Layout) -> dict[str, Any]:
    variant = layout.variant
    return {
        "tensor_parallel_size": variant.tensor_parallel_size,
        "weights": variant.weights or variant.dtype,
        "quantize_head": variant.quantize_head,
        "quantize_vision": variant.quantize_vision,
        "kv_cache_dtype": variant.kv_cache_dtype,
        "exact": layout.exact,
    }
