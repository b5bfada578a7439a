"""The levels of a load run, and what they say as a whole: the highest rate that meets the goodput. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from panscan.analysis.cells import cell_metrics, varying_names
from panscan.core import RecordsError
from panscan.core.groups import grouped
from panscan.core.text import capitalised, number_text
from panscan.records.goodput import Goodput, HighestRate, Limits, follows_arrivals, goodput_of, highest_rate
from panscan.records.load_records import LoadRunSettings
from panscan.records.load_runs import block_size, is_load_run, load_settings, steady_level
from panscan.records.metrics import Metrics, window_seconds
from panscan.records.request_records import ClientFigures
from panscan.records.store import Repeat, Run, outcome_of
from panscan.settings import MAX_PROMPTS

VERIFY_HINT = (
    "A load run measures speed, not answers: panscan verify URL --model CHECKPOINT checks an endpoint's answers."
)
TIME_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_WIDE_CHUNK = 1.5


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """A measured level of a load run.

    Args:
        cell: its id in the records.
        name: what tells it from others: ``4 req/s``, ``concurrency 8``.
        rate: its ``request_rate``; None for a closed loop, unlimited or changing rates.
        concurrency: its ``max_concurrency``; None without a cap.
        offered: requests per second that it asks for: its rate; of a ramp or a trace, the mean over the arrivals; None
            for a closed loop and for all requests at once.
        metrics: None if every request failed.
        goodput: without limits every answered request counts.
        keeps_up: whether the endpoint answers as fast as requests arrive
            (:func:`panscan.records.goodput.follows_arrivals`); None if unknown or a closed loop.
        queued_ms: mean time that requests waited for ``--max-concurrency``; None if unknown.
        client: how busy the load generator was; None if unknown.
        steady_seconds: how long its steady state lasted, which metrics are of; None if it had none: then they are of
            the whole level.
    """

    cell: str
    name: str
    rate: float | None
    concurrency: int | None
    offered: float | None
    metrics: Metrics | None
    goodput: Goodput
    keeps_up: bool | None
    queued_ms: float | None
    client: ClientFigures | None
    steady_seconds: float | None

    @property
    def achieved(self) -> float:
        """Return the answered requests per second; 0 if none was answered."""
        return 0.0 if self.metrics is None else self.metrics.values["request_throughput"] or 0.0

    @property
    def good_throughput(self) -> float:
        """Return the answered requests per second that meet the limits."""
        answered = self.goodput.sent - self.failed
        return self.achieved * self.goodput.met / answered if answered else 0.0

    @property
    def failed(self) -> int:
        """Return the number of requests without an answer."""
        return self.goodput.missed["failed"]

    @property
    def client_limited(self) -> bool:
        """Return whether the load generator, not the endpoint, limited this level."""
        return self.client is not None and self.client.limited

    def value(self, metric: str) -> float | None:
        """Return a metric by its name; None if it was not measured."""
        return None if self.metrics is None else self.metrics.values.get(metric)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load run found.

    Args:
        headline: the main message, as a sentence without its full stop.
        notes: sentences that qualify it.
        level: the level that it is about; None if there is none.
        meets: whether that level is shown to meet the limits, by the lower end of its 95% interval, or to be kept up
            with; None if this is not known or asked.
        highest: the highest rate that meets them; None without limits or without rates.
    """

    headline: str
    notes: tuple[str, ...] = ()
    level: MeasuredLevel | None = None
    meets: bool | None = None
    highest: HighestRate | None = None


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Requests that failed for one kind of reason: how many, at which levels, and the first error."""

    kind: str
    requests: int
    levels: tuple[str, ...]
    example: str


def refuse_load_run(run: Run, what: str) -> None:
    """Refuse a load run where only a sweep makes sense.

    Raises:
        RecordsError: the run is a load run.
    """
    if is_load_run(run):
        raise RecordsError(
            f"{run.path}: a load run measures an endpoint, it has no {what}; use a run of panscan bench,"
            " or panscan report for this one"
        )


def levels_of(run: Run) -> list[MeasuredLevel]:
    """Return the measured levels of a load run: rates in ascending order, then closed loops, then unlimited ones.

    Raises:
        RecordsError: stamps contradict counts.
    """
    levels = [measured_level(run, cell) for cell in run.cells if run.repeats_of(cell)]

    def order(level: MeasuredLevel) -> tuple[float, float, float]:
        rate, concurrency = (inf if value is None else value for value in (level.rate, level.concurrency))
        return rate, concurrency, run.level(level.cell).burstiness or 0.0

    return sorted(levels, key=order)


def measured_level(run: Run, cell: str) -> MeasuredLevel:
    """Return a level of which at least one repeat was measured.

    Raises:
        RecordsError: stamps contradict counts.
    """
    settings, load, repeats = run.level(cell), load_settings(run), run.repeats_of(cell)
    # The run's arrival process does not decide: a sweep of --request-rate 2,inf has open loops and bursts.
    changes = settings.request_rate is None and load.arrival in ("ramp", "trace")
    has_rate = changes or settings.request_rate is not None
    goodput = [
        goodput_of(records, load.goodput, has_rate=has_rate, block=block_size(records, window_seconds(window)))
        for window, records in repeats
    ]
    steady = [level for level in map(steady_level, repeats) if level is not None]
    waits = [request.queued for request in run.requests_of(cell) if request.queued is not None]
    clients = [repeat.load.client for repeat, _ in repeats if repeat.load is not None]
    return MeasuredLevel(
        cell=cell,
        name=level_names(run)[cell],
        rate=settings.request_rate,
        concurrency=settings.max_concurrency,
        offered=_mean_rate(repeats) if changes else settings.request_rate,
        metrics=cell_metrics(run, cell),
        goodput=sum(goodput[1:], goodput[0]),
        keeps_up=follows_arrivals(records for _, records in repeats) if has_rate else None,
        queued_ms=1e3 * sum(waits) / len(waits) if waits else None,
        client=clients[-1] if clients else None,
        steady_seconds=sum(window_seconds(window) for window, _ in steady) if len(steady) == len(repeats) else None,
    )


def _mean_rate(repeats: Sequence[Repeat]) -> float | None:
    """Return the requests per second over the arrivals of repeats; None if these took no time."""
    times = [sorted(request.due for request in requests if request.due is not None) for _, requests in repeats]
    seconds = sum(due[-1] - due[0] for due in times if due)
    return sum(len(due) - 1 for due in times if due) / seconds if seconds > 0 else None


def level_names(run: Run) -> dict[str, str]:
    """Return a name of each level, from the settings that have a meaning; burstiness where it varies."""
    arrival = load_settings(run).arrival
    bursty = "burstiness" in varying_names([cell.settings for cell in run.cells.values()])
    names = {}
    for cell in run.cells:
        level = run.level(cell)
        rate, concurrency, burstiness = level.request_rate, level.max_concurrency, level.burstiness
        parts = [] if rate is None else [f"{rate:g} req/s"]
        if rate is None and arrival in ("ramp", "trace"):
            parts = [arrival]
        elif rate is None and concurrency is None:
            parts = ["unlimited rate"]
        if concurrency is not None:
            parts.append(f"concurrency {concurrency}")
        if bursty and burstiness is not None and rate is not None:
            parts.append(f"burstiness {burstiness:g}")
        names[cell] = ", ".join(parts)
    return names


def unfinished_levels(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, outcome, reason) of the levels that were not measured to their end."""
    names = level_names(run)
    levels = [(names[cell], *outcome_of(run, cell)) for cell in run.cells]
    return [(name, outcome, reason) for name, outcome, reason in levels if outcome != "done"]


