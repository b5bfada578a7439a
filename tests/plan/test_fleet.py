"""The simulated clock by hand, and fleets that are as large as they must be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.model.shapes import SHAPES
from panscan.plan.fleet import FleetSimulation, Traffic, size_fleets
from panscan.plan.gpus import gpu_named
from panscan.plan.layouts import PlanInputs, layout_of
from panscan.plan.mix import RequestSketch, mix_of_views
from panscan.plan.simulate import EngineSizes, SimulatedEngine, SimulatedRequest, route_arrivals

MIX = mix_of_views("1", SHAPES["4b"], text_tokens=20, output_tokens=(3, 3))
SIZES = EngineSizes(kv_shape=KVShape(1, 1, 1), slabs=2_000, window=1024)


class HandTimes:
    """A prefill pass takes 100 ms, a decode pass 10 ms, and preparation 5 ms."""

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        return 0.1 if prefill else 0.01

    def prepare_seconds(self, views: int, known: int) -> float:
        return 0.005


def constant_arrivals(rate: float, count: int) -> list[float]:
    return [index / rate for index in range(count)]


def alone(sizes: EngineSizes) -> SimulatedRequest:
    [request] = route_arrivals([SimulatedEngine(sizes, HandTimes())], MIX.requests(1), [0.0])
    return request


def test_one_request_alone() -> None:
    request = alone(SIZES)
    assert request.tokens == pytest.approx([0.105, 0.115, 0.125])
    assert (request.stamps.ttft, request.stamps.tpot, request.stamps.e2e) == pytest.approx((0.105, 0.01, 0.125))


@pytest.mark.parametrize(("overlap", "arrival"), [(True, 0.2455), (False, 0.2505)])
def test_a_request_that_arrives_during_a_pass_joins_the_next(overlap: bool, arrival: float) -> None:
    """A pass is launched while the previous one computes, so the pass after that is the first to be decided."""
    requests = [SimulatedRequest(MIX.sketch(0, 0, 1, 100), 0.0), SimulatedRequest(MIX.sketch(1, 1, 1, 3), arrival)]
    engine = SimulatedEngine(replace(SIZES, overlap=overlap), HandTimes())
    for request in requests:
        engine.submit(request)
    engine.run()
    # Arrives at 245.5 ms in the pass that ends at 255 ms, and is prepared at 250.5 ms. Behind that pass, another is
    # launched; its own prefill pass starts at 265 ms. Without overlap, one that is prepared at 255.5 ms does as well.
    assert requests[1].tokens[0] == pytest.approx(0.365)
    assert len(requests[0].tokens) == 100


def test_a_request_that_can_never_run_is_refused() -> None:
    sizes = EngineSizes(kv_shape=KVShape(1, 1, 1), slabs=200, window=1024)
    [request] = route_arrivals([SimulatedEngine(sizes, HandTimes())], MIX.requests(1), [0.0])
    assert request.refused and not request.tokens


def test_a_known_page_is_neither_encoded_nor_computed_again() -> None:
    asked = [MIX.sketch(0, question, 1, 3) for question in range(2)]
    engine = SimulatedEngine(SIZES, HandTimes())
    first, second = route_arrivals([engine], asked, [0.0, 1.0])
    assert (first.cached, second.cached) == (0, 274)  # up to the question
    assert [each.views for each in engine.passes] == [1, 0, 0, 0, 0, 0]


def test_requests_go_to_the_engine_with_the_least_work() -> None:
    engines = [SimulatedEngine(SIZES, HandTimes()) for _ in range(3)]
    answered = route_arrivals(engines, MIX.requests(30), [0.001 * number for number in range(30)])
    assert all(each.done for each in answered)
    # Each prompt has 280 tokens, of which all but the first of an engine find the 14 of the chat template cached.
    assert [sum(each.prefill_rows for each in engine.passes) for engine in engines] == [280 + 9 * 266] * 3


def test_an_early_end_of_an_answer_costs_its_extra_row() -> None:
    sketch = MIX.sketch(0, 0, 1, 3)
    engine = SimulatedEngine(SIZES, HandTimes())
    engine.submit(SimulatedRequest(RequestSketch(sketch.ids, sketch.layout, 3, max_new_tokens=9), 0.0))
    engine.run()
    assert len(engine.passes) == 4  # the third token is known after the fourth pass was launched


def traffic(rate: float) -> Traffic:
    return Traffic(rate=rate, limits={"ttft": 1500.0}, attainment=0.95, arrivals=constant_arrivals)


def test_a_fleet_meets_its_limits_and_one_replica_less_does_not() -> None:
    mix = mix_of_views("4", SHAPES["27b"], text_tokens=42, output_tokens=(16, 16))
    inputs = PlanInputs(
        shape=SHAPES["27b"], gpu=gpu_named("h200"), count=1, mix=mix, options=EngineOptions(prefill_chunk_size=2048)
    )
    layout = layout_of(inputs, None, 1)
    steps: list[str] = []
    [fleet] = size_fleets(inputs, [layout], traffic(18.0), steps.append)
    assert fleet.replicas is not None and fleet.replicas > 1 and steps
    assert fleet.level.goodput.reaches(0.95) and fleet.level.percentiles_ms["ttft"][95] <= 1500
    fewer = FleetSimulation(inputs, layout, traffic(18.0)).level(18.0, fleet.replicas - 1)
    assert not fewer.goodput.reaches(0.95)
    low, high = fleet.replicas_range
    assert low is not None and high is not None and low <= fleet.replicas <= high
    # A single replica cannot complete more than the steady state with all places taken.
    assert fleet.rate_of_one == pytest.approx(layout.speed.requests_per_s.value, rel=0.25)


def test_no_number_of_replicas_helps_if_one_request_alone_is_too_slow() -> None:
    mix = mix_of_views("4", SHAPES["27b"], text_tokens=42, output_tokens=(4, 4))
    inputs = PlanInputs(shape=SHAPES["27b"], gpu=gpu_named("h200"), count=1, mix=mix, options=EngineOptions())
    layout = layout_of(inputs, None, 1)
    hasty = replace(traffic(1.0), limits={"ttft": 1.0})
    [fleet] = size_fleets(inputs, [layout], hasty, lambda _: None)
    assert (fleet.replicas, fleet.gpus, fleet.rate_of_one) == (None, None, 0.0)
    assert fleet.level.percentiles_ms["ttft"][50] > 1
