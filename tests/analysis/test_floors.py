"""The floor of a cell: by hand on a shape of round numbers, and properties on others."""

from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records.synthetic import load, record_of, repeat, request, run_of

from panscan.analysis.cells import cell_metrics
from panscan.analysis.floors import Floor, floor_of, ratios
from panscan.core import Stamps
from panscan.model.shapes import SHAPES, Shape, TextShape, VisionShape
from panscan.records.store import Run

# Parameters: decoder 464, tower 1,239, projector 10. Per view 9,776 FLOPs.
SMALL = Shape(
    "small", TextShape(10, 4, 6, 3, 2, 1, 2, 5, 2, 64, pattern=3), VisionShape(2, 3, 1, 1, 28), image_tokens=1
)
WEIGHTS = 4 * 1713
# (views, prompt tokens, output tokens) of each request, batch by batch.
BATCHES = (((2, 4, 3), (1, 6, 1)), ((0, 1, 1),))

Work = Sequence[Sequence[tuple[int, int, int]]]


def requests_of(batches: Work, **others: Any) -> list[dict[str, Any]]:
    """Ten milliseconds to the first token, ten for each of the others."""
    records = []
    for number, batch in enumerate(batches):
        for index, (views, prompt, outputs) in enumerate(batch):
            times = [0.01 * (token + 1) for token in range(outputs)]
            fields = {"batch": number, "views": views, "prompt_tokens": prompt, **others}
            records.append(request("c", f"q{number}.{index}", 0.0, times, **fields))
    return records


def run_with(
    requests: Sequence[dict[str, Any]],
    shape: Shape | None = SMALL,
    settings: dict[str, Any] | None = None,
    **machine: Any,
) -> Run:
    cells = {"c": settings or {}}
    run = run_of(*requests, repeat("c", 0, 0.0, 1.0), cells=cells)
    rates = {"flops_per_s": 1000.0, "bytes_per_s": 1000.0}
    known = {"device": "cpu", "dtype": "float32", "weight_bytes": WEIGHTS, **rates}
    run.loads["c"] = record_of(load(["c"], shape and asdict(shape), **{**known, **machine}))
    return run


def floor(batches: Work = BATCHES, image_sha256: Sequence[str] = ("00",), **others: Any) -> Floor:
    return floor_of(run_with(requests_of(batches, image_sha256=image_sha256), **others), "c")


def test_every_number_by_hand() -> None:
    assert SMALL.parameters() == 1713
    bound = floor()
    # First batch: 3 views x 9,776 FLOPs; prompts 3,440 + 5,376 FLOPs; steps read 1,856 bytes of decoder, then 240 and
    # 256 of keys and values. Second: no view; a prompt of 848 FLOPs, less than 1,856 bytes to read.
    vision, prefill, decode, second = 29.328, 8.816, 1.856 + 0.240 + 1.856 + 0.256, 1.856
    assert bound.vision_ms == pytest.approx(1e3 * 2 * vision / 3)
    assert bound.prefill_ms == pytest.approx(1e3 * (2 * prefill + second) / 3)
    assert bound.decode_ms == pytest.approx(1e3 * 2 * decode / 3)
    assert bound.e2e_ms == pytest.approx(1e3 * (2 * (vision + prefill + decode) + second) / 3)
    assert bound.request_throughput == pytest.approx(3 / (vision + prefill + decode + second))


INT4: dict[str, Any] = {"weight_bytes": 464 + 4 * 1249, "settings": {"quantization": "int4"}}  # of the decoder alone


BOUNDS = [
    ({"bytes_per_s": 1e9}, "decode_ms", 2 * (1.040 + 1.056)),  # bound by arithmetic
    ({"bytes_per_s": 1e9}, "prefill_ms", 2 * 8.816 + 0.848),
    ({"flops_per_s": 1e12}, "vision_ms", 2 * 4.996),  # reads its weights
    (INT4, "decode_ms", 2 * (max(0.464 + 0.240, 1.040) + max(0.464 + 0.256, 1.056))),
    (INT4 | {"flops_per_s": 1e9}, "decode_ms", 2 * (0.464 + 0.240 + 0.464 + 0.256)),
]


@pytest.mark.parametrize(("machine", "stage", "seconds"), BOUNDS)
def test_stages_are_bound_by_arithmetic_or_by_what_is_read(machine: dict[str, Any], stage: str, seconds: float) -> None:
    assert getattr(floor(**machine), stage) == pytest.approx(1e3 * seconds / 3)