def limits_text(limits: Limits) -> str:
    """Return limits as text: ``TTFT ≤ 500 ms and TPOT ≤ 50 ms``."""
    return " and ".join(f"{TIME_NAMES[name]} ≤ {limit:g} ms" for name, limit in limits.items())


def load_result(run: Run, levels: Sequence[MeasuredLevel]) -> LoadResult:
    """Return the main message of a load run. Levels that the load generator limited do not count."""
    settings = load_settings(run)
    usable = [level for level in levels if not level.client_limited]
    if not usable:
        why = "the load generator limited every level" if levels else "no level was measured"
        return LoadResult(f"No result: {why}")
    if not any(level.metrics is not None for level in usable):
        return LoadResult("No result: every request failed")
    return _under_limits(settings, usable) if settings.goodput else _fastest(usable)


def _under_limits(settings: LoadRunSettings, levels: Sequence[MeasuredLevel]) -> LoadResult:
    """Return the highest rate that meets the limits, or the fastest level that does where no level has a rate."""
    rated = [level for level in levels if level.rate is not None]
    attained = [level for level in rated or levels if level.goodput.attainment >= settings.attainment]
    goal = f"{limits_text(settings.goodput)} for {100 * settings.attainment:.4g}% of requests"
    highest = None
    if rated:
        highest = highest_rate([(level.rate or 0.0, level.goodput) for level in rated], settings.attainment)
        attained = [level for level in rated if level.rate == highest.rate]
    best = max(attained, key=lambda level: level.achieved, default=None)
    if best is None:
        nearest = max(rated or levels, key=lambda level: level.goodput.attainment)
        notes = [f"Closest: {nearest.name}, {_attained(nearest)}"]
        if rated and all(level.keeps_up is False for level in rated):
            notes.append(_lower_rates(max(level.achieved for level in rated)))
        return LoadResult(f"No measured level meets {goal}", tuple(notes), nearest, False, highest)
    subject = best.name if best.rate is not None else f"{number_text(best.achieved)} req/s ({best.name})"
    notes = [] if highest is None else _around(highest, rated)
    proven = best.goodput.proves(settings.attainment)
    headline = f"{subject} meets {goal}"
    if not proven:
        headline = f"{subject} may meet {goal}; {best.goodput.sent:,} do not prove it"
        needed = best.goodput.requests_to_prove(settings.attainment)
        more = "The share is too near the target to be told from it: measure lower rates"
        if needed is not None and needed <= MAX_PROMPTS:
            more = f"About {needed:,} requests per level would prove it if the share stays (--num-prompts)"
        notes.insert(0, more)
    return LoadResult(headline, (f"Measured: {_attained(best)}", *notes), best, proven or None, highest)


