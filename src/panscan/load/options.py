"""What a load run sends: levels, arrivals, lengths and limits, checked, and the parsers of option values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from panscan.core import SettingError
from panscan.core.files import read_text
from panscan.core.foreign import JsonObject
from panscan.core.option import shorten
from panscan.core.sampling import TOKENS
from panscan.records.fields import LIMITED_TIMES
from panscan.settings import MAX_PROMPTS, TrafficTable, check_options, default_of, nearest, range_of
from panscan.settings.declaration import json_object

MAX_LEVELS = 100
_MAX_TRACE_BYTES = 2**28
_LEAST_SECONDS = 10.0
_DELAY_SHARE = 11.0  # duration of a level over the limit on a delay
_LONGEST_EXTRA = 65_536  # bytes of --extra-body
_OWN_FIELDS = {"model", "messages", "stream", "max_tokens", "max_completion_tokens"}
_LENGTHS = range_of("max_new_tokens", "load")


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One load level.

    Args:
        rate: requests per second; None: unlimited, or given by a trace.
        max_concurrency: requests in flight at most; None: unlimited.
        burstiness: shape of the gamma distribution of the intervals; None where intervals are not random.
        name: prefix of the cell id instead of the rate's, for a trace.
    """

    rate: float | None = None
    max_concurrency: int | None = None
    burstiness: float | None = None
    name: str | None = None

    @property
    def cell(self) -> str:
        """The id of the level in records, such as ``rate-2`` or ``concurrency-4``."""
        arrivals = self.name or ("" if self.rate is None else f"rate-{self.rate:.6g}")
        limit = "" if self.max_concurrency is None else f"concurrency-{self.max_concurrency}"
        return "-".join(filter(None, (arrivals, limit))) or "rate-inf"

    @property
    def settings(self) -> JsonObject:
        """The settings of the cell in records."""
        return {"request_rate": self.rate, "max_concurrency": self.max_concurrency, "burstiness": self.burstiness}


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded arrivals.

    Args:
        times: ascending, seconds.
        output_lengths: output tokens of each request; None: as without a trace.
    """

    times: tuple[float, ...]
    output_lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions(TrafficTable):
    """The options of a load run, without its endpoint and documents; :class:`TrafficTable` has the rest of them.

    Args:
        trace: recorded arrivals, instead of ``rates``.
        seed: seed of arrivals, documents, prompts and lengths.
        goodput: limits in milliseconds, by name of :data:`panscan.records.fields.LIMITED_TIMES`.
        ignore_eos: ask the server for exactly the requested number of tokens.
        max_tokens: longest answer, tokens; lengths are drawn uniformly from ``min_tokens``, or all are this long.
        scenario: name of the scenario, for the records.
        mm_processor_kwargs: pan-and-scan settings to send with each request; None: the server's own.

    Raises:
        SettingError: a value is out of range, or options exclude each other.
    """

    trace: Trace | None = None
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    ignore_eos: bool = False
    max_tokens: int = default_of("max_new_tokens", "load")
    scenario: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_options(self, "load")
        _LENGTHS.check("--max-new-tokens", self.max_tokens)
        _check_goodput(self.goodput)
        self.adapted({})
        for problem, applies in self._contradictions().items():
            if applies:
                raise SettingError(problem)

    def adapted(self, body: Mapping[str, Any]) -> JsonObject:
        """Return a request's fields as the endpoint takes them.

        Raises:
            SettingError: ``--extra-body`` is not a JSON object, or sets a field that differs between requests.
        """
        fields = dict(body)
        if self.max_tokens_field != "max_tokens" and (tokens := fields.pop("max_tokens", None)) is not None:
            fields |= {} if self.max_tokens_field == "none" else {self.max_tokens_field: tokens}
        if not self.stream_options:
            fields.pop("stream_options", None)
        extra = json_object("--extra-body", self.extra_body or "{}", _LONGEST_EXTRA)
        if reserved := sorted(extra.keys() & _OWN_FIELDS):
            raise SettingError(f"--extra-body: {reserved[0]} differs between requests: remove it")
        if isinstance(options := extra.get("stream_options"), dict):  # added to those that load sends itself
            extra["stream_options"] = {**fields.get("stream_options", {}), **options} if fields.get("stream") else None
        return {name: value for name, value in {**fields, **extra}.items() if name not in extra or value is not None}

    def _contradictions(self) -> dict[str, bool]:
        """Return what is wrong with options that do not fit together, and whether it is so."""
        limited = any(rate is not None for rate in self.rates)
        several = len(self.rates) > 1 or len(self.max_concurrencies) > 1
        traced, recorded = self.trace is not None, 0 if self.trace is None else len(self.trace.times)
        shortest, longest, search = self.min_tokens or 0, self.max_tokens, self.find_max_rate
        levels = len(self.rates) * len(self.max_concurrencies)
        varied = self.burstiness != 1.0
        return {
            f"--min-tokens {shortest}: more than --max-new-tokens {longest}; lower it": shortest > longest,
            f"--request-rate and --max-concurrency give more than {MAX_LEVELS} levels: give fewer": levels > MAX_LEVELS,
            "--request-rate and --trace exclude each other: choose one": limited and traced,
            "--burstiness has no effect with --arrival constant: remove one of them": (
                varied and self.arrival == "constant"
            ),
            "--burstiness needs a finite --request-rate: give one, such as --request-rate 4": (
                varied and not (limited or search)
            ),
            "--trace-speedup needs --trace FILE": self.trace_speedup != 1.0 and not traced,
            f"--num-prompts {self.num_prompts}: the trace has {recorded:,} requests; give at most that": (
                traced and recorded < self.num_prompts
            ),
            "--metric-percentiles: 100 is the maximum, not a percentile; give less, such as 99.9": (
                100.0 in self.metric_percentiles
            ),
            "--find-max-rate needs limits: add --goodput, such as --goodput ttft:500 tpot:50": (
                search and not self.goodput
            ),
            "--find-max-rate chooses the rates: remove --trace": search and traced,
            "--find-max-rate takes one --request-rate to start from, and one --max-concurrency": search and several,
        }

    @property
    def levels(self) -> list[LoadLevel]:
        """The levels in order, without those that a search adds; equal ones once."""
        if self.find_max_rate:
            return []
        if self.trace is not None:
            levels = [LoadLevel(max_concurrency=limit, name="trace") for limit in self.max_concurrencies]
        else:
            levels = [self.level_at(rate, limit) for limit in self.max_concurrencies for rate in self.rates]
        return list({level.cell: level for level in levels}.values())

    def level_at(self, rate: float | None, limit: int | None) -> LoadLevel:
        """Return the level of a request rate (None: unlimited) and a limit of requests in flight."""
        random = rate is not None and self.arrival == "poisson"
        return LoadLevel(rate, limit, self.burstiness if random else None)

    def arrivals(self, level: LoadLevel, count: int) -> list[float] | None:
        """Return when each of ``count`` requests is due, in seconds from the start; None: in a closed loop."""
        if level.rate is None and level.name is None and level.max_concurrency is not None:
            return None
        if self.trace is not None:
            first = self.trace.times[0]
            return [(time - first) / self.trace_speedup for time in self.trace.times[:count]]
        if level.rate is None:
            return [0.0] * count
        if self.arrival == "constant":
            return [index / level.rate for index in range(count)]
        return gamma_arrivals(level.rate, count, self.burstiness, self.seed)

    @property
    def search_seconds(self) -> float:
        """The duration of a level of the search at least.

        A queue that grows by a share f of the time delays requests by f * T after T seconds. At a tenth above the
        capacity, more than 5% of the requests exceed a limit L once T is 11 * L.
        """
        limits = [limit / 1e3 for name, limit in self.goodput.items() if name != "tpot"]
        return max([_LEAST_SECONDS, *(_DELAY_SHARE * limit for limit in limits)])

    @property
    def arrival_name(self) -> str:
        """The arrival process as records name it (:data:`panscan.records.fields.ARRIVALS`)."""
        if self.trace is not None:
            return "trace"
        if not self.find_max_rate and all(rate is None for rate in self.rates):
            return "burst" if None in self.max_concurrencies else "closed"
        if self.arrival == "constant":
            return "constant"
        return "poisson" if self.burstiness == 1.0 else "gamma"


def gamma_arrivals(rate: float, count: int, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return gamma-distributed intervals, as in vLLM: a Poisson process at burstiness 1.

    The times are scaled so that the last request arrives at ``count / rate``: every sample has the requested mean rate.

    Args:
        rate: mean requests per second.
        count: number of requests.
        burstiness: shape of the gamma distribution; below 1 is burstier than Poisson, above 1 more regular.
        seed: seed of the random intervals.
    """
    times = np.cumsum(np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / burstiness, size=count))
    if count and not times[-1] > 0:  # a tiny burstiness underflows: every interval is 0
        return [count / rate] * count
    return [float(time) for time in times * (count / rate / times[-1])] if count else []


