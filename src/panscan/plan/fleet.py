"""How many replicas a request rate needs, and the rate at which they break: from simulations of the real scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

import numpy as np

from panscan.core.activity import activity
from panscan.core.option import integers
from panscan.plan.efficiency import Interval
from panscan.plan.layouts import ClockTimes, Layout, Level, PlanInputs
from panscan.plan.simulate import SimulatedEngine, SimulatedRequest, route_arrivals
from panscan.records.goodput import Goodput, Limits, goodput_of, missed_limits
from panscan.settings import default_of

ArrivalTimes = Callable[[float, int], Sequence[float]]
"""Returns the arrival times in seconds of so many requests at a rate, ascending."""

REPLICAS = integers(1, 256)
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
        seconds: from the first arrival to the last token.
        requests_per_s: completed requests per second of the simulated engines in that time.
        goodput: which requests meet the limits.
        percentiles_ms: by time (ttft, tpot, e2el): milliseconds by percentile; empty without an answered request.
        preemptions: how often a request gave its KV cache blocks back.
        refused: requests that the KV cache cannot hold.
    """

    rate: float
    replicas: int
    requests: int
    seconds: float
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


class FleetSimulation:
    """Replicas of a layout, simulated with the options of ``panscan serve``.

    Of more than 4 replicas, 4 are simulated with their share of the requests; fewer where 512 requests are too few for
    a queue to grow.

    Args:
        inputs: the mix and the sizes.
        layout: what each replica runs; its own number of replicas does not count.
        traffic: arrivals and limits; its rate does not count.
        level: which end of the predicted times counts.
    """

    def __init__(self, inputs: PlanInputs, layout: Layout, traffic: Traffic, level: Level = "value") -> None:
        self._mix, self._traffic = inputs.mix, traffic
        self._new_times = partial(ClockTimes, inputs.clock(layout.variant), level)
        self._times = self._new_times()
        sizes = layout.sizes(inputs.options, prefix_caching=inputs.mix.image_reuse > 0, gpu=inputs.gpu)
        # Larger blocks than the engine's are simulated faster, and round each request's memory up by a few tokens only.
        factor = max(1, _BLOCK // sizes.block_size)
        self._sizes = replace(
            sizes,
            block_size=sizes.block_size * factor,
            slabs=sizes.slabs // factor,
            tpot_target=default_of("tpot_target_ms", "serve") / 1e3,
        )
        delays = [limit for name, limit in traffic.limits.items() if name != "tpot"]
        # Enough for a growing queue to miss the limits on delays.
        self._seconds = max(_LEAST_SECONDS, _DELAY_SHARE * min(delays, default=0.0) / 1e3)

    def level(self, rate: float, replicas: int = 1) -> FleetLevel:
        """Return the figures of replicas that share requests at a rate."""
        engines, requests = self._run(rate, replicas)
        done = [request.times for request in requests if not request.refused]
        goodput, seconds = self._goodput(requests)
        percentiles = {}
        for name, attribute in {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}.items():
            times = [1e3 * value for request in done if (value := getattr(request, attribute)) is not None]
            values = np.percentile(times, _PERCENTILES).tolist() if times else ()
            percentiles[name] = dict(zip(_PERCENTILES, values, strict=False))
        return FleetLevel(
            rate=rate,
            replicas=replicas,
            requests=len(requests),
            seconds=seconds,
            requests_per_s=len(done) / seconds if seconds > 0 else 0.0,
            goodput=goodput,
            percentiles_ms=percentiles,
            preemptions=sum(engine.preemptions for engine in engines),
            refused=len(requests) - len(done),
        )

    def holds(self, rate: float, replicas: int = 1) -> bool:
        """Return whether replicas meet the limits at a rate; ends as soon as too many requests miss them."""
        missed, attainment = 0, self._traffic.attainment
        count = self._requests(rate * self._simulated(rate, replicas) / replicas)

        def on_done(request: SimulatedRequest) -> bool:
            nonlocal missed
            missed += bool(missed_limits(request.times, self._traffic.limits))
            return missed <= count - ceil(attainment * count)

        engines, requests = self._run(rate, replicas, on_done)
        return not any(engine.stopped for engine in engines) and self._goodput(requests)[0].reaches(attainment)

    def highest_rate(self, guess: float) -> float:
        """Return the highest rate at which one replica meets the limits; 0 if none does.

        Args:
            guess: the first rate to simulate.
        """
        passing, failing, rate = 0.0, inf, max(guess, 1e-3)
        for number in range(1, _MOST_LEVELS + 1):
            if self.holds(rate):
                passing = rate
            else:
                failing = rate
            if passing and failing <= _CLOSE * passing:
                break
            if not passing:
                rate /= _STEP**number  # larger and larger steps: the guess leaves out preparation on the host
            else:
                rate = rate * _STEP if failing == inf else (passing * failing) ** 0.5
        return passing

    def _run(
        self, rate: float, replicas: int, on_done: Callable[[SimulatedRequest], bool] | None = None
    ) -> tuple[list[SimulatedEngine], list[SimulatedRequest]]:
        """Return engines, and the requests after they have answered them."""
        simulated, traffic = self._simulated(rate, replicas), self._traffic
        share = rate * simulated / replicas
        # Times are rounded to those of similar passes. Figures must not depend on what was simulated before.
        times = self._times if on_done else self._new_times()
        engines = [SimulatedEngine(self._sizes, times, on_done) for _ in range(simulated)]
        count = self._requests(share)
        # At lower rates too, no request waits for another; and time stamps of centuries would lose their digits.
        arrivals = traffic.arrivals(max(share, _ALONE_RATE), count)
        return engines, route_arrivals(engines, self._mix.requests(count, traffic.seed), arrivals)

    def _goodput(self, requests: Sequence[SimulatedRequest]) -> tuple[Goodput, float]:
        """Return which requests meet the limits, and the seconds from the first arrival to the last token."""
        end = max((request.tokens[-1] for request in requests if not request.refused), default=0.0)
        seconds = end - min((request.arrived for request in requests), default=0.0)
        return goodput_of((request.times for request in requests), self._traffic.limits, has_rate=True), seconds

    def _requests(self, rate: float) -> int:
        """Return the number of requests of a level."""
        return min(_MOST_REQUESTS, max(_LEAST_REQUESTS, round(rate * self._seconds)))

    def _simulated(self, rate: float, replicas: int) -> int:
        """Return how many of the replicas to simulate."""
        of_one = max(1.0, rate / replicas * self._seconds)
        return max(1, min(replicas, _MOST_ENGINES, int(_MOST_REQUESTS / of_one)))


def size_fleets(inputs: PlanInputs, layouts: Sequence[Layout], traffic: Traffic) -> list[Fleet]:
    """Return the fleets of layouts that fit, that with the fewest GPUs first.

    Layouts whose requests per second with all slots occupied show that they cannot need fewer GPUs than a simulated
    one are skipped. After 30 seconds, the remaining ones are skipped too.

    Args:
        inputs: the mix and the sizes.
        layouts: layouts that fit.
        traffic: requests and limits.
    """
    started, fleets = time.monotonic(), list[Fleet]()
    for number, layout in enumerate(sorted(layouts, key=lambda layout: layout.rate_per_gpu, reverse=True), 1):
        fewest = min((fleet.gpus for fleet in fleets if fleet.gpus is not None), default=inf)
        size = layout.variant.tensor_parallel_size
        if ceil(traffic.rate / (_ABOVE_STEADY * layout.rate_per_gpu * size)) * size >= fewest:
            continue
        if fleets and time.monotonic() - started > _SECONDS:
            break
        with activity(f"simulating layout {number} of {len(layouts)}"):
            fleets.append(_one_layout(inputs, layout, traffic))
    best, *others = sorted(fleets, key=lambda fleet: (fleet.gpus or inf, -fleet.rate_of_one))
    if best.replicas is not None:
        ends: tuple[Level, Level] = ("low", "high")
        simulations = [FleetSimulation(inputs, best.layout, traffic, end) for end in ends]
        with activity("simulating the ends of the predicted times"):
            low, high = (_replicas(traffic.rate, end.highest_rate(best.rate_of_one)) for end in simulations)
        low = best.replicas if low is None else min(low, best.replicas)
        best = replace(best, replicas_range=(low, None if high is None else max(high, best.replicas)))
    return [best, *others]


def _one_layout(inputs: PlanInputs, layout: Layout, traffic: Traffic) -> Fleet:
    """Return the fleet of one layout, without the range of its replicas."""
    simulation, rate = FleetSimulation(inputs, layout, traffic), traffic.rate
    rate_of_one = simulation.highest_rate(layout.speed.requests_per_s.value / layout.replicas)
    needed = _replicas(rate, rate_of_one)
    if needed is None:
        return Fleet(layout, None, (None, None), rate_of_one, simulation.level(_ALONE_RATE), 0.0)
    # Replicas behind one router balance their load: fewer of them may do.
    while needed > 1 and simulation.holds(rate, needed - 1):
        needed -= 1
    level = simulation.level(rate, needed)
    while not level.goodput.reaches(traffic.attainment) and needed < REPLICAS.le:
        needed += 1
        level = simulation.level(rate, needed)
    return Fleet(layout, needed, (needed, needed), rate_of_one, level, max(rate, needed * rate_of_one))


def _replicas(rate: float, rate_of_one: float) -> int | None:
    """Return how many replicas serve a rate; None if more than 256."""
    count = max(1, ceil(rate / rate_of_one - 1e-9)) if rate_of_one > 0 else REPLICAS.le + 1
    return count if count <= REPLICAS.le else None


def with_replicas(fleet: Fleet) -> Layout:
    """Return the layout of a fleet with the number of replicas that it needs, and their requests per second."""
    layout, replicas = fleet.layout, fleet.replicas or fleet.layout.replicas
    share, rate = replicas / layout.replicas, layout.speed.requests_per_s
    scaled = Interval(share * rate.low, share * rate.value, share * rate.high)
    return replace(layout, replicas=replicas, predicted=replace(layout.speed, requests_per_s=scaled))
