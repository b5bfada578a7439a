"""From layouts to advice: which one to run, with which commands, what to watch out for, and what would fit instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from panscan.core.hardware import supports
from panscan.engine.options import EngineOptions
from panscan.plan.gpus import Gpu, all_gpus
from panscan.plan.layouts import GPUS_PER_HOST, Goal, Layout, PlanInputs, find_layouts, kind_reason, layout_of
from panscan.settings import WEIGHT_KINDS

__all__ = [
    "Caution",
    "LayoutAdvice",
    "Rejection",
    "advise",
    "command_words",
    "rejections",
    "warnings_for",
    "what_would_fit",
]

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


def advise(layouts: Iterable[Layout], goal: Goal) -> LayoutAdvice | None:
    """Return the recommendation; None if nothing fits.

    An exact layout is recommended wherever one fits. A quantised one is recommended only if no exact layout is among
    the layouts, because the kinds of weights were restricted or because none fits; it is labelled as not exact.

    Args:
        layouts: layouts as :func:`panscan.plan.layouts.find_layouts` returns them, best first.
        goal: what "best" means.
    """
    asked = list(layouts)
    fitting = [each for each in asked if each.speed is not None]
    if not fitting:
        return None
    exact = next((each for each in fitting if each.exact), None)
    if exact is None:
        return LayoutAdvice(fitting[0], f"not exact: {_why_inexact(asked)}")
    gain = _figure(exact, goal) / _figure(fitting[0], goal)
    rule = "exact: unquantised weights, which give the reference's answers"
    return LayoutAdvice(exact, rule, fitting[0], gain) if gain >= _GAIN else LayoutAdvice(exact, rule)


def _why_inexact(layouts: Sequence[Layout]) -> str:
    """Return why no exact layout is recommended."""
    if any(each.exact for each in layouts):
        return "unquantised weights do not fit"
    if all(each.variant.weights for each in layouts):
        return "--quantization excludes unquantised weights"
    return "--kv-cache-dtype fp8 rounds keys and values"


def command_words(
    verb: str, layout: Layout, model: str, options: EngineOptions, gpu: Gpu, *, reads_images: bool = True
) -> list[str]:
    """Return the words of a ``panscan serve`` or ``panscan batch`` command that runs a layout.

    Args:
        verb: ``serve`` or ``batch``.
        layout: what to run.
        model: value of ``--model``.
        options: sizes; those that differ from the defaults become options.
        gpu: where it runs.
        reads_images: whether the model has a vision tower.
    """
    words = ["panscan", verb]
    if verb == "batch":
        words += ["scans/", "-p", "What is the total?", "-o", "answers.jsonl"]
    words += ["--model", model]
    if layout.replicas > 1:
        words += ["--replicas", str(layout.replicas)]
    if layout.variant.tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(layout.variant.tensor_parallel_size)]
    if layout.variant.weights is not None:
        words += ["--quantization", layout.variant.weights]
    if gpu.capability is None:
        words += ["--device", "cpu"]
    elif reads_images:
        words += ["--preprocess", "device"]
    plain = EngineOptions()
    for item in fields(EngineOptions):
        value = getattr(options, item.name)
        if value != getattr(plain, item.name) and item.name != "preprocess":
            words += [f"--{item.name.replace('_', '-')}", str(value).lower()]
    return words


def rejections(layouts: Iterable[Layout]) -> list[Rejection]:
    """Return why layouts do not fit, those with the same weights and reason as one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for layout in layouts:
        if layout.reason is not None:
            key = layout.variant.weights or layout.variant.dtype, layout.reason
            groups.setdefault(key, []).append(layout.variant.tensor_parallel_size)
    return [Rejection(weights, tuple(sizes), reason) for (weights, reason), sizes in groups.items()]


