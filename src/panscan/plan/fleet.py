"""How many replicas a request rate needs, and the rate at which they break: from simulations of the real scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from panscan.core import Stamps
from panscan.core.ranges import Range
from panscan.plan.efficiency import Interval
from panscan.plan.layouts import ClockTimes, Layout, Level, PlanInputs
from panscan.plan.simulate import SimulatedEngine, SimulatedRequest, route_arrivals
from panscan.records.goodput import Goodput, Limits, goodput_of, missed_limits
from panscan.records.schema import RequestTimes
from panscan.settings import default_of

__all__ = [
    "ArrivalTimes",
    "Fleet",
    "FleetLevel",
    "Traffic",
    "level_of",
    "measure_level",
    "size_fleets",
    "with_replicas",
]

ArrivalTimes = Callable[[float, int], Sequence[float]]
"""Returns the arrival times in seconds of so many requests at a rate, ascending."""

REPLICAS = Range(integer=True, ge=1, le=256)
_PERCENTILES = (50, 90, 95, 99)
_LEAST_REQUESTS, _MOST_REQUESTS = 64, 512
_LEAST_SECONDS, _DELAY_SHARE = 20.0, 11.0  # of a level; as for the levels of panscan load --find-max-rate
_STEP = 1.4  # between rates while the highest one is not enclosed
_CLOSE = 1.1  # ratio of the enclosing rates at which the search ends
_MOST_LEVELS = 12
_ALONE_RATE = 0.01  # requests per second at which none waits for another
_BLOCK = 16  # tokens
_SECONDS = 30.0  # after which no further layout is simulated
_MOST_ENGINES = 4  # of a simulation; larger fleets are as these, with their share of the requests
_ABOVE_STEADY = 1.2  # times the steady rate that a replica may reach in a simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What users send and expect.

    Args:
        rate: requests per second.
        limits: milliseconds that the times of a request may take; see :data:`panscan.records.goodput.Limits`.
        attainment: share of the requests that must meet all limits.
        arrivals: when requests arrive.
        seed: seed of view counts and answer lengths.
    """

    rate: float
    limits: Limits
    attainment: float
    arrivals: ArrivalTimes
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetLevel:
    """Replicas under requests that arrive at a rate, simulated.

    Args:
        rate: offered requests per second.
        replicas: engines that share the requests.
        requests: number of simulated requests.
        requests_per_s: completed requests per second of the simulated engines, first arrival to last token.
        goodput: which requests meet the limits.
        percentiles_ms: by time (ttft, tpot, e2el): milliseconds by percentile; empty without an answered request.
        preemptions: how often a request gave its KV cache blocks back.
        refused: requests that the KV cache cannot hold.
    """

    rate: float
    replicas: int
    requests: int
    requests_per_s: float
    goodput: Goodput
    percentiles_ms: Mapping[str, Mapping[int, float]]
    preemptions: int
    refused: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of a layout that meet the traffic.

    Args:
        layout: one layout; its own number of replicas does not count.
        replicas: replicas needed; None if no number of them meets the limits, or more than 256 would be needed.
        replicas_range: replicas needed at the fast and at the slow end of the predicted times, of the best fleet only;
            None: no number of replicas.
        rate_of_one: highest rate of a single replica, requests per second; 0 if one request alone misses the limits.
        level: the replicas at the traffic's rate; of a single replica with one request alone if none meets the limits.
        breaks_at: highest rate in requests per second at which the replicas meet the limits; the traffic's rate if no
            simulation shows a higher one.
    """

    layout: Layout
    replicas: int | None
    replicas_range: tuple[int | None, int | None]
    rate_of_one: float
    level: FleetLevel
    breaks_at: float

    @property
    def gpus(self) -> int | None:
        """Number of GPUs needed."""
        return None if self.replicas is None else self.replicas * self.layout.variant.tensor_parallel_size


def size_fleets(
    inputs: PlanInputs, layouts: Sequence[Layout], traffic: Traffic, on_progress: Callable[[str], None]
) -> list[Fleet]:
    """Return the fleets of layouts that fit, that with the fewest GPUs first.

    Layouts whose requests per second with all slots occupied show that they cannot need fewer GPUs than a simulated
    one are skipped. After 30 seconds, the remaining ones are skipped too.

    Args:
        inputs: the mix and the sizes.
        layouts: layouts that fit.
        traffic: requests and limits.
        on_progress: called with what is simulated next.
    """
    started, fleets = time.monotonic(), list[Fleet]()
    for number, layout in enumerate(sorted(layouts, key=_rate_per_gpu, reverse=True), 1):
        fewest = min((fleet.gpus for fleet in fleets if fleet.gpus is not None), default=inf)
        size = layout.variant.tensor_parallel_size
        if ceil(traffic.rate / (_ABOVE_STEADY * _rate_per_gpu(layout) * size)) * size >= fewest:
            continue
        if fleets and time.monotonic() - started > _SECONDS:
            break
        on_progress(f"simulating layout {number} of {len(layouts)}")
        fleets.append(_one_layout(inputs, layout, traffic))
    best, *others = sorted(fleets, key=lambda fleet: (fleet.gpus or inf, -fleet.rate_of_one))
    on_progress("simulating the ends of the predicted times")
    return [_ranged(inputs, best, traffic), *others]


def _rate_per_gpu(layout: Layout) -> float:
    """Return the requests per second and GPU with all places taken."""
    return layout.speed.requests_per_s.value / layout.gpus


def measure_level(
    inputs: PlanInputs, layout: Layout, traffic: Traffic, rate: float, replicas: int = 1, level: Level = "value"
) -> FleetLevel:
    """Simulate replicas of a layout at a rate.

    Of more than 4 replicas, 4 are simulated with their share of the requests; fewer where 512 requests are too few for
    a queue to grow.

    Args:
        inputs: the mix and the sizes.
        layout: what each replica runs.
        traffic: arrivals and limits; its rate does not count.
        rate: requests per second.
        replicas: number of engines.
        level: which end of the predicted times counts.
    """
    maker, simulated = _engine_maker(inputs, layout, level), _engines(rate, replicas, traffic)
    share = rate * simulated / replicas
    engines, answered = _simulated(maker, inputs, traffic, share, [None] * simulated)
    return replace(level_of(answered, traffic, share, engines), rate=rate, replicas=replicas)


def level_of(
    requests: Sequence[SimulatedRequest], traffic: Traffic, rate: float, engines: Sequence[SimulatedEngine]
) -> FleetLevel:
    """Return the figures of simulated requests."""
    done = [each for each in requests if not each.refused]
    end = max((each.tokens[-1] for each in done), default=0.0)
    seconds = end - min((each.arrived for each in requests), default=0.0)
    goodput = goodput_of(map(_request_times, requests), traffic.limits, seconds, has_rate=True)
    times = {
        "ttft": [each.ttft for each in done],
        "tpot": [tpot for each in done if (tpot := each.tpot) is not None],
        "e2el": [each.e2e for each in done],
    }
    return FleetLevel(
        rate,
        len(engines),
        len(requests),
        len(done) / seconds if seconds > 0 else 0.0,
        goodput,
        {name: _percentiles(values) for name, values in times.items()},
        sum(engine.preemptions for engine in engines),
        len(requests) - len(done),
    )


OnDone = Callable[[SimulatedRequest], bool] | None


def _engine_maker(inputs: PlanInputs, layout: Layout, level: Level) -> Callable[[OnDone], SimulatedEngine]:
    sizes = layout.sizes(inputs.options, prefix_caching=inputs.mix.image_reuse > 0, gpu=inputs.gpu)
    # Larger blocks than the engine's are simulated faster, and round each request's memory up by a few tokens only.
    factor = _BLOCK // sizes.block_size if sizes.block_size < _BLOCK else 1
    sizes = replace(
        sizes,
        block_size=sizes.block_size * factor,
        global_blocks=sizes.global_blocks // factor,
        local_blocks=sizes.local_blocks // factor,
        tpot_target=default_of("tpot_target_ms", "serve") / 1e3,
    )
    times = ClockTimes(inputs.clock(layout.variant), level)
    return lambda on_done: SimulatedEngine(sizes, times, on_done)


def _one_layout(inputs: PlanInputs, layout: Layout, traffic: Traffic) -> Fleet:
    """Return the fleet of one layout, without the range of its replicas."""
    rate_of_one = _highest_rate(inputs, layout, traffic, layout.speed.requests_per_s.value / layout.replicas)
    needed = _replicas(traffic.rate, rate_of_one)
    if needed is None:
        alone = measure_level(inputs, layout, traffic, _ALONE_RATE)
        return Fleet(layout, None, (None, None), rate_of_one, alone, 0.0)
    # Replicas behind one router balance their load: fewer of them may do.
    maker = _engine_maker(inputs, layout, "value")
    while needed > 1 and _holds(maker, inputs, traffic, traffic.rate, needed - 1):
        needed -= 1
    level = measure_level(inputs, layout, traffic, traffic.rate, needed)
    while not level.goodput.reaches(traffic.attainment) and needed < REPLICAS.le:
        needed += 1
        level = measure_level(inputs, layout, traffic, traffic.rate, needed)
    return Fleet(layout, needed, (needed, needed), rate_of_one, level, max(traffic.rate, needed * rate_of_one))


def _ranged(inputs: PlanInputs, fleet: Fleet, traffic: Traffic) -> Fleet:
    """Return the fleet with the replicas needed at both ends of the predicted times."""
    if fleet.replicas is None:
        return fleet
    found = {}
    for level in _ENDS:
        rate = _highest_rate(inputs, fleet.layout, traffic, fleet.rate_of_one, level)
        found[level] = _replicas(traffic.rate, rate)
    low, high = found["low"], found["high"]
    low = fleet.replicas if low is None else min(low, fleet.replicas)
    return replace(fleet, replicas_range=(low, None if high is None else max(high, fleet.replicas)))


_ENDS: tuple[Level, ...] = ("low", "high")


def _replicas(rate: float, rate_of_one: float) -> int | None:
    count = max(1, ceil(rate / rate_of_one - 1e-9)) if rate_of_one > 0 else REPLICAS.le + 1
    return count if count <= REPLICAS.le else None


def _highest_rate(inputs: PlanInputs, layout: Layout, traffic: Traffic, guess: float, level: Level = "value") -> float:
    """Return the highest rate at which one replica meets the limits; 0 if none does.

    Args:
        inputs: the mix and the sizes.
        layout: what the replica runs.
        traffic: arrivals and limits.
        guess: the first rate to simulate.
        level: which end of the predicted times counts.
    """
    engine, rate = _engine_maker(inputs, layout, level), max(guess, 1e-3)
    passing, failing = 0.0, inf
    for number in range(1, _MOST_LEVELS + 1):
        if _holds(engine, inputs, traffic, rate):
            passing = rate
        else:
            failing = rate
        if passing and failing <= _CLOSE * passing:
            break
        if not passing:
            rate /= _STEP**number  # larger and larger steps: the guess leaves out preparation on the host
        elif failing == inf:
            rate *= _STEP
        else:
            rate = (passing * failing) ** 0.5
    return passing


def _holds(
    maker: Callable[[OnDone], SimulatedEngine], inputs: PlanInputs, traffic: Traffic, rate: float, replicas: int = 1
) -> bool:
    """Return whether replicas meet the limits at a rate; ends as soon as too many requests miss them."""
    missed = allowed = 0

    def on_done(request: SimulatedRequest) -> bool:
        nonlocal missed
        missed += bool(missed_limits(_request_times(request), traffic.limits))
        return missed <= allowed

    simulated = _engines(rate, replicas, traffic)
    share = rate * simulated / replicas
    count = _requests(share, traffic)
    allowed = count - ceil(traffic.attainment * count)
    engines, answered = _simulated(maker, inputs, traffic, share, [on_done] * simulated)
    if any(engine.stopped for engine in engines):
        return False
    return level_of(answered, traffic, share, engines).goodput.reaches(traffic.attainment)


def _simulated(
    maker: Callable[[OnDone], SimulatedEngine],
    inputs: PlanInputs,
    traffic: Traffic,
    rate: float,
    on_done: Sequence[OnDone],
) -> tuple[list[SimulatedEngine], list[SimulatedRequest]]:
    """Return engines, one for each callback, and the requests after they have answered them."""
    engines, count = [maker(each) for each in on_done], _requests(rate, traffic)
    sketches = inputs.mix.requests(count, traffic.seed)
    # At lower rates too, no request waits for another; and time stamps of centuries would lose their digits.
    return engines, route_arrivals(engines, sketches, traffic.arrivals(max(rate, _ALONE_RATE), count))


def _requests(rate: float, traffic: Traffic) -> int:
    """Return the number of requests of a level."""
    return min(_MOST_REQUESTS, max(_LEAST_REQUESTS, round(rate * _seconds(traffic))))


def _engines(rate: float, replicas: int, traffic: Traffic) -> int:
    """Return how many of the replicas to simulate."""
    of_one = max(1.0, rate / replicas * _seconds(traffic))
    return max(1, min(replicas, _MOST_ENGINES, int(_MOST_REQUESTS / of_one)))


def _seconds(traffic: Traffic) -> float:
    """Return the seconds of a level: enough for a growing queue to miss the limits on delays."""
    delays = [limit for name, limit in traffic.limits.items() if name != "tpot"]
    return max(_LEAST_SECONDS, _DELAY_SHARE * min(delays, default=0.0) / 1e3)


def _request_times(request: SimulatedRequest) -> RequestTimes:
    return RequestTimes(
        error="refused" if request.refused else None,
        stamps=Stamps(request.arrived, tokens=request.tokens),
        output_tokens=len(request.tokens),
        due=request.arrived,
        queued=0.0,
    )


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    if not seconds:
        return {}
    return dict(zip(_PERCENTILES, (1e3 * np.percentile(seconds, _PERCENTILES)).tolist(), strict=True))


def with_replicas(fleet: Fleet) -> Layout:
    """Return the layout of a fleet with the number of replicas that it needs, and their requests per second."""
    layout, replicas = fleet.layout, fleet.replicas or fleet.layout.replicas
    share, rate = replicas / layout.replicas, layout.speed.requests_per_s
    scaled = Interval(share * rate.low, share * rate.value, share * rate.high)
    return replace(layout, replicas=replicas, predicted=replace(layout.speed, requests_per_s=scaled))
