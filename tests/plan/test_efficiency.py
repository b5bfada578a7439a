"""The clock: predictions reproduce committed records, grow with the work, and widen where nothing was measured."""

import json
from dataclasses import asdict, replace
from importlib.resources import files

import pytest
from benchmarks.plan_accuracy import differences, errors, fit_factors
from benchmarks.plan_points import FITTED, Point, points, read_ceilings
from hypothesis import given
from hypothesis import strategies as st

from panscan.model.shapes import SHAPES
from panscan.plan.cost import Variant, pass_work, vision_work
from panscan.plan.efficiency import Clock, committed_efficiency
from panscan.plan.gpus import gpu_named

H200 = gpu_named("h200")
VARIANTS = st.builds(
    Variant,
    st.sampled_from([SHAPES["4b"], SHAPES["27b"]]),
    st.sampled_from([None, "fp8", "int8", "int4"]),
    tensor_parallel_size=st.sampled_from([1, 2]),
)
CONTEXTS = st.lists(st.integers(1, 4000), max_size=128)
CHUNKS = st.lists(st.integers(2, 2048).map(lambda tokens: (0, tokens)), max_size=4)


def off(point: Point) -> float:
    """Return the relative error of a prediction."""
    return abs(point.predicted() / point.measured - 1)


@given(VARIANTS, CONTEXTS, CHUNKS, st.integers(0, 32))
def test_an_interval_contains_its_value_and_more_work_takes_longer(
    variant: Variant, contexts: list[int], chunks: list[tuple[int, int]], views: int
) -> None:
    clock = Clock(H200, variant)
    seconds = clock.pass_seconds(contexts, chunks, views)
    least = 0.85 if variant.weights == "int4" else 1  # the kernel for more rows may be the faster one
    assert 0 <= clock.interval(seconds).low <= seconds <= clock.interval(seconds).high
    for more in (
        clock.pass_seconds([*contexts, 1000], chunks, views),
        clock.pass_seconds([context + 100 for context in contexts], chunks, views),
        clock.pass_seconds(contexts, [*chunks, (0, 300)], views),
        clock.pass_seconds(contexts, chunks, views + 2),
    ):
        assert more >= least * seconds
    assert clock.vision_seconds(views + variant.tensor_parallel_size) > clock.vision_seconds(views)


@pytest.mark.parametrize("name", ["a100-40gb", "h100", "memory=24,bandwidth=936,bf16=71"])
def test_another_chip_widens_the_interval_and_the_basis_says_so(name: str) -> None:
    variant, known = Variant(SHAPES["4b"], "int8"), Clock(H200, Variant(SHAPES["4b"], "int8"))
    gpu = gpu_named(name)
    guessed, ceilings = Clock(gpu, variant), Clock(gpu, variant, ceilings=(2e14, 1e12))
    assert guessed.widening > ceilings.widening > known.widening > 1
    assert Clock(gpu_named("cpu"), variant).widening > guessed.widening
    assert known.measured and not guessed.measured and not ceilings.measured
    assert "records of NVIDIA H200" in known.basis
    assert "Estimated from the data sheet" in guessed.basis and "from measured ceilings" in ceilings.basis


def test_measured_ceilings_replace_the_data_sheet() -> None:
    efficiency, variant = committed_efficiency(), Variant(SHAPES["27b"])
    flops, copied = efficiency.ceilings
    same = Clock(H200, variant, ceilings=(flops, copied)).pass_seconds([], [(0, 2048)], 4)
    assert same == pytest.approx(Clock(H200, variant).pass_seconds([], [(0, 2048)], 4))
    slow = Clock(H200, variant, ceilings=(flops / 2, copied))
    assert slow.vision_seconds(32) > 1.9 * Clock(H200, variant).vision_seconds(32)
    assert slow.pass_seconds([500]) == pytest.approx(Clock(H200, variant).pass_seconds([500]), rel=0.01)


def test_what_bounds_each_phase() -> None:
    variant = Variant(SHAPES["27b"])
    clock = Clock(H200, variant)
    assert clock.bound(vision_work(variant, 4), 0) == "compute"
    assert clock.bound(pass_work(variant, prefill=[(0, 2048)]), 2048) == "compute"
    assert clock.bound(pass_work(variant, decode_contexts=[1000] * 8), 8) == "bandwidth"
    small = Variant(SHAPES["1b"], "int4")
    assert Clock(H200, small).bound(pass_work(small, decode_contexts=[10]), 1) == "host"
    split = Variant(SHAPES["27b"], tensor_parallel_size=2)
    slow_link = Clock(replace(H200, link_bytes_per_s=1e9), split)
    assert slow_link.bound(pass_work(split, prefill=[(0, 2048)]), 2048) == "link"


