"""Measurements of committed records that `panscan plan` predicts: what was measured, and what the plan says.

Records of :mod:`benchmarks.phases`, :mod:`benchmarks.workloads.w1` and :mod:`benchmarks.workloads.quantized`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from pathlib import Path
from statistics import median
from typing import Any

from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.graph_sizes import decode_sizes
from panscan.model.shapes import SHAPES
from panscan.plan.cost import Variant
from panscan.plan.efficiency import Clock, Efficiency
from panscan.plan.gpus import gpu_named
from panscan.plan.memory import memory_plan
from panscan.plan.mix import PageShare, WorkloadMix
from panscan.plan.simulate import EngineSizes, SimulatedEngine, route_arrivals

RECORDS = Path(__file__).parent / "records"
GPU = "h200"
_ON_H200 = (
    "w1-27b.json",
    "w1-27b-fp8.json",
    "w1-27b-int8.json",
    "w1-27b-int4.json",
    "w1-27b-int4-24gb-head.json",
    "w1-27b-int4-24gb-head-int8kv.json",
    "w1-27b-int8-40gb-head.json",
    "w1-27b-int8-40gb-head-int8kv.json",
    "w1-27b-tp2.json",
    "w1-27b-tp2-40gb.json",
    "w1-27b-fp8-tp2.json",
    "w1-27b-bf16-tp2-40gb-int8kv.json",
    "w1-27b-int8-tp2-40gb-head.json",
    "w1-27b-int8-tp2-40gb-head-int8kv.json",
    "w4-4b.json",
)
_LONG_GRAPHS = (
    "w1-27b-bf16-tp2-40gb-h100.json",
    "w1-27b-int8-tp2-40gb-head-int8kv-h100.json",
    "w1-27b-int8-40gb-head.json",
    "w1-27b-int8-40gb-head-int8kv.json",
    "w1-27b-int4-24gb-head.json",
    "w1-27b-int4-24gb-head-int8kv.json",
    "w1-27b-tp2-40gb.json",
    "w1-27b-bf16-tp2-40gb-int8kv.json",
    "w1-27b-int8-tp2-40gb-head.json",
    "w1-27b-int8-tp2-40gb-head-int8kv.json",
    "w1-27b-tp4-h200.json",
    "w1-27b-tp4-fp8-h200.json",
)
"""Records since tensor parallel replays prefill passes from CUDA graphs."""
_ANOTHER_GPU = "h100"
_MANY_GPUS = (_ANOTHER_GPU, GPU)
_ON_ANOTHER_GPU = (
    "w1-27b-h100.json",
    "w1-27b-int8-40gb-h100.json",
    "w1-27b-int8-fp8kv-40gb-h100.json",
    "w1-27b-tp2-40gb-h100.json",
    "w1-27b-int8-tp2-40gb-h100.json",
    "w1-27b-int8-fp8kv-tp2-40gb-h100.json",
    "w1-27b-bf16-80gb-h100.json",
    "w1-27b-bf16-80gb-int8kv-h100.json",
    "w1-27b-int8-40gb-head-h100.json",
    "w1-27b-int8-40gb-head-int8kv-h100.json",
    "w1-27b-bf16-tp2-40gb-int8kv-h100.json",
    "w1-27b-int8-tp2-40gb-head-h100.json",
    "w1-27b-bf16-tp2-40gb-h100.json",
    "w1-27b-int8-tp2-40gb-head-int8kv-h100.json",
)
FITTED = (
    "27b:bf16:1",
    "27b:fp8:1",
    "27b:int8:1",
    "27b:int4:1",
    "4b:bf16:1",
    "4b:int4:1",
    "27b:bf16:2",
    "27b:fp8:2",
    "4b:bf16:2",
)
"""Configurations whose vision, prefill and decode times in :data:`_FITTED_RECORD` the factors are fitted to."""
_FITTED_RECORD = "phases-h200.json"  # other phase records repeat its configurations on other days: held out
_GRAPHS = (
    *((rows, 0) for rows in decode_sizes(128)),
    *((rows, short) for rows in (0, 16, 64, 128) for short in (32, 64, 128, 256, 512) if not rows or short > 32),
)
"""Sizes of CUDA graphs when the older records were made; the engine has more of them since."""
PHASES = ("vision", "prefill", "decode", "mixed", "prepare", "TTFT", "W1")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement.

    Args:
        record: file name.
        configuration: SHAPE:KIND:RANKS.
        phase: one of ``PHASES``.
        size: views, prompt tokens, requests that decode, or requests in all.
        measured: seconds; of W1, requests per second.
        fitted: whether the factors are fitted to it; the others are held out.
        variant: what ran.
        predict: returns the prediction of a clock.
        gpu: name of the GPU in the plan's table.
    """

    record: str
    configuration: str
    phase: str
    size: int
    measured: float
    fitted: bool
    variant: Variant
    predict: Callable[[Clock], float]
    gpu: str = GPU

    @property
    def split(self) -> bool:
        """Whether several GPUs share the model."""
        return self.variant.tensor_parallel_size > 1

    def predicted(self, efficiency: Efficiency | None = None) -> float:
        """Return the prediction with these factors; None: the committed ones."""
        graphs = None if self.record in _LONG_GRAPHS else _GRAPHS
        return self.predict(Clock(gpu_named(self.gpu), self.variant, efficiency=efficiency, graphs=graphs))


