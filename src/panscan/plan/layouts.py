"""Layouts of a model over GPUs: replicas, tensor parallel size, weights and KV cache; what fits, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Literal

from panscan.core import SettingError
from panscan.core.lru import LruCache
from panscan.engine.options import EngineOptions
from panscan.model.shapes import Shape
from panscan.plan.cost import Variant, pass_work, vision_work
from panscan.plan.efficiency import Clock, Interval
from panscan.plan.gpus import Gpu
from panscan.plan.memory import MemoryPlan, concurrent_requests, memory_plan
from panscan.plan.mix import WorkloadMix
from panscan.plan.simulate import EngineSizes
from panscan.settings import WEIGHT_KINDS

Goal = Literal["throughput", "latency"]
Level = Literal["low", "value", "high"]
GPUS_PER_HOST = 8
"""GPUs of one machine, which is the most that a tensor-parallel group uses."""
_PREPARE_THREADS = 4  # see panscan.engine.worker
_SERVED_SECONDS = 0.015
"""From an HTTP request to the engine: body, base64, image file, processes. With it, the median TTFT of mixed documents
at 3.3 requests/s is 8% too low for w3-27b-panscan and 4% too low for w3-27b-unpaced."""
_LOAD_SHARE = 0.43
"""What remains of a preparation if the pixels of its views are not computed: stage "load" of a request alone in
w1-27b.json over "load" and "preprocess"."""
_SAME_TOKENS = 512  # decode tokens of a pass, whose keys and values are read in microseconds
_MOST_KNOWN = 100_000
_BUSY_PROGRAMS = 3 * 132  # kernel programs that keep an H100 or H200 busy; others of its size are close


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is made for.

    Args:
        shape: the model.
        gpu: the type of GPU, or a CPU.
        count: number of GPUs.
        mix: the requests.
        options: sizes of passes and caches.
        kinds: weights to consider; None stands for unquantised ones.
        quantize_head: quantisation of the embedding and output matrix; None: none.
        quantize_vision: quantisation of the vision tower; None: none.
        goal: what the recommended layout is best at: requests/s, or the time of one request alone.
        ceilings: measured FLOP/s of a large bf16 product and bytes/s of a large copy; None: the data sheet's.
    """

    shape: Shape
    gpu: Gpu
    count: int
    mix: WorkloadMix
    options: EngineOptions
    kinds: tuple[str | None, ...] = (None, *WEIGHT_KINDS)
    quantize_head: str | None = None
    quantize_vision: str | None = None
    goal: Goal = "throughput"
    ceilings: tuple[float, float] | None = None

    def clock(self, variant: Variant) -> Clock:
        """Return the predicted times of a variant."""
        return Clock(self.gpu, variant, ceilings=self.ceilings)