def test_long_passes_wait_for_their_launches() -> None:
    clock = Clock(H200, Variant(SHAPES["1b"], "fp8"))
    recorded, launched = (clock.pass_seconds([], [(0, 400)], graph=graph) for graph in (True, False))
    assert launched > recorded
    assert clock.pass_seconds([], [(0, 400)]) == recorded  # as the engine chooses
    assert clock.pass_seconds([], [(0, 600)]) == clock.pass_seconds([], [(0, 600)], graph=False)
    assert clock.pass_seconds([1] * 9) == pytest.approx(clock.pass_seconds([1] * 16), rel=0.01)  # padded


def test_the_committed_file_holds_only_known_factors() -> None:
    committed = json.loads(files("panscan.plan").joinpath("efficiency.json").read_text("utf-8"))
    assert committed == json.loads(json.dumps(asdict(committed_efficiency())))


def test_the_split_is_what_the_page_says() -> None:
    all_points = points()
    fitted = [point for point in all_points if point.fitted]
    assert {point.configuration for point in fitted} == set(FITTED)
    assert {point.phase for point in fitted} == {"vision", "prefill", "decode", "mixed", "prepare"}  # no TTFT, no W1
    assert all(point.record.startswith("phases-") for point in fitted)
    held_out = {point.configuration for point in all_points} - set(FITTED)
    assert {"4b:fp8:1", "4b:int8:1", "27b:int8:2", "27b:int4:2", "4b:fp8:2", "4b:int8:2"} <= held_out


@pytest.mark.parametrize("phase", ["vision", "prefill", "decode", "mixed", "TTFT"])
@pytest.mark.parametrize("fitted", [True, False])
def test_the_clock_reproduces_the_records_of_one_gpu(phase: str, *, fitted: bool) -> None:
    chosen = [point for point in points() if point.phase == phase and point.fitted == fitted]
    errors = {(point.record, point.configuration, point.size): off(point) for point in chosen if not point.split}
    assert errors or (phase, fitted) == ("TTFT", True)
    far = {name: error for name, error in errors.items() if error > 0.2}
    # A single view waits for its launches, which took 11 to 17 ms.
    assert len(far) <= 0.1 * len(errors) and max(errors.values(), default=0) < 0.4, far


@pytest.mark.parametrize("phase", ["decode", "mixed"])
def test_the_clock_reproduces_the_records_of_two_gpus(phase: str) -> None:
    chosen = [point for point in points() if point.phase == phase and point.split]
    assert {point.fitted for point in chosen} == {True, False}
    far = [point.configuration for point in chosen if off(point) > 0.2]
    assert len(far) <= 0.05 * len(chosen) and max(map(off, chosen)) < 0.3, far


@pytest.mark.parametrize("record", ["w1-27b-fp8.json", "w1-27b-int4.json", "w1-27b-tp2.json", "w4-4b.json"])
def test_simulated_throughput_reproduces_held_out_records(record: str) -> None:
    chosen = [point for point in points() if point.phase == "W1" and point.record == record]
    assert chosen and not any(point.fitted for point in chosen)
    assert max(map(off, chosen)) < 0.2


# The fit of the plan's factors: repeatable from committed records, and right where the truth is known.


def quick() -> list[Point]:
    return [point for point in points() if point.phase != "W1"]


def test_the_committed_factors_are_those_of_a_new_fit() -> None:
    committed = asdict(committed_efficiency())
    factors = fit_factors(quick(), read_ceilings())
    assert differences(committed, {**committed, "factors": asdict(factors)}) == []
    assert set(committed["held_out"]) == {point.record for point in points() if not point.fitted}


def test_a_fit_recovers_what_a_known_machine_does() -> None:
    known = committed_efficiency()
    factors = known.factors
    slower = replace(factors, vision=0.6 * factors.vision, message_seconds=2 * factors.message_seconds)
    truth = replace(known, factors=slower)
    measured = [replace(point, measured=point.predicted(truth)) for point in quick()]
    fitted = replace(known, factors=fit_factors(measured, known.ceilings))
    assert max(map(abs, errors(measured, fitted))) < 0.15 < max(map(abs, errors(measured, known)))


def test_a_fit_needs_phase_records() -> None:
    with pytest.raises(ValueError, match=r"run benchmarks\.phases"):
        fit_factors([replace(point, fitted=False) for point in quick()], read_ceilings())


def test_differences_name_what_moved() -> None:
    held = asdict(committed_efficiency())
    moved = {**held, "spread": held["spread"] + 0.1, "factors": {**held["factors"], "kv": 2 * held["factors"]["kv"]}}
    assert differences(held, held) == []
    assert differences(held, moved) == ["kv", "spread"]
    assert differences(held, {**held, "held_out": []}) == ["held_out"]
