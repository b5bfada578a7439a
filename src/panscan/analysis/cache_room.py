"""Whether the KV cache limited the requests of a cell, and what an 8-bit one would hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from statistics import fmean

from panscan.analysis.floors import roofline_of
from panscan.core import SettingError
from panscan.engine.options import EngineOptions
from panscan.plan.gpus import reported_gpu
from panscan.plan.memory import concurrent_requests, memory_plan
from panscan.records.store import Run
from panscan.settings import recorded_settings


def cache_advice(run: Run, cell: str) -> str:
    """Return what an int8 KV cache would change in an engine cell on a GPU, as a sentence without a period.

    Returns:
        Nothing if the cache held all requests that were sent at once, or if that is not known: a cache that is already
        8-bit, another runner, a GPU that :mod:`panscan.plan.gpus` does not know, weights of a checkpoint's format, or
        settings that this version would not run.
    """
    roofline, answered, gpus = roofline_of(run, cell), run.answered(cell), run.header.machine.gpus
    gpu = reported_gpu(gpus[0].name or "", gpus[0].memory_bytes) if gpus else None
    if roofline is None or gpu is None or not answered:
        return ""
    load = run.loads[cell]
    try:
        settings = recorded_settings(run.cells[cell].settings)
        size = settings.tensor_parallel_size
        variant = replace(roofline.variant, weights=settings.quantization, tensor_parallel_size=size)
    except (TypeError, SettingError):  # another version's
        return ""
    if settings.runner != "engine" or settings.kv_cache_dtype != "auto" or not load.device.startswith("cuda"):
        return ""
    if load.weights and settings.quantization is None:
        return ""
    options = EngineOptions.of(settings)
    cached = [request.cached_tokens or 0 for request in answered]  # held once, for another request of the repeat
    prompts = [request.prompt_tokens or 0 for request in answered]
    tokens = ceil(fmean(prompts) - fmean(cached) + fmean(request.output_tokens for request in answered))
    sent = max(Counter((request.replica, request.repeat) for request in answered).values())
    sent = min(sent, settings.max_concurrency or sent)
    held, held_by_int8 = (
        concurrent_requests(memory_plan(choice, gpu, options), choice, tokens, options)
        for choice in (variant, replace(variant, kv_cache_dtype="int8"))
    )
    if not held or min(sent, held_by_int8) <= held:
        return ""
    kind = "uncached tokens" if any(cached) else "tokens"
    return (
        f"the KV cache holds about {held} requests of {tokens:,} {kind} at once, and {sent} were sent: --kv-cache-dtype"
        f" int8 (not exact: docs/quantization.md) holds about {held_by_int8}"
    )
