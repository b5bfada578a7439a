"""Counted work against PyTorch's FLOP counter and the engine's layers; planned memory against what engines report."""

import json
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import kv_bytes
from torch.utils.flop_counter import FlopCounterMode

from panscan import GenerateRunner
from panscan.core import SettingError
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.layers import LayerCache
from panscan.model.linear.quantized import WeightFormat
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes
from panscan.model.shapes import SHAPES, Shape, TextShape
from panscan.plan.cost import Variant, Work, pass_work, vision_work
from panscan.plan.gpus import Gpu, all_gpus, gpu_named
from panscan.plan.memory import MemoryPlan, concurrent_requests, memory_plan
from panscan.settings import Settings

MODELS = ("tiny", "mini")
ANY = Shape(
    "any",
    TextShape(1001, 48, 80, 5, 4, 2, 24, window=9, query_scale=24, max_positions=512, pattern=3),
    replace(SHAPES["tiny"].vision, hidden=32, intermediate=40, heads=2),
    64,
)
"""A Gemma 3 that is nowhere published: no size divides another."""


@dataclass
class CountingRanks:
    """One of several ranks, which counts what a ring of them sends; every rank has the same values."""

    size: int
    rank: int = 0
    messages: int = 0
    sent: float = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.messages += 1
        self.sent += 2 * (self.size - 1) / self.size * tensor.nbytes
        return tensor

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all_gather(tensor), -1)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.messages += 1
        self.sent += (self.size - 1) * tensor.nbytes
        return [tensor] * self.size

    def all_reduce_min(self, numbers: Any) -> list[int]:
        return list(numbers)


@dataclass
class NoAttention:
    """An attention plan that computes nothing, so that only products are counted."""

    slots: torch.Tensor = field(default_factory=lambda: torch.arange(0))

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        return query.clone()


def decoder_pass(model: Any, rows: int, sampled: int, ranks: CountingRanks | None = None, vocabulary: int = 0) -> int:
    """FLOPs of the products in one pass of the engine's decoder."""
    text = TextLayers(model, ranks, vocab_size=vocabulary) if ranks else TextLayers(model)
    caches = [LayerCache(*torch.zeros(2, rows, layer.kv_heads, layer.head_size)) for layer in text.layers]
    plan = NoAttention(torch.arange(rows))
    if ranks is not None:
        ranks.messages, ranks.sent = 0, 0.0  # the constructor embeds a token
    with FlopCounterMode(display=False) as counter:
        hidden = text.embed(torch.ones(rows, dtype=torch.long))
        final = text.run(hidden, torch.arange(rows), caches, {True: plan, False: plan})
        text.logits(final[:sampled])
    return int(counter.get_total_flops())


def pairs_of(text: TextShape, positions: range, ends: list[int]) -> int:
    """Pairs that rows at these positions attend to, layer by layer and row by row, as the engine defines them."""
    return sum(
        end - (max(0, position - text.window + 1) if layer % text.pattern else 0)
        for layer in range(1, text.layers + 1)
        for position, end in zip(positions, ends, strict=True)
    )


def variant(shape: Shape | str, *others: Any, **settings: Any) -> Variant:
    return Variant(SHAPES[shape] if isinstance(shape, str) else shape, *others, **{"dtype": "fp32", **settings})


@pytest.mark.parametrize("shape", [*MODELS, ANY])
def test_products_are_those_of_the_engines_layers(shape: str | Shape) -> None:
    model, _ = random_model(shape, dtype=torch.float32, device="cpu")
    candidate = variant(shape)
    work = pass_work(candidate, decode_contexts=[5, 900], prefill=[(0, 9)], sampled=3)
    assert work.products == work.link_bytes == work.reductions == 0
    assert work.dense == decoder_pass(model, rows=11, sampled=3)
    vision = candidate.shape.vision
    with FlopCounterMode(display=False) as counter:
        VisionLayers(model)(torch.zeros(2, 3, vision.image_size, vision.image_size))
    # PyTorch counts no FLOPs of its attention on a CPU, and the engine pads patches to a multiple of 8 values.
    assert vision_work(candidate, 2).dense == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("shape", ["tiny", ANY])
