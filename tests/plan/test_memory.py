"""Predicted memory against what the engine reports: on a CPU here, and in the committed records of GPUs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan import GenerateRunner
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes
from panscan.model.shapes import SHAPES
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu, all_gpus, gpu_named
from panscan.plan.memory import MemoryPlan, concurrent_requests, memory_plan
from panscan.settings import Settings

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
CPU = gpu_named("cpu")
_KV = re.compile(r"KV cache: ([\d.]+) GB, .*")

Reported = tuple[str, Variant, EngineOptions, str, float, int]
"""Name, what ran, options, GPU, bytes of the KV cache, and peak bytes reserved on one GPU."""


def w1_records() -> Iterator[Reported]:
    """Yield what the engine reported in records of W1, also with memory limits."""
    for path in sorted(RECORDS.glob("w1-27b*.json")):
        record = json.loads(path.read_text())
        settings = record["settings"]
        size = settings.get("tensor_parallel_size", 1)
        cache = settings.get("kv_cache_dtype", "auto")
        weights, head = settings.get("quantization"), settings.get("quantize_head")
        variant = Variant(SHAPES["27b"], weights, None, cache, size, quantize_head=head)
        runs = {"": record["measured"].get("engine", record["measured"])}
        runs |= {key.removeprefix("measured_"): run for key, run in record.items() if key.startswith("measured_")}
        for key, run in runs.items():
            limit = float(key.removesuffix("gb")) if key else settings.get("gpu_memory_gb")
            peak = run["throughput"][0]["peak_reserved_bytes"] // size
            if (kv_bytes := kv_bytes_in(run["decisions"])) is not None:
                yield f"{path.stem} {key}", variant, EngineOptions(gpu_memory_gb=limit), gpu_of(record), kv_bytes, peak


def phase_records() -> Iterator[Reported]:
    """Yield what the engine reported in records of phases: 4B and 27B, four kinds of weights, one and two GPUs.

    Runs on two GPUs also opened an engine whose passes hold the longest prompt.
    """
    for path in sorted(RECORDS.glob("phases-*.json")):
        record = json.loads(path.read_text())
        for name, run in record["configurations"].items():
            model, weights, size = name.split(":")
            variant = Variant(SHAPES[model], None if weights == "bf16" else weights, tensor_parallel_size=int(size))
            if run.get("peaks") and (kv_bytes := kv_bytes_in(run["decisions"])) is not None:
                peak = max(each["peak_reserved_bytes"] for each in run["peaks"])
                yield f"{path.stem} {name}", variant, EngineOptions(), gpu_of(record), kv_bytes, peak
                if run.get("long_prompts") and (kv_bytes := kv_bytes_in(run.get("wide_decisions", []))) is not None:
                    views = max(each["views"] for each in run["long_prompts"])
                    chunk = views // run["work"]["views"] * run["work"]["prompt_tokens"]
                    wide = EngineOptions(prefill_chunk_size=chunk, vision_batch_size=views)
                    yield f"{path.stem} {name} wide", variant, wide, gpu_of(record), kv_bytes, peak


def kv_bytes_in(decisions: list[str]) -> float | None:
    """Bytes of the KV cache as the engine logged them; None if it did not."""
    return next((1e9 * float(match[1]) for line in decisions if (match := _KV.fullmatch(line))), None)


def gpu_of(record: dict[str, Any]) -> str:
    return str(record["environment"]["gpus"][0]["name"].removeprefix("NVIDIA "))


REPORTED = [pytest.param(*each[1:], id=each[0]) for each in (*w1_records(), *phase_records())]


def used(plan: MemoryPlan) -> int:
    return plan.weights + plan.working + plan.graphs + plan.vision_cache + plan.kv_bytes


@pytest.mark.parametrize(("variant", "options", "gpu", "kv_bytes", "peak"), REPORTED)
def test_gpus_hold_the_cache_that_the_engine_reported(
    variant: Variant, options: EngineOptions, gpu: str, kv_bytes: float, peak: int
) -> None:
    plan = memory_plan(variant, gpu_named(gpu), options)
    assert plan.fits
    assert plan.kv_bytes == pytest.approx(kv_bytes, rel=0.05)
    assert used(plan) == pytest.approx(peak, rel=0.05)


def test_the_records_cover_every_kind_of_weights_limits_and_several_gpus() -> None:
    variants = [param.values[0] for param in REPORTED]
    assert {each.weights for each in variants} == {None, "fp8", "int8", "int4"}
    assert {each.tensor_parallel_size for each in variants} == {1, 2, 4}
    assert {each.shape.name for each in variants} == {"4b", "27b"}
    assert {param.values[1].gpu_memory_gb for param in REPORTED} == {None, 24, 40, 80}


@pytest.mark.parametrize("model", ["tiny", "mini"])
@pytest.mark.parametrize(
    "options", [EngineOptions(kv_cache_gb=0.05), EngineOptions(kv_cache_gb=0.02, block_size=16, kv_cache_dtype="int8")]
)
def test_a_cpu_holds_what_the_engine_allocates(
    model: str, options: EngineOptions, request: pytest.FixtureRequest
) -> None:
    loaded: GenerateRunner = request.getfixturevalue(model)
    runner = ModelRunner(loaded.loaded, options)
    variant = Variant(SHAPES[model], dtype="fp32", kv_cache_dtype=options.kv_cache_dtype)
    plan = memory_plan(variant, CPU, options)
    assert (plan.slabs, variant.kv_shape()) == (runner.facts.slabs, runner.facts.kv_shape)
    stores = [part.untyped_storage() for layer in runner.cache.layers for part in layer if part is not None]
    held = sum({store.data_ptr(): store.nbytes() for store in stores}.values())  # up to four spare slabs more
    assert plan.kv_bytes == pytest.approx(held, rel=0.01)
    assert plan.weights == sum(parameter.nbytes for parameter in loaded.loaded.model.parameters())


@pytest.mark.parametrize("part", [{"quantize_vision": "int8"}, {"quantize_vision": "fp8"}, {"quantize_head": "int8"}])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_quantised_tower_or_head_takes_what_is_planned(weights: str | None, part: dict[str, Any]) -> None:
    settings = Settings(model="mini", dtype="fp32", device="cpu", quantization=weights, **part)
    assert Variant(SHAPES["mini"], weights, dtype="fp32", **part).weight_bytes() == weight_bytes(
        load_for(settings).model
    )


@given(
    gpu=st.sampled_from([*all_gpus().values()]),
    model=st.sampled_from([*SHAPES]),
    weights=st.sampled_from([None, "fp8", "int8", "int4"]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "int8"]),
    limit=st.none() | st.floats(0.1, 200),
    seqs=st.integers(1, 300),
    chunk=st.integers(1, 9000),
)
def test_a_plan_stays_within_the_memory_or_says_why_not(
    gpu: Gpu, model: str, weights: str | None, kv_cache_dtype: str, limit: float | None, seqs: int, chunk: int
) -> None:
    weights = None if weights == "int4" and model == "mini" else weights
    variant = Variant(SHAPES[model], weights, kv_cache_dtype=kv_cache_dtype)
    options = EngineOptions(gpu_memory_gb=limit, max_num_seqs=seqs, prefill_chunk_size=chunk)
    plan = memory_plan(variant, gpu, options)
    assert plan.fits == (plan.reason is None) == (plan.slabs > 0)
    if plan.fits:
        assert used(plan) <= min(gpu.memory_bytes, (limit or 1e9) * 1e9 if gpu.capability else gpu.memory_bytes)
        assert memory_plan(variant, replace(gpu, memory_bytes=2 * gpu.memory_bytes), options).kv_bytes >= plan.kv_bytes
    else:
        assert "--" in plan.reason and "\n" not in plan.reason


def test_graphs_need_room_for_the_passes_that_are_recorded() -> None:
    """One GPU records prefill passes of at most 512 rows; several record all up to the largest chunk."""
    room = {
        (ranks, chunk): memory_plan(
            Variant(SHAPES["27b"], tensor_parallel_size=ranks),
            gpu_named("h100"),
            EngineOptions(prefill_chunk_size=chunk),
        ).graphs
        for ranks in (1, 2)
        for chunk in (256, 512, 2048)
    }
    assert room[1, 256] < room[1, 512] == room[1, 2048]
    assert room[2, 256] < room[2, 512] < room[2, 2048]


def test_what_does_not_fit_says_what_would() -> None:
    whole = memory_plan(Variant(SHAPES["27b"]), gpu_named("a100-40gb"))
    assert not whole.fits
    assert whole.reason == (
        "--gpu-memory-utilization 0.92: the model's weights take 54.9 GB of NVIDIA A100 40 GB (SXM): raise it, or use"
        " --tensor-parallel-size"
    )
    assert memory_plan(Variant(SHAPES["27b"], tensor_parallel_size=2), gpu_named("a100-40gb")).fits
    assert memory_plan(Variant(SHAPES["27b"], "int4"), gpu_named("rtx-3090")).fits
    assert "8.9" in str(memory_plan(Variant(SHAPES["4b"], "fp8"), gpu_named("a100")).reason)


def test_requests_at_once_fill_the_cache_and_no_more() -> None:
    variant, gpu = Variant(SHAPES["27b"], "int4"), gpu_named("h200")
    counts = []
    shape, window = variant.kv_shape(), variant.text.window
    for limit, measured in ((24, 4), (40, 32), (None, 128)):  # when local layers kept all of 1,102 + 128 tokens
        plan = memory_plan(variant, gpu, EngineOptions(gpu_memory_gb=limit))
        counts.append(concurrent_requests(plan, variant, 1230))
        assert measured <= counts[-1] <= 1.2 * measured
        for tokens in (300, 2300, 30_000):
            count = concurrent_requests(plan, variant, tokens)
            kept = tokens * shape.global_layers + min(tokens, window) * shape.local_layers
            more = count + 1 + (tokens > window) * 2048 * shape.local_layers / kept  # one computes a chunk
            assert (
                count == 128
                or count * kept * shape.layer_bytes <= plan.kv_bytes < 1.03 * more * kept * shape.layer_bytes
            )
    assert all(less < more for less, more in pairwise(counts))
    assert concurrent_requests(memory_plan(Variant(SHAPES["27b"]), gpu_named("l4")), variant, 100) == 0