def test_ratios_are_over_the_metrics_of_the_same_names() -> None:
    run = run_with(requests_of(BATCHES))
    for record in run.requests["c", 0]:
        record.stamps = Stamps(0.0, tokens=record.stamps.tokens, preprocessed=0.0, vision_start=0.001, vision=0.004)
    metrics, bound = cell_metrics(run, "c"), floor_of(run, "c")
    shown = ratios(bound, metrics)
    assert shown.pop("request_throughput") == pytest.approx(bound.request_throughput / 3)
    expected = {"vision": 3, "prefill": 7, "decode": 20 / 3}
    floors = {"vision": bound.vision_ms, "prefill": bound.prefill_ms, "decode": bound.decode_ms}
    for stage, milliseconds in expected.items():
        assert shown.pop(f"mean_{stage}_ms") == pytest.approx(milliseconds / floors[stage])
    assert shown.pop("mean_e2el_ms") == pytest.approx((10 + 20 / 3) / bound.e2e_ms)
    assert not shown


def test_unseen_vision_is_in_prefill_and_stages_without_work_have_no_ratio() -> None:
    run = run_with(requests_of([[(1, 4, 1)]]))
    metrics, bound = cell_metrics(run, "c"), floor_of(run, "c")
    shown = ratios(bound, metrics)
    assert set(shown) == {"mean_prefill_ms", "mean_e2el_ms", "request_throughput"}
    assert shown["mean_prefill_ms"] == pytest.approx(10 / (bound.prefill_ms + bound.vision_ms))


def test_each_replica_is_its_own_device() -> None:
    one = floor()
    records = [record for replica in (0, 1, 2) for record in requests_of(BATCHES, replica=replica)]
    three = floor_of(run_with(records), "c")
    assert three.request_throughput == pytest.approx(3 * one.request_throughput)
    assert astuple(three) == pytest.approx(astuple(replace(one, request_throughput=three.request_throughput)))


def test_a_pipeline_answers_one_by_one() -> None:
    alone = floor([[request] for batch in BATCHES for request in batch])
    assert floor(settings={"runner": "pipeline"}) == alone
    assert alone.vision_ms < floor().vision_ms


def test_a_mixed_runner_by_hand() -> None:
    """Its stages are those of requests alone; its passes share what they read, in the best order there is."""
    work = [(2, 4, 3), (1, 6, 1), (0, 1, 1)]
    bound = floor([work], settings={"runner": "engine"}, image_sha256=[])
    alone = floor([[request] for request in work])
    assert astuple(bound)[:3] == pytest.approx(astuple(alone)[:3])
    decode = 1.040 + 1.056
    flops = sorted((2 * 9.776 + 3.440 + decode, 9.776 + 5.376, 0.848))
    assert bound.e2e_ms == pytest.approx(1e3 * (3 * flops[0] + 2 * flops[1] + flops[2]) / 3)
    # Three passes read the decoder, as the longest answer has three tokens; the tower is read once.
    assert bound.request_throughput == pytest.approx(3 / sum(flops))
    slow = floor([work], settings={"runner": "engine"}, image_sha256=[], bytes_per_s=100.0)
    assert slow.request_throughput == pytest.approx(3 / ((4.996 + 3 * 1.856 + 0.240 + 0.256) * 10))
    one_by_one = floor([work], settings={"runner": "engine", "max_num_seqs": 1}, image_sha256=[], bytes_per_s=100.0)
    assert one_by_one.request_throughput == pytest.approx(3 / ((4.996 + 5 * 1.856 + 0.240 + 0.256) * 10))
    vllm = floor([work], settings={"runner": "vllm", "max_num_seqs": 1}, image_sha256=[], bytes_per_s=100.0)
    assert vllm == slow, "the limit is the engine's"


def test_a_mixed_runner_computes_no_prefix_and_no_image_twice() -> None:
    engine: dict[str, Any] = {"runner": "engine"}
    twice = floor([[(2, 40, 3)] * 2], settings=engine)
    cached = requests_of([[(2, 40, 3)] * 2])
    cached[1]["cached_tokens"] = 39
    bound = floor_of(run_with(cached, settings=engine), "c")
    assert bound.vision_ms == twice.vision_ms == floor([[(2, 40, 3)]]).vision_ms / 2
    assert twice.prefill_ms / 2 < bound.prefill_ms < twice.prefill_ms
    assert bound.request_throughput > twice.request_throughput


