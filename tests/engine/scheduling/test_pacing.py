"""Pacing of prefill: chunks within a time, and the TPOT that a simulated engine keeps with it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.drawn import PIECES, Piece, prompt

from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.engine.scheduling.pacing import PrefillLimit
from panscan.plan.mix import PageShare, WorkloadMix
from panscan.plan.simulate import EngineSizes, SimulatedEngine, SimulatedRequest, route_arrivals

DECODE, ROW, VIEW = 0.015, 0.0001, 0.008
"""Seconds of a decode pass, a prompt token and a view."""
SIZES = EngineSizes(kv_shape=KVShape(1, 1, 1), slabs=200_000, window=1024)
SEEDS = st.integers(0, 99)
LESSONS = [0.2 * index for index in range(8)]
"""Arrivals of requests that teach an engine its costs."""
MIX = WorkloadMix((PageShare(0, 1.0), PageShare(1, 2.0), PageShare(4, 2.0)), 40, (2, 60))


class Linear:
    """Pass times that are sums of the three costs."""

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        rows = sum(end - start for start, end in prefill)
        return DECODE * bool(decode_contexts or prefill) + ROW * rows + VIEW * views

    def prepare_seconds(self, views: int, known: int) -> float:
        return 0.0


def answered(target: float | None, arrivals: list[float], seed: int = 0) -> list[SimulatedRequest]:
    """Return the requests of ``MIX`` after an engine with this TPOT target has answered them."""
    sizes = EngineSizes(**{name: getattr(SIZES, name) for name in SIZES.__slots__} | {"tpot_target": target})
    return route_arrivals([SimulatedEngine(sizes, Linear())], MIX.requests(len(arrivals), seed), arrivals)


def over_time(gaps: list[float]) -> list[float]:
    return [sum(gaps[: index + 1]) for index in range(len(gaps))]


@given(pieces=PIECES, seconds=st.integers(-2, 30), view=st.integers(0, 9), data=st.data())
def test_the_longest_chunk_that_cuts_no_image(pieces: list[Piece], seconds: int, view: int, data: Any) -> None:
    ids, layout = prompt(pieces)
    ends = [at for at in range(len(ids) + 1) if layout.around(at) is None]
    start = data.draw(st.sampled_from(ends))
    end = data.draw(st.sampled_from([at for at in ends if at >= start]))
    images = {span.start for span in layout.spans}

    def cost(to: int) -> int:
        return to - start + view * sum(at in images for at in range(start, to))

    fitting = [at for at in ends if start <= at <= end and cost(at) <= seconds]
    assert PrefillLimit(seconds, 1.0, view).reach(layout, start, end) == max(fitting, default=start)


@settings(max_examples=30)
@given(gaps=st.lists(st.floats(0.3, 1.0), min_size=1, max_size=25), seed=SEEDS)
def test_requests_that_the_engine_keeps_up_with_have_the_target(gaps: list[float], seed: int) -> None:
    requests = answered(0.05, [*LESSONS, *(4.0 + at for at in over_time(gaps))], seed)[len(LESSONS) :]
    for each in requests:
        assert each.tokens[0] - each.arrived < 1.5, "no wait raised the target"
        spans = [later - earlier for earlier, later in zip(each.tokens, each.tokens[8:], strict=False)]
        assert all(span <= 8 * 0.05 for span in spans), "any 8 tokens"


@settings(max_examples=20)
@given(st.sampled_from([1e-4, 0.016, 0.03, 0.2]), st.lists(st.floats(0, 0.2), min_size=1, max_size=40), SEEDS)
def test_every_request_ends_whatever_the_target(target: float, gaps: list[float], seed: int) -> None:
    arrivals = over_time(gaps)
    requests, unpaced = answered(target, arrivals, seed), answered(None, arrivals, seed)
    assert all(each.done for each in requests)
    assert [len(each.tokens) for each in requests] == [len(each.tokens) for each in unpaced]


def test_a_backlog_is_computed_at_full_throughput() -> None:
    seconds = [max(each.tokens[-1] for each in answered(target, [0.0] * 120)) for target in (None, 0.05)]
    assert seconds[1] < 1.05 * seconds[0]


@pytest.mark.parametrize("burst", [4, 12])
def test_a_burst_of_prompts_delays_no_token_by_several_chunks(burst: int) -> None:
    longest = []
    for target in (None, 0.05):
        requests = answered(target, [*LESSONS, *[4.0] * burst])[len(LESSONS) :]
        first = min(requests, key=lambda each: each.tokens[0])
        longest.append(max(later - earlier for earlier, later in pairwise(first.tokens)))
    assert longest[1] <= 0.06 < longest[0]