@dataclass(frozen=True, slots=True)
class _W1:
    """The requests of a record, all of one size. Methods predict; their last argument is the clock."""

    views: int
    prompt_tokens: int
    output_tokens: int

    def prepare(self, clock: Clock) -> float:
        return clock.prepare_seconds(self.views)

    def ttft(self, clock: Clock) -> float:
        return self.prepare(clock) + clock.pass_seconds((), [(0, self.prompt_tokens)], self.views)

    def decode(self, requests: int, output_tokens: int, clock: Clock) -> float:
        """Return the step in the middle of the answers, when all requests decode."""
        return clock.pass_seconds([self.prompt_tokens + output_tokens // 2] * requests)

    def mixed(self, requests: int, prompts: float, clock: Clock) -> float:
        """Return a pass that decodes requests and computes prompts with their views; means may be fractions."""
        tokens, views = round(prompts * self.prompt_tokens), prompts * self.views
        chunks = [(0, self.prompt_tokens), (0, tokens - self.prompt_tokens)]
        context = self.prompt_tokens + self.output_tokens // 4
        low = floor(views)
        first, second = (clock.pass_seconds([context] * requests, chunks, count) for count in (low, low + 1))
        return first + (views - low) * (second - first)

    def rate(self, requests: int, options: EngineOptions, clock: Clock) -> float:
        """Return the requests per second of a simulated engine that gets all requests at once."""
        variant = clock.variant
        tokens = (self.output_tokens, self.output_tokens)
        mix = WorkloadMix((PageShare(self.views, 1.0),), 0, tokens)
        mix = replace(mix, text_tokens=self.prompt_tokens - mix.prompt_tokens(self.views))
        memory = memory_plan(variant, clock.gpu, options)
        sizes = EngineSizes(
            kv_shape=variant.kv_shape(),
            slabs=memory.slabs,
            window=variant.text.window,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            prefix_caching=False,
        )
        engine = SimulatedEngine(sizes, _Times(clock))
        simulated = route_arrivals([engine], mix.requests(requests), [0.0] * requests)
        return requests / max(request.tokens[-1] for request in simulated)


_WORKLOAD = _W1(views=4, prompt_tokens=1102, output_tokens=128)


def _vision(views: int, clock: Clock) -> float:
    return clock.vision_seconds(views)


def _prefill(tokens: int, views: int, clock: Clock) -> float:
    """Return the time from the encoded views to the end of the pass, which the host launches meanwhile."""
    return clock.pass_seconds((), [(0, tokens)], views) - clock.vision_seconds(views)


@dataclass(frozen=True, slots=True)
class _Times:
    """A clock's values, as the simulation takes them."""

    clock: Clock

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        return self.clock.pass_seconds(decode_contexts, prefill, views, graph=graph)

    def prepare_seconds(self, views: int, known: int) -> float:
        return self.clock.prepare_seconds(views)  # no view is known: W1 asks about distinct pages


def points(folder: Path = RECORDS) -> list[Point]:
    """Return all points of the records in a folder, in a fixed order."""
    measurements: list[Point] = []
    for path in sorted(folder.glob("phases-*.json")):
        record = json.loads(path.read_bytes())
        for name, part in record["configurations"].items():
            if "w1" in part:
                measurements += _phases(path.name, name, part)
    for name in _ON_H200:
        if (folder / name).exists():
            measurements += _older(name, json.loads((folder / name).read_bytes()))
    return measurements


def points_of_another_gpu(folder: Path = RECORDS) -> list[Point]:
    """Return the points of W1 records of an H100, which the factors know nothing of; also of four GPUs and replicas."""
    names = [(name, _ANOTHER_GPU) for name in _ON_ANOTHER_GPU]
    names += [(path.name, gpu) for gpu in _MANY_GPUS for path in sorted(folder.glob(f"w1-27b-tp4*-{gpu}.json"))]
    measurements = [
        point for name, gpu in names for point in _older(name, json.loads((folder / name).read_bytes()), gpu)
    ]
    paths = [path for gpu in _MANY_GPUS for path in sorted(folder.glob(f"serve-27b-*x*-{gpu}.json"))]
    return measurements + [point for path in paths for point in replica_points(path.name, folder)]


def read_ceilings(folder: Path = RECORDS) -> tuple[float, float]:
    """Return the medians of the FLOP/s and bytes/s that the records measured."""
    measured = []
    for path in sorted(folder.glob("phases-*.json")):
        parts = json.loads(path.read_bytes())["configurations"].values()
        measured += [part["ceilings"] for part in parts if "ceilings" in part]
    measured += [json.loads((folder / name).read_bytes())["ceilings"] for name in _ON_H200 if (folder / name).exists()]
    flops, bandwidth = (median(ceilings[name] for ceilings in measured) for name in ("flops_per_s", "bytes_per_s"))
    return flops, bandwidth


@dataclass(frozen=True, slots=True)
class _Source:
    """The record and the engine that points come from; its methods create the points.

    Args:
        record: file name.
        configuration: SHAPE:KIND:RANKS.
        fitted: whether the factors are fitted to some of its points.
        gpu: name of the GPU in the plan's table.
        kv_cache_dtype: of the engine.
        quantize_head: quantisation of the output matrix; None: none.
        quantize_vision: quantisation of the vision tower; None: none.
    """

    record: str
    configuration: str
    fitted: bool
    gpu: str = GPU
    kv_cache_dtype: str = "auto"
    quantize_head: str | None = None
    quantize_vision: str | None = None

    @classmethod
    def of(cls, record: str, settings: Mapping[str, Any], gpu: str) -> _Source:
        """Return the source of a record of one engine, from its settings; the factors are not fitted to it."""
        kind, ranks = settings.get("quantization") or "bf16", settings.get("tensor_parallel_size", 1)
        configuration = f"{settings['model_shape']}:{kind}:{ranks}"
        cache, head = settings.get("kv_cache_dtype", "auto"), settings.get("quantize_head")
        return cls(record, configuration, False, gpu, cache, head, settings.get("quantize_vision"))

    def point(
        self, phase: str, size: int, measured: float, predict: Callable[[Clock], float], *, fitted: bool = False
    ) -> Point:
        shape, kind, ranks = self.configuration.split(":")
        variant = Variant(
            SHAPES[shape],
            None if kind == "bf16" else kind,
            kv_cache_dtype=self.kv_cache_dtype,
            quantize_head=self.quantize_head,
            quantize_vision=self.quantize_vision,
            tensor_parallel_size=int(ranks),
        )
        return Point(
            self.record, self.configuration, phase, size, measured, self.fitted and fitted, variant, predict, self.gpu
        )

    def alone(self, workload: _W1, alone: Mapping[str, Any]) -> Iterator[Point]:
        """Yield the points of a request alone."""
        stages = {name: stage["median"] / 1e3 for name, stage in alone["stages_ms"].items()}
        prepare, tokens = stages["load"] + stages["preprocess"], workload.prompt_tokens
        yield self.point("prepare", workload.views, prepare, workload.prepare, fitted=True)
        vision = partial(_vision, workload.views)
        yield self.point("vision", workload.views, stages["vision"], vision, fitted=True)
        yield self.point("prefill", tokens, stages["prefill"], partial(_prefill, tokens, workload.views), fitted=True)
        yield self.point("TTFT", tokens, alone["ttft_ms"]["median"] / 1e3, workload.ttft)

    def decode(self, workload: _W1, step: Mapping[str, Any], output_tokens: int) -> Iterator[Point]:
        """Yield the point of a decode step, if it was measured."""
        if step["ms_per_step"] is not None:
            predict = partial(workload.decode, step["batch"], output_tokens)
            yield self.point("decode", step["batch"], step["ms_per_step"] / 1e3, predict, fitted=True)

    def mixed(self, workload: _W1, passes: Sequence[Sequence[float]]) -> Point:
        """Return the mean of the passes of a W1 run that decode and prefill, in the second half of its prompts."""
        requests = int(max(tokens for _, tokens in passes))
        before, until = (
            next(index for index, (_, tokens) in enumerate(passes) if tokens >= part * requests) for part in (0.5, 1)
        )
        seconds = (passes[until][0] - passes[before][0]) / 1e3 / (until - before)
        prompts = (passes[until][1] - passes[before][1]) / (until - before)
        predict = partial(workload.mixed, round(0.75 * requests), prompts)
        return self.point("mixed", requests, seconds, predict, fitted=True)

    def vision(self, views: int, ms_per_view: Mapping[str, Any]) -> Point:
        return self.point("vision", views, views * ms_per_view["median"] / 1e3, partial(_vision, views), fitted=True)

    def throughput(self, workload: _W1, requests: int, rate: float, options: EngineOptions) -> Point:
        return self.point("W1", requests, rate, partial(workload.rate, requests, options))


def _phases(record: str, configuration: str, part: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of one configuration of a phase record, as far as it was measured."""
    source, workload = _Source(record, configuration, record == _FITTED_RECORD and configuration in FITTED), _WORKLOAD
    yield from source.alone(workload, part["alone"])
    yield source.mixed(workload, part["w1"]["passes"])
    for step in (part["alone"]["step"], part["decode"], part["w1"]["step"]):
        yield from source.decode(workload, step, step["output_tokens"])
    for prompt in part.get("long_prompts", ()):
        tokens = prompt["prompt_tokens"]
        yield source.vision(prompt["views"], prompt["vision_ms_per_view"])
        predict = partial(_prefill, tokens, prompt["views"])
        yield source.point("prefill", tokens, prompt["prefill_ms"]["median"] / 1e3, predict, fitted=True)
    yield source.throughput(workload, part["w1"]["requests"], part["w1"]["requests_per_s"], EngineOptions())


def replica_points(record: str, folder: Path = RECORDS) -> Iterator[Point]:
    """Yield the throughput of a replica in a record of :mod:`benchmarks.many_gpus`; none if its job was cut off."""
    parsed = json.loads((folder / record).read_bytes())
    settings = parsed["settings"]
    if turns := parsed.get("w1"):
        source = _Source.of(record, settings, record.removesuffix(".json").rpartition("-")[2])
        workload = replace(
            _WORKLOAD, prompt_tokens=round(turns[0]["prompt_tokens"]), output_tokens=turns[0]["output_tokens"]
        )
        rate = median(turn["requests_per_s"] for turn in turns) / parsed["replicas"]
        options = EngineOptions(gpu_memory_gb=settings.get("gpu_memory_gb"), kv_cache_dtype=source.kv_cache_dtype)
        yield source.throughput(workload, parsed["pages_per_replica"], rate, options)


def _older(record: str, parsed: Mapping[str, Any], gpu: str = GPU) -> Iterator[Point]:
    """Yield the points of a W1 record, all held out."""
    settings, work = parsed["settings"], parsed["work"]
    source = _Source.of(record, settings, gpu)
    workload = _W1(work["views"], work["prompt_tokens"], work["output_tokens"])
    parts = {settings.get("gpu_memory_gb"): parsed["measured"].get("engine", parsed["measured"])}
    parts |= {float(name[9:-2]): part for name, part in parsed.items() if name.startswith("measured_")}
    for limit, part in parts.items():
        turns = part["throughput"]
        rate = median(turn["requests_per_s"] for turn in turns)
        options = EngineOptions(gpu_memory_gb=limit, kv_cache_dtype=source.kv_cache_dtype)
        yield source.throughput(workload, turns[0]["requests"], rate, options)
        for step in part.get("decode", ()):
            yield from source.decode(workload, step, workload.output_tokens * (1 if step["batch"] == 1 else 2))
        for vision in part.get("vision", ()):
            yield source.vision(vision["views"], vision["ms_per_view"])
        if "alone" in part:
            yield source.point("TTFT", workload.prompt_tokens, part["alone"]["ttft_ms"]["median"] / 1e3, workload.ttft)