def test_ranks_of_gpus_add_up_and_8_bit_products_are_quicker_where_the_gpu_is_known() -> None:
    engine = {"runner": "engine", "tensor_parallel_size": 2}
    two = floor(settings=engine, device="cuda:0").request_throughput
    assert two == pytest.approx(2 * floor(settings={"runner": "engine"}).request_throughput)
    assert floor(settings=engine).request_throughput == pytest.approx(two / 2), "ranks share a CPU"
    half = {"device": "cuda:0", "dtype": "bfloat16", "bytes_per_s": 1e9}
    stored = half | {"weights": "int8, int8 head"}
    machines = ((half, True), (stored, True), (half | {"device": "cpu"}, False), (half | {"dtype": "float32"}, False))
    for machine, known in machines:
        settings = {"quantize_head": "int8"} if machine is stored else {"quantization": "int8"}
        run = run_with(requests_of(BATCHES), settings=settings, **machine)
        run.header.environment["gpus"] = [{"name": "NVIDIA A100-SXM4-40GB"}]
        quick = floor_of(run, "c")
        assert (quick is not None) == known, "data sheets compare 8-bit products with 16-bit ones on that GPU"
        assert quick is None or 0.5 < quick.prefill_ms / floor(**machine | {"weights": None}).prefill_ms < 1


def test_8_bit_products_of_the_vision_tower_are_quicker() -> None:
    half = {"device": "cuda:0", "dtype": "bfloat16"}
    settings = {"quantize_vision": "int8"}
    run = run_with(requests_of(BATCHES), settings=settings, **half, weights="int8 vision tower")
    run.header.environment["gpus"] = [{"name": "NVIDIA A100-SXM4-40GB"}]
    quick, dense = floor_of(run, "c"), floor(**half)
    assert 0.5 < quick.vision_ms / dense.vision_ms < 1
    assert quick.prefill_ms == pytest.approx(dense.prefill_ms, rel=0.01)


def test_requests_that_failed_are_no_work() -> None:
    records = requests_of(BATCHES)
    failed = [*records, request("c", "x", 0.0, [], batch=0, views=9, prompt_tokens=900, output_tokens=0, error="no")]
    assert floor_of(run_with(failed), "c") == floor()


UNKNOWN = [
    ({"shape": None}, {}),
    ({"flops_per_s": None}, {}),
    ({"bytes_per_s": None}, {}),
    ({"dtype": "float8"}, {}),
    ({}, {"tp_plan": "auto"}),
    ({}, {"quantization": "bnb-8bit"}),
    ({}, {"quantization": "fp8"}),
    ({"weights": "compressed-tensors"}, {}),
    ({"weights": "int8 and int4, groups of 128"}, {}),
    ({"device": "cuda:0"}, {"tf32": True}),
]


@pytest.mark.parametrize(("machine", "settings"), UNKNOWN)
def test_what_is_not_known_has_no_floor(machine: dict[str, Any], settings: dict[str, Any]) -> None:
    assert floor_of(run_with(requests_of(BATCHES), settings=settings or None, **machine), "c") is None


def test_cells_without_a_load_or_work_or_with_another_versions_shape_have_no_floor() -> None:
    run = run_with(requests_of(BATCHES))
    assert floor_of(run, "c") is not None
    run.loads["c"].shape["experts"] = 4
    assert floor_of(run, "c") is None
    del run.loads["c"]
    assert floor_of(run, "c") is None
    assert floor_of(run_with([]), "c") is None
    assert floor_of(run_with(requests_of(BATCHES), settings={"tf32": True}), "c") == floor(), "a CPU has no TF32"


counts = st.tuples(st.integers(0, 4), st.integers(1, 300), st.integers(1, 20))
works = st.lists(st.lists(counts, min_size=1, max_size=3), min_size=1, max_size=3)


def total(bound: Floor) -> list[float]:
    return [bound.vision_ms, bound.prefill_ms, bound.decode_ms, 1 / bound.request_throughput]


@given(works, st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1)]), st.data())
def test_more_work_never_lowers_the_floor(work: Work, more: tuple[int, int, int], data: st.DataObject) -> None:
    batch = data.draw(st.integers(0, len(work) - 1))
    one = data.draw(st.integers(0, len(work[batch]) - 1))
    larger = [list(requests) for requests in work]
    views, prompt, outputs = (a + b for a, b in zip(work[batch][one], more, strict=True))
    larger[batch][one] = views, prompt, outputs
    tiny = SHAPES["tiny"]
    before, after = (total(floor(w, shape=tiny, weight_bytes=4 * tiny.parameters())) for w in (work, larger))
    assert all(a <= b for a, b in zip(before, after, strict=True))
    assert before != after or more[2] == 0, "a view or a prompt token more may hide behind the weights"


@given(works)
def test_mixed_passes_are_no_slower_than_batches(work: list[list[tuple[int, int, int]]]) -> None:
    mixed, batched = (floor(work, settings={"runner": runner}, image_sha256=[]) for runner in ("vllm", "generate"))
    assert mixed.request_throughput >= batched.request_throughput * (1 - 1e-9)