def test_a_shard_computes_its_part_and_sends_what_the_engine_sends(shape: str | Shape) -> None:
    model, _ = random_model(shape, size=2, dtype=torch.float32, device="cpu")
    vocabulary = (SHAPES[shape] if isinstance(shape, str) else shape).text.vocabulary
    ranks, candidate = CountingRanks(2), variant(shape, tensor_parallel_size=2)
    work = pass_work(candidate, decode_contexts=[40] * 6, prefill=[(3, 8)], sampled=2)
    assert work.dense == decoder_pass(model, 11, 2, ranks, vocabulary)
    assert (work.reductions, work.link_bytes) == (ranks.messages, ranks.sent)
    assert candidate.weight_bytes() == weight_bytes(model)


@given(model=st.sampled_from([*SHAPES]), context=st.integers(1, 5000), batch=st.integers(1, 64))
def test_a_step_reads_the_keys_of_every_request(model: str, context: int, batch: int) -> None:
    shape = SHAPES[model]
    step, narrow = (pass_work(Variant(shape, kind), decode_contexts=[context] * batch) for kind in (None, "int8"))
    assert step.flops() == narrow.flops() == batch * pass_work(Variant(shape), decode_contexts=[context]).flops()
    assert narrow.flops(2.0) == step.flops() - narrow.products / 2
    written = batch * 4 * shape.text.kv_heads * shape.text.head_size * shape.text.layers
    assert step.kv_bytes == batch * kv_bytes(shape, context, 2) + written
    assert vision_work(Variant(shape), batch).flops() == shape.vision_flops(batch)
    if shape.vision is not None:
        tower = vision_work(Variant(shape, quantize_vision="int8"), batch)
        matrices = 2 * shape.vision.patches * shape.vision.layers * shape.vision.layer_matrices()
        assert (tower.tower, tower.flops()) == (batch * matrices, shape.vision_flops(batch))
        assert tower.flops(tower_narrow=2.0) == tower.flops() - tower.tower / 2


@given(start=st.integers(0, 30), blocks=st.integers(0, 3), tokens=st.integers(1, 30))
def test_chunks_attend_to_the_intervals_of_the_engine(start: int, blocks: int, tokens: int) -> None:
    shape, text = replace(ANY, image_tokens=16), ANY.text
    after = start + blocks * shape.image_tokens
    ends = [start + (1 + row // 16) * 16 for row in range(blocks * 16)] + [after + 1 + row for row in range(tokens)]
    positions = range(start, after + tokens)
    work = pass_work(variant(shape), prefill=[(positions.start, positions.stop)], views=blocks)
    assert work.attention == 4 * text.heads * text.head_size * pairs_of(text, positions, ends)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", None])
def test_weights_take_the_bytes_of_a_loaded_model(kind: str | None) -> None:
    weight_format = None if kind is None else WeightFormat(kind, 64)
    model, _ = random_model("mini", dtype=torch.float32, device="cpu", weight_format=weight_format)
    assert variant("mini", kind, 64).weight_bytes() == weight_bytes(model)


@given(
    model=st.sampled_from(["4b", "12b", "27b"]),
    kind=st.sampled_from([None, "fp8", "int8", "int4"]),
    size=st.sampled_from([2, 4]),
    contexts=st.lists(st.integers(1, 9000), max_size=9),
    chunk=st.integers(1, 3000),
)
def test_shares_of_a_group_add_up(model: str, kind: str | None, size: int, contexts: list[int], chunk: int) -> None:
    alone, share = Variant(SHAPES[model], kind), Variant(SHAPES[model], kind, tensor_parallel_size=size)
    total, part = (pass_work(layout, decode_contexts=contexts, prefill=[(7, 7 + chunk)]) for layout in (alone, share))
    for name in ("products", "dense", "attention", "kv_bytes"):
        assert size * getattr(part, name) == pytest.approx(getattr(total, name), rel=1e-4)
    assert total.activation_bytes / size < part.activation_bytes < total.activation_bytes
    assert alone.weight_bytes() / size < share.weight_bytes() < alone.weight_bytes()
    assert total.reductions == 0 < part.link_bytes


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=5), st.integers(1, 4000), st.sampled_from(["1b", "27b"]))
def test_work_grows_with_every_token_and_chunks_add_up(contexts: list[int], cut: int, model: str) -> None:
    of = Variant(SHAPES[model], "int8")
    less = pass_work(of, decode_contexts=contexts)
    more = pass_work(of, decode_contexts=[*contexts, 1])
    longer = pass_work(of, decode_contexts=[contexts[0] + 1, *contexts[1:]])
    assert all(a <= b for a, b in zip(astuple(less), astuple(more), strict=True))
    assert less.attention < longer.attention and less.kv_bytes <= longer.kv_bytes
    once = pass_work(of, prefill=[(0, cut + contexts[0])], sampled=0)
    twice = pass_work(of, prefill=[(0, cut)], sampled=0) + pass_work(of, prefill=[(cut, cut + contexts[0])], sampled=0)
    assert twice.attention == once.attention and twice.products == once.products
    assert twice.weight_bytes == 2 * once.weight_bytes