def _attained(level: MeasuredLevel) -> str:
    low, high = level.goodput.interval
    share = f"{level.goodput.met:,} of {level.goodput.sent:,} requests ({_share(level.goodput.attainment)}"
    behind = "; requests arrive faster than they are answered" if level.goodput.overloaded else ""
    return f"{share}, 95% interval {_share(low)} to {_share(high)}){behind}"


def _share(share: float) -> str:
    return f"{100 * share:.3g}%"


def _around(highest: HighestRate, levels: Sequence[MeasuredLevel]) -> list[str]:
    """Return what is known of other rates."""
    notes = []
    if highest.short is None:
        notes.append("No higher rate was measured, so the limit may be higher")
    else:
        short = min(
            (level for level in levels if level.rate == highest.short), key=lambda level: level.goodput.attainment
        )
        behind = ", but requests arrive faster than they are answered" if short.goodput.overloaded else ""
        notes.append(f"{short.name} does not: {_share(short.goodput.attainment)}{behind}")
    if highest.contrary:
        listed = ", ".join(f"{rate:g}" for rate in highest.contrary)
        notes.append(f"Levels at {listed} req/s contradict this: measure more requests per level (--num-prompts)")
    return notes


def _fastest(levels: Sequence[MeasuredLevel]) -> LoadResult:
    """Return the fastest level that the endpoint keeps up with."""
    answered = [level for level in levels if level.metrics is not None]
    stable = [level for level in answered if level.keeps_up]
    closed = [level for level in answered if level.rate is None and level.keeps_up is None]
    best = max(stable or closed or answered, key=lambda level: level.achieved)
    behind = [level.name for level in answered if level.keeps_up is False]
    if len(behind) == len(answered):
        capacity = f"it answers about {number_text(best.achieved)} req/s"
        headline = f"The endpoint keeps up with no measured rate: {capacity}"
        return LoadResult(headline, (_lower_rates(best.achieved),), best, meets=False)
    times = ", ".join(
        f"{title} {number_text(best.value(metric))} ms"
        for title, metric in (("median TTFT", "median_ttft_ms"), ("p95 E2E", "p95_e2el_ms"))
        if best.value(metric) is not None
    )
    figures = f"{number_text(best.achieved)} req/s answered" + (f", {times}" if times else "")
    notes = ["No latency limits were given: --goodput ttft:500 tpot:50 finds the highest rate that meets them"]
    if behind:
        notes.insert(0, f"Requests arrive faster than they are answered at {', '.join(behind)}")
    elif stable:
        notes.insert(0, "The endpoint keeps up with every measured rate: higher ones would show its limit")
    elif best.rate is not None:
        notes.insert(0, "Too few requests to tell whether the endpoint keeps up: increase --num-prompts")
    what = " is the fastest level that the endpoint keeps up with" if stable else " has the highest throughput"
    return LoadResult(
        f"{best.name}{what if len(answered) > 1 else ''}: {figures}", tuple(notes), best, True if stable else None
    )