def warnings_for(inputs: PlanInputs, layouts: Sequence[Layout]) -> list[Caution]:
    """Return warnings about common misconceptions and hardware limits that apply to this setup."""
    gpu, found = inputs.gpu, []
    alone = [each for each in layouts if each.variant.tensor_parallel_size == 1]
    if gpu.capability is not None and inputs.count > 1:
        why = "" if any(each.speed for each in alone) else " (often used for models larger than one GPU)"
        found.append(
            Caution(
                "device_map",
                f'device_map="auto" in Transformers{why} places layers on several GPUs, but only one GPU works at a'
                " time: it adds memory, not speed. Use --tensor-parallel-size or --replicas.",
            )
        )
    if supports("triton", gpu.capability) and "fp8" not in gpu.flops_per_s:
        text = (
            f"{gpu.label} has no fp8 tensor cores. At best, fp8 checkpoints are dequantised to bf16 there, which"
            " saves memory but not compute. Use int8."
        )
        if gpu.assumed or supports("fp8", gpu.capability):
            text = f"{gpu.label}: no fp8 rate given: add fp8=TFLOP/s to --gpu if it has fp8 tensor cores."
        found.append(Caution("fp8", text))
    if supports("flash_attention_2", gpu.capability) and inputs.shape.vision is not None:
        found.append(
            Caution(
                "flash_attention",
                "attn_implementation=flash_attention_2 in Transformers makes image tokens causal: Gemma 3 needs"
                " attention in both directions within an image. panscan's engine does it exactly.",
            )
        )
    if gpu.note:
        found.append(Caution("gpu", f"{gpu.label}: {gpu.note}."))
    biggest = max((each.variant.tensor_parallel_size for each in layouts if each.speed), default=1)
    if biggest > 1 and gpu.link.startswith("PCIe"):
        found.append(
            Caution(
                "link",
                f"{gpu.label} is linked by {gpu.link}: each all-reduce of a tensor-parallel group waits for it."
                " Prefer one GPU per replica where the model fits.",
            )
        )
    return found


def what_would_fit(inputs: PlanInputs) -> list[str]:
    """Return changes, each of which makes the model fit: other weights, more GPUs, or a larger GPU."""
    return [each for each in (_other_weights(inputs), _more_gpus(inputs), _larger_gpu(inputs)) if each is not None]


def _figure(layout: Layout, goal: Goal) -> float:
    """Return what a layout is judged by; smaller is better."""
    assert layout.speed is not None  # it fits
    return layout.speed.e2e.value if goal == "latency" else 1 / layout.speed.requests_per_s.value


def _fits(inputs: PlanInputs) -> list[Layout]:
    return [each for each in find_layouts(inputs) if each.speed is not None]


def _other_weights(inputs: PlanInputs) -> str | None:
    others = tuple(kind for kind in (None, *WEIGHT_KINDS) if kind not in inputs.kinds)
    kinds = [each.variant.weights or "none" for each in _fits(replace(inputs, kinds=others))]
    return f"--quantization {kinds[0]}" if kinds else None


def _more_gpus(inputs: PlanInputs) -> str | None:
    for count in (2, 4, GPUS_PER_HOST):
        if count > inputs.count:
            for kind in inputs.kinds:
                layout = layout_of(replace(inputs, count=count), kind, count)
                if layout is not None and layout.speed is not None:
                    return f"--count {count} (--tensor-parallel-size {count}, {kind or layout.variant.dtype})"
    return None


def _larger_gpu(inputs: PlanInputs) -> str | None:
    found: dict[str, None] = {}  # the smallest GPU for each kind of weights, unquantised ones first
    for kind in inputs.kinds:
        for gpu in sorted(all_gpus().values(), key=lambda each: each.memory_bytes):
            if gpu.capability is None or gpu.name == inputs.gpu.name or kind_reason(kind, gpu) is not None:
                continue
            if _fits(replace(inputs, gpu=gpu, kinds=(kind,), ceilings=None)):
                found[f"--gpu {gpu.name} ({kind or 'bf16'})"] = None
                break
    return " or ".join(list(found)[:2]) or None