@dataclass(frozen=True, slots=True)
class LayoutSpeed:
    """Predicted times of a layout, each with an interval.

    Args:
        ttft: seconds to the first token of a request that runs alone.
        tpot_alone: seconds per further token of a request that runs alone.
        e2e: seconds of a whole request that runs alone.
        tpot_full: seconds per further token with all places taken.
        requests_per_s: requests per second of all replicas, with all places taken.
        prefill_bound: what limits vision and prefill: compute, bandwidth, link or host.
        decode_bound: what limits decoding.
        prefill_share: share of the time that vision and prefill take with all places taken, 0 to 1.
        basis: where the efficiency factors come from.
        measured: whether the factors were measured on this GPU.
    """

    ttft: Interval
    tpot_alone: Interval
    e2e: Interval
    tpot_full: Interval
    requests_per_s: Interval
    prefill_bound: str
    decode_bound: str
    prefill_share: float
    basis: str
    measured: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of a model, each on one GPU or split over several.

    Args:
        replicas: copies of the model.
        variant: what each GPU runs.
        memory: memory of one GPU.
        running: requests that one replica computes at once.
        predicted: predicted times; None if the layout does not fit.
        reason: why it does not fit; None if it does.
    """

    replicas: int
    variant: Variant
    memory: MemoryPlan
    running: int
    predicted: LayoutSpeed | None
    reason: str | None

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.predicted is not None

    @property
    def speed(self) -> LayoutSpeed:
        """Predicted times of a layout that fits."""
        assert self.predicted is not None
        return self.predicted

    @property
    def gpus(self) -> int:
        """Number of GPUs that the layout uses."""
        return self.replicas * self.variant.tensor_parallel_size

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second and GPU with all places taken."""
        return self.speed.requests_per_s.value / self.gpus

    @property
    def kind(self) -> tuple[str | None, str]:
        """Quantisation of the weights (None: none), and type of the KV cache."""
        return self.variant.weights, self.variant.kv_cache_dtype

    @property
    def exact(self) -> bool:
        """Whether weights and KV cache are unquantised, so that answers are those of the reference."""
        variant = self.variant
        return self.kind == (None, "auto") and variant.quantize_head is None and variant.quantize_vision is None

    def sizes(self, options: EngineOptions, *, prefix_caching: bool, gpu: Gpu) -> EngineSizes:
        """Return the sizes of one replica for a simulation."""
        shape, on_gpu = self.variant.shape, gpu.capability is not None
        view_bytes = shape.image_tokens * shape.text.hidden * self.variant.width
        kv_heads = max(1, shape.text.kv_heads // self.variant.tensor_parallel_size)
        return EngineSizes(
            kv_shape=self.variant.kv_shape(),
            slabs=self.memory.slabs,
            window=shape.text.window,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            vision_slots=max(1, round(options.vision_cache_gb * 1e9) // view_bytes),
            prefix_caching=prefix_caching,
            overlap=on_gpu,
            graphs=on_gpu,
            shared_from=ceil(_BUSY_PROGRAMS / kv_heads) if on_gpu else None,
        )


class ClockTimes:
    """Predicted times of one engine at one end of their intervals, or in their middle.

    Implements :class:`panscan.plan.simulate.PassTimes`.

    Args:
        clock: predicts times.
        level: which part of each interval counts.
        served: whether requests come over HTTP.
    """

    def __init__(self, clock: Clock, level: Level = "value", *, served: bool = True) -> None:
        self._clock, self._served = clock, served
        self._scale = clock.widening ** {"low": -1, "value": 0, "high": 1}[level]
        self._window = clock.variant.text.window
        self._known = LruCache[tuple[object, ...], float](_MOST_KNOWN)

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        """Return the seconds of a pass.

        Passes with the same chunks and about the same number of decode tokens take the same time.
        """
        window = self._window
        seen = sum(decode_contexts) // _SAME_TOKENS
        local = sum(context if context < window else window for context in decode_contexts) // _SAME_TOKENS
        key = len(decode_contexts), seen, local, tuple(prefill), views, graph
        predict = partial(self._clock.pass_seconds, decode_contexts, prefill, views, graph=graph)
        return self._scale * self._known.computed(key, predict)

    def prepare_seconds(self, views: int, known: int = 0) -> float:
        """Return the seconds that a thread needs to prepare a request, of whose views ``known`` are cached."""
        preparing = self._clock.prepare_seconds(views - known) + _LOAD_SHARE * self._clock.prepare_seconds(known)
        return preparing + self._served * _SERVED_SECONDS


def find_layouts(inputs: PlanInputs) -> list[Layout]:
    """Return all layouts: those that fit, best first, then those that do not, in order of their size.

    A tensor-parallel group uses 1, 2, 4 or 8 GPUs (or one CPU), and replicas use as many of the GPUs as they can. Where
    memory limits the requests at once, there is also the layout with an int8 KV cache.
    """
    most = 1 if inputs.gpu.capability is None else min(inputs.count, GPUS_PER_HOST)
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    layouts = (layout for kind in inputs.kinds for size in sizes for layout in _by_cache(inputs, kind, size))

    def rank(layout: Layout) -> tuple[float, int]:
        if not layout.fits:
            return inf, 0
        latency, rate = layout.speed.e2e.value, layout.speed.requests_per_s.value
        return latency if inputs.goal == "latency" else -rate, layout.gpus

    return sorted(layouts, key=rank)


def _by_cache(inputs: PlanInputs, kind: str | None, size: int) -> Iterator[Layout]:
    """Yield a layout with the asked KV cache, and with an int8 one if that is exact and the int8 one holds more."""
    layout, options = layout_of(inputs, kind, size), inputs.options
    if layout is None:
        return
    smaller = None
    if options.kv_cache_dtype == "auto" and layout.running < options.max_num_seqs:
        smaller = layout_of(replace(inputs, options=replace(options, kv_cache_dtype="int8")), kind, size)
    if smaller is None or not smaller.fits or smaller.running <= layout.running:
        yield layout
    else:
        reason = None if layout.fits else f"{layout.reason}; with --kv-cache-dtype int8 it fits"
        yield from (replace(layout, reason=reason), smaller)


def layout_of(inputs: PlanInputs, kind: str | None, size: int) -> Layout | None:
    """Return the layout with these weights and GPUs per replica; None if the model cannot be split like this.

    Args:
        inputs: what the plan is made for.
        kind: quantisation of the weights; None: none.
        size: tensor-parallel size.
    """
    try:
        variant = Variant(
            inputs.shape,
            kind,
            kv_cache_dtype=inputs.options.kv_cache_dtype,
            tensor_parallel_size=size,
            dtype="fp32" if inputs.gpu.capability is None else "bf16",  # the engine's own choices
            quantize_head=inputs.quantize_head,
            quantize_vision=inputs.quantize_vision,
        )
    except SettingError:
        return None
    memory = memory_plan(variant, inputs.gpu, inputs.options)
    replicas = inputs.count // size
    tokens = ceil(inputs.mix.mean_prompt_tokens + inputs.mix.mean_output_tokens)
    running = concurrent_requests(memory, variant, tokens, inputs.options)
    reason = _misfit(inputs, variant, memory)
    speed = None if reason is not None else _speed(inputs, variant, replicas, max(1, running))
    return Layout(replicas, variant, memory, running, speed, reason)


def _misfit(inputs: PlanInputs, variant: Variant, memory: MemoryPlan) -> str | None:
    """Return why a GPU does not support a variant, or does not hold it and one request; None if it does."""
    gpu, options, longest = inputs.gpu, inputs.options, inputs.mix.most_tokens
    if gpu.capability is not None and "bf16" not in gpu.flops_per_s:
        return f"{gpu.name} has no bf16 products, and its other types are not predicted"
    if reason := gpu.refusal(variant.weights, variant.kv_cache_dtype, tower=variant.quantize_vision):
        return reason
    if memory.reason is not None and (options.kv_cache_gb is not None or options.gpu_memory_gb is not None):
        return memory.reason
    per_gpu = "" if variant.tensor_parallel_size == 1 else " per GPU"
    weights, has = f"{memory.weights / 1e9:.1f} GB of weights{per_gpu}", f"{gpu.memory_bytes / 1e9:.1f} GB"
    if not memory.fits:
        needed = (memory.working + memory.graphs + memory.vision_cache) / 1e9
        return f"{weights} and {needed:.1f} GB for passes and the vision cache leave no KV cache in {has}"
    if concurrent_requests(memory, variant, longest, options) < 1:
        return (
            f"{weights} leave a KV cache of {memory.kv_bytes / 1e9:.1f} GB in {has}, which is too little:"
            f" the longest request has {longest:,} tokens"
        )
    return None


def _speed(inputs: PlanInputs, variant: Variant, replicas: int, running: int) -> LayoutSpeed:
    """Return the predicted times of a layout that fits."""
    clock, mix = inputs.clock(variant), inputs.mix
    times = ClockTimes(clock)
    views, tokens, outputs = round(mix.mean_views), ceil(mix.mean_prompt_tokens), mix.mean_output_tokens
    rate, tpot, prefill_share = _steady(times, mix, inputs.options, running)
    preparation, first = times.prepare_seconds(views), _first_token_seconds(times, views, tokens, inputs.options)
    context = ceil(tokens + outputs / 2)
    alone = times.pass_seconds([context], [], 0, graph=True)
    prefill = vision_work(variant, views) + pass_work(variant, prefill=[(0, tokens)])
    preparing = rate * clock.prepare_seconds(views) > _PREPARE_THREADS
    return LayoutSpeed(
        ttft=clock.interval(first, preparation),
        tpot_alone=clock.interval(alone),
        e2e=clock.interval(first + (outputs - 1) * alone, preparation),
        tpot_full=clock.interval(tpot),
        requests_per_s=clock.interval(replicas * rate),
        prefill_bound="host" if preparing else clock.bound(prefill, tokens),
        decode_bound=clock.bound(pass_work(variant, decode_contexts=[context] * running), running),
        prefill_share=prefill_share,
        basis=clock.basis,
        measured=clock.measured,
    )


def _first_token_seconds(times: ClockTimes, views: int, tokens: int, options: EngineOptions) -> float:
    """Return the seconds of the passes up to the first token of a request that runs alone."""
    chunk, seconds, remaining = options.prefill_chunk_size, 0.0, views
    for start in range(0, tokens, chunk):
        end = min(tokens, start + chunk)
        seen = min(remaining, ceil(views * (end - start) / tokens))
        seconds += times.pass_seconds([], [(start, end)], seen, graph=True)
        remaining -= seen
    return seconds


def _steady(times: ClockTimes, mix: WorkloadMix, options: EngineOptions, running: int) -> tuple[float, float, float]:
    """Return the steady state of a replica that always has ``running`` requests in flight: requests per second, seconds
    per output token with passes that prefill included, and the share of the time that vision and prefill take.

    It follows from two kinds of passes: decode rows alone, and decode rows with a prefill chunk. A request is in
    ``outputs`` passes, and ``running`` requests have ``running * prompt / chunk`` passes with prefill among them. If
    that is more than all passes, prefill limits the number of requests that decode.
    """
    prompt, outputs = mix.mean_prompt_tokens, max(1.0, mix.mean_output_tokens)
    chunk = min(float(options.prefill_chunk_size), running * prompt)
    share = min(1.0, running * prompt / (chunk * outputs))  # passes that have a prefill chunk
    decoding = min(running, max(1, round(outputs * chunk / prompt)))
    contexts = [ceil(prompt + outputs / 2)] * decoding
    prompts, rest = divmod(round(chunk), max(1, round(prompt)))
    chunks = [(0, round(prompt))] * prompts + ([(0, rest)] if rest else [])  # of whole prompts, and of another
    mixed = times.pass_seconds(contexts, chunks, 0, graph=True)
    if views := mix.mean_views * chunk / prompt:  # in batches of the next whole number
        batch = max(1, round(views))
        mixed += times.pass_seconds([], [], batch, graph=False) * views / batch
    plain = times.pass_seconds(contexts, [], 0, graph=True)
    seconds = share * mixed + (1 - share) * plain
    rate = decoding / (outputs * seconds) if share < 1 else chunk / prompt / mixed
    return rate, seconds, share * (mixed - plain) / seconds
