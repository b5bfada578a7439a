"""What a sweep will cost, before it runs: views, tokens and a rough time per cell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from panscan.bench.plan import SweepPlan
from panscan.core import SettingError
from panscan.images.views import PUBLISHED_COST
from panscan.model.shapes import SHAPES, Shape, shape_named
from panscan.plan.cost import Variant, pass_work, vision_work
from panscan.settings import ALL_AT_ONCE, Settings
from panscan.workload.requests import plans_of

# Share of a large product's rate that Gemma 3's phases reach in Transformers, and the host's time per layer and decode
# step in generate(): both from generate() runs on one GPU, and no better than a factor of two elsewhere.
_EFFICIENCY = 0.5
_STEP_SECONDS_PER_LAYER = 0.9e-3
_TEXT_TOKENS_PER_CHARACTER = 0.3
_NARROW_PRODUCTS = 2.0  # 8-bit products run at this multiple of the bf16 rate


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cell's expected cost per repeat. ``seconds`` is None for a checkpoint whose shape is unknown."""

    cell: str
    settings: Settings
    batches: int
    views: int
    image_tokens: int
    prompt_tokens: int
    seconds: float | None
    skipped: str | None


def predict(plan: SweepPlan) -> list[Prediction]:
    """Predict every cell of a plan. Measures this machine's product and copy rates once (a fraction of a second)."""
    return [_predict_cell(plan, cell.id, cell.settings, plan.skipped.get(cell.id)) for cell in plan.cells]


def _predict_cell(plan: SweepPlan, cell: str, settings: Settings, skipped: str | None) -> Prediction:
    if skipped is not None:
        return Prediction(cell, settings, 0, 0, 0, 0, None, skipped)
    shape = shape_of(settings)
    cost = PUBLISHED_COST if shape is None else replace(PUBLISHED_COST, image_tokens=shape.image_tokens)
    per_item = [plans_of(item, settings, cost) for item in plan.items]
    views = [sum(len(p.views) for p in plans) for plans in per_item]
    texts = [10 + round(len(item.prompt) * _TEXT_TOKENS_PER_CHARACTER) for item in plan.items]
    tokens = [sum(p.prompt_tokens for p in plans) + text for plans, text in zip(per_item, texts, strict=True)]
    todo = plan.batches(settings)
    # Requests that decode together: a whole batch, or as many as an engine computes at once.
    most = max(map(len, todo), default=1)
    if settings.runner in ALL_AT_ONCE:
        most = min(settings.max_num_seqs, settings.max_concurrency or most)
    together = [call[first : first + most] for call in todo for first in range(0, len(call), most)]
    variant: Variant | None = None
    seconds = None
    with suppress(SettingError):  # the settings do not fit the shape, which loading will refuse
        variant = (
            None
            if shape is None
            else Variant(
                shape,
                settings.quantization,
                settings.quantization_group_size,
                settings.kv_cache_dtype,
                settings.tensor_parallel_size,
                dtype="fp32" if settings.dtype == "fp32" else "bf16",
                quantize_head=settings.quantize_head,
                quantize_vision=settings.quantize_vision,
            )
        )
    if variant is not None:
        counts = [([views[i] for i in batch], [tokens[i] for i in batch]) for batch in together]
        seconds = sum(_batch_seconds(variant, settings, *batch_counts) for batch_counts in counts)
    return Prediction(cell, settings, len(todo), sum(views), sum(views) * cost.image_tokens, sum(tokens), seconds, None)


def shape_of(settings: Settings) -> Shape | None:
    """The shape that settings name."""
    if settings.random_weights:
        return SHAPES[settings.model_shape or "mini"]
    return shape_named(settings.model)


def _batch_seconds(variant: Variant, settings: Settings, views: Sequence[int], tokens: Sequence[int]) -> float:
    """Prefill bound by arithmetic, decode by memory or by the host's time per step, whichever is longer."""
    from panscan.model.ceilings import measure_ceilings
    from panscan.model.machine import resolve_device, resolve_dtype

    device = resolve_device(settings.device)
    ceilings = measure_ceilings(device, resolve_dtype(settings.dtype, device))
    padded = max(tokens)
    lengths = tokens if settings.runner in ALL_AT_ONCE else [padded] * len(tokens)
    processes = 1 if device.type == "cuda" else variant.tensor_parallel_size  # those of a CPU share its rates
    prefill = vision_work(variant, sum(views)) + pass_work(variant, prefill=[(0, length) for length in lengths])
    decode = pass_work(variant, decode_contexts=[padded] * len(tokens))
    read = processes * (decode.weight_bytes + decode.kv_bytes) / ceilings.bytes_per_s
    step = max(read, variant.text.layers * _STEP_SECONDS_PER_LAYER)
    computed = processes * prefill.flops(_NARROW_PRODUCTS, _NARROW_PRODUCTS) / (ceilings.flops_per_s * _EFFICIENCY)
    return computed + settings.max_new_tokens * step