def _lower_rates(capacity: float) -> str:
    """Propose rates below what an overloaded endpoint answers."""
    rates = ",".join(f"{share * capacity:.2g}" for share in (0.5, 0.75, 0.9))
    return f"Under overload, latencies grow with the length of the run: measure lower rates (--request-rate {rates})"


def error_groups(run: Run, levels: Sequence[MeasuredLevel]) -> list[ErrorGroup]:
    """Return the requests that failed by kind of error, the most frequent first."""
    errors = grouped(
        (request.error_kind or "other", (level.name, request.error))
        for level in levels
        for request in run.requests_of(level.cell)
        if request.error is not None
    )
    groups = [
        ErrorGroup(kind, len(members), tuple(dict.fromkeys(name for name, _ in members)), members[0][1])
        for kind, members in errors.items()
    ]
    return sorted(groups, key=lambda group: (-group.requests, group.kind))


def load_warnings(run: Run, levels: Sequence[MeasuredLevel]) -> list[str]:
    """Return what a reader must know before believing a figure, as sentences without their full stops."""
    warnings = [] if run.probe is None else list(run.probe.warnings)
    limited = {level.name: level.client.reason for level in levels if level.client is not None and level.client.limited}
    if limited:
        reason = next((f" ({reason})" for reason in limited.values() if reason), "")
        which = "this level is" if len(limited) == 1 else "these levels are"
        generator = f"the load generator, not the endpoint, was the limit{reason}"
        warnings.append(f"{', '.join(limited)}: {generator}; {which} excluded from the result")
    outcomes = ((level.name, *outcome_of(run, level.cell)) for level in levels)
    warnings += [f"{name}: {reason}" for name, outcome, reason in outcomes if outcome == "done" and reason]
    failed, sent = sum(level.failed for level in levels), sum(level.goodput.sent for level in levels)
    if failed:
        warnings.append(f"{failed:,} of {sent:,} requests failed: excluded from latencies, counted as missed limits")
    return [*warnings, *_chunk_warnings(run, levels), *map(capitalised, run.notes)]


def _chunk_warnings(run: Run, levels: Sequence[MeasuredLevel]) -> list[str]:
    """Return what the endpoint's chunks do to TPOT and ITL."""
    shapes: Counter[str] = Counter()
    tokens = chunks = 0
    for level in levels:
        for request in run.answered(level.cell):
            if request.output_tokens > 1 and request.chunks:
                shapes["one chunk" if request.chunks == 1 else "chunks"] += 1
                tokens, chunks = tokens + request.output_tokens, chunks + request.chunks
    if shapes["one chunk"] > shapes["chunks"]:
        return [
            "Most answers arrive in one chunk: the endpoint, or a proxy before it, does not stream; TTFT equals E2E,"
            " and TPOT and ITL are meaningless"
        ]
    if chunks and tokens / chunks > _WIDE_CHUNK:
        return [
            f"A content chunk holds {number_text(tokens / chunks)} tokens on average; ITL is the time between chunks"
        ]
    return []