def _check_goodput(limits: Mapping[str, float]) -> None:
    for name, limit in limits.items():
        if name not in LIMITED_TIMES:
            hint = nearest(name, LIMITED_TIMES)
            raise SettingError(f"--goodput: unknown metric {shorten(name)}{hint}; expected {', '.join(LIMITED_TIMES)}")
        if not (math.isfinite(limit) and limit > 0):
            raise SettingError(f"--goodput {name}: expected milliseconds above 0, got {limit:g}")


def parse_goodput(words: Iterable[str]) -> dict[str, float]:
    """Return the limits in milliseconds of words such as ``ttft:500 tpot:50``.

    Raises:
        SettingError: a word that is not ``metric:milliseconds``, or a metric that is given twice.
    """
    limits: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, colon, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not colon or math.isnan(limit):
            raise SettingError(f"--goodput: expected metric:milliseconds such as ttft:500, got {shorten(word)}")
        if name in limits:
            raise SettingError(f"--goodput: {name} is given twice: keep one limit")
        limits[name] = limit
    _check_goodput(limits)
    return limits


def read_trace(path: Path) -> Trace:
    """Return the arrivals of a JSON Lines file of ``{"timestamp": milliseconds, "output_length": tokens}``.

    ``input_length`` and ``hash_ids``, which public traces have, are accepted and not used: documents and prompts of the
    run are sent. ``output_length`` is optional, but either every line has it or none.

    Raises:
        SettingError: the file cannot be read, has no requests, or a line has an unknown field or value.
    """
    option = f"--trace {path}"
    lines = read_text(path, _MAX_TRACE_BYTES, option, SettingError, fix="give fewer requests", pipe=True).split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line, type=_TraceRow))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise SettingError(f"{option}, line {number}: {error}") from None
    if not rows or len(rows) > MAX_PROMPTS:
        raise SettingError(f"{option}: {len(rows):,} requests: expected 1 to {MAX_PROMPTS:,}")
    if any(later.timestamp < earlier.timestamp for earlier, later in pairwise(rows)):
        raise SettingError(f"{option}: timestamps are not ascending: sort the lines")
    lengths = [row.output_length for row in rows if row.output_length is not None]
    if lengths and len(lengths) < len(rows):
        missing = len(rows) - len(lengths)
        raise SettingError(f"{option}: output_length is missing in {missing} lines: add it, or remove it everywhere")
    return Trace(tuple(row.timestamp / 1e3 for row in rows), tuple(lengths) or None)


class _TraceRow(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a trace; only the first two fields are used."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=TOKENS.le)] | None = None
    input_length: Any = None
    hash_ids: Any = None