def test_nothing_to_compute_is_no_work() -> None:
    assert pass_work(Variant(SHAPES["4b"])) == Work() == vision_work(Variant(SHAPES["1b"]), 4)


NO_VARIANTS = [
    ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 does not divide the model's 32 attention heads, "),
    ({"tensor_parallel_size": 32}, "--tensor-parallel-size 32 .* use 1, 2, 4, 8 or 16"),
]


@pytest.mark.parametrize(("settings", "reason"), NO_VARIANTS)
def test_variants_that_do_not_exist_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        Variant(SHAPES["27b"], **settings)


def test_int4_takes_the_largest_group_that_fits_and_names_those_that_do() -> None:
    assert Variant(SHAPES["27b"], "int4").weight_bytes() == Variant(SHAPES["27b"], "int4", 128).weight_bytes()
    assert Variant(SHAPES["27b"], "int4", 32).weight_bytes() > Variant(SHAPES["27b"], "int4").weight_bytes()
    with pytest.raises(SettingError, match=r"groups of 128 do not divide 576 .*; use 64 or 32$"):
        Variant(SHAPES["mini"], "int4", 128)
    with pytest.raises(SettingError, match="use --quantization int8 or fp8"):
        Variant(ANY, "int4")


# Predicted memory against what the engine reports: on a CPU here, and in the committed records of GPUs.


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
                peak = max(sample["peak_reserved_bytes"] for sample in run["peaks"])
                yield f"{path.stem} {name}", variant, EngineOptions(), gpu_of(record), kv_bytes, peak
                if run.get("long_prompts") and (kv_bytes := kv_bytes_in(run.get("wide_decisions", []))) is not None:
                    views = max(prompt["views"] for prompt in run["long_prompts"])
                    chunk = views // run["work"]["views"] * run["work"]["prompt_tokens"]
                    wide = EngineOptions(prefill_chunk_size=chunk, vision_batch_size=views)
                    yield f"{path.stem} {name} wide", variant, wide, gpu_of(record), kv_bytes, peak


def kv_bytes_in(decisions: list[str]) -> float | None:
    """Bytes of the KV cache as the engine logged them; None if it did not."""
    return next((1e9 * float(match[1]) for line in decisions if (match := _KV.fullmatch(line))), None)


def gpu_of(record: dict[str, Any]) -> str:
    return str(record["environment"]["gpus"][0]["name"].removeprefix("NVIDIA "))


REPORTED = [pytest.param(*record[1:], id=record[0]) for record in (*w1_records(), *phase_records())]


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
    assert {candidate.weights for candidate in variants} == {None, "fp8", "int8", "int4"}
    assert {candidate.tensor_parallel_size for candidate in variants} == {1, 2, 4}
    assert {candidate.shape.name for candidate in variants} == {"4b", "27b"}
    assert {param.values[1].gpu_memory_gb for param in REPORTED} == {None, 24, 40, 80}


@pytest.mark.parametrize("model", ["tiny", "mini"])
@pytest.mark.parametrize(
    "options", [EngineOptions(kv_cache_gb=0.05), EngineOptions(kv_cache_gb=0.02, block_size=16, kv_cache_dtype="int8")]
)
def test_a_cpu_holds_what_is_allocated(model: str, options: EngineOptions, request: pytest.FixtureRequest) -> None:
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
    planned = Variant(SHAPES["mini"], weights, dtype="fp32", **part)
    assert planned.weight_bytes() == weight_bytes(load_for(settings).model)


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
    plan = memory_plan(Variant(SHAPES["27b"]), gpu_named("a100-40gb"))
    assert not plan.fits
    assert plan.reason == (
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
            cached = tokens * shape.global_layers + min(tokens, window) * shape.local_layers
            more = count + 1 + (tokens > window) * 2048 * shape.local_layers / cached  # one computes a chunk
            assert (
                count == 128
                or count * cached * shape.layer_bytes <= plan.kv_bytes < 1.03 * more * cached * shape.layer_bytes
            )
    assert all(less < more for less, more in pairwise(counts))
    assert concurrent_requests(memory_plan(Variant(SHAPES["27b"]), gpu_named("l4")), variant, 100) == 0
