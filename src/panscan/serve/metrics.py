"""Prometheus metrics of one server, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from panscan.core import Result, Stats

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_TOKENS = tuple(float(2**power) for power in range(18))
_VIEWS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 13.0, 17.0, 25.0, 33.0, 65.0)

_COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens", "prompt_tokens"),
    "vllm:generation_tokens": ("Output tokens", "output_tokens"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prompt_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", "cached_tokens"),
    "panscan:forced_tokens": ("Output tokens that a grammar forced, without a pass", "forced_tokens"),
    "panscan:views": ("Views in prompts", "views"),
    "panscan:image_tokens": ("Image tokens in prompts", "image_tokens"),
}
"""Counters of answered requests: text, and the attribute of a result."""

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time to first token", _SECONDS, "stamps.ttft"),
    "vllm:request_time_per_output_token_seconds": ("Time per output token", _SECONDS, "stamps.tpot"),
    "vllm:e2e_request_latency_seconds": ("End-to-end latency", _SECONDS, "stamps.e2e"),
    "vllm:request_prompt_tokens": ("Prompt tokens per request", _TOKENS, "prompt_tokens"),
    "vllm:request_generation_tokens": ("Output tokens per request", _TOKENS, "output_tokens"),
    "panscan:request_views": ("Views per request", _VIEWS, "views"),
}
"""Histograms of answered requests: text, buckets, and the attribute of a result."""

_STAGES = {
    "vllm:request_queue_time_seconds": ("Time in the queue", "queue"),
    "vllm:request_prefill_time_seconds": ("Time in prefill", "prefill"),
    "vllm:request_decode_time_seconds": ("Time in decode", "decode"),
    "panscan:request_preprocess_time_seconds": ("Time in preprocessing", "preprocess"),
    "panscan:request_vision_time_seconds": ("Time in the vision tower", "vision"),
}
"""Histograms of stages: text, and the name of the stage."""

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)

_WAITING = "vllm:num_requests_waiting"
_GAUGES = {
    "vllm:num_requests_running": ("Running requests", "running"),
    _WAITING: ("Accepted requests that are not running", "waiting"),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1", "kv_cache_usage"),
    "vllm:num_preemptions_total": ("Preemptions since startup", "preemptions"),
    "panscan:views_encoded": ("Views encoded since startup", "views_encoded"),
    "panscan:views_reused": ("Views found in the vision cache since startup", "views_reused"),
}
"""Gauges of engines: text, and the attribute of an engine's statistics."""


_BOUNDS = np.array(_SECONDS)


class _TokenGaps(Collector):
    """The histogram of the times between tokens. An answer has thousands: they are counted all at once.

    Args:
        model_name: value of the label ``model_name``.
    """

    def __init__(self, model_name: str) -> None:
        self._model, self._seconds = model_name, 0.0
        self._counts = np.zeros(len(_SECONDS) + 1, np.int64)

    def observe(self, times: Sequence[float]) -> None:
        """Count the gaps between the times of an answer's tokens, in seconds."""
        seconds = np.array(times)
        gaps = seconds[1:] - seconds[:-1]
        self._counts += np.bincount(_BOUNDS.searchsorted(gaps), minlength=len(self._counts))
        self._seconds += float(gaps.sum())

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram. Prometheus' registry calls this."""
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Time between tokens of an answer", labels=["model_name"]
        )
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, self._counts.cumsum().tolist(), strict=True)), self._seconds)
        yield family


class ServerMetrics:
    """The counters and histograms of requests, and the gauges of engines.

    Args:
        model_name: value of the label ``model_name``.
    """

    def __init__(self, model_name: str) -> None:
        self._model, self._registry = model_name, CollectorRegistry()
        self._recent = 1.0  # seconds that a request takes: an exponential moving average
        self._ended = self._metric(
            Counter, "vllm:request_success", "Requests that ended, by finish reason", "finished_reason"
        )
        self._refused = self._metric(Counter, "panscan:requests_refused", "Refused requests, by HTTP status", "status")
        self.retried = self._metric(Gauge, "panscan:requests_retried", "Requests retried after a process died")
        self.active = self._metric(Gauge, "panscan:http_requests_active", "HTTP requests being handled")
        self._counters = {
            self._metric(Counter, name, text).labels(model_name): attrgetter(attribute)
            for name, (text, attribute) in _COUNTERS.items()
        }
        self._histograms = {
            self._metric(Histogram, name, text, buckets=buckets).labels(model_name): attrgetter(attribute)
            for name, (text, buckets, attribute) in _HISTOGRAMS.items()
        }
        self._stages = {
            self._metric(Histogram, name, text, buckets=_SECONDS).labels(model_name): stage
            for name, (text, stage) in _STAGES.items()
        }
        self._gaps = _TokenGaps(model_name)
        self._registry.register(self._gaps)
        self._gauges = {name: self._metric(Gauge, name, text, "engine") for name, (text, _) in _GAUGES.items()}

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused client may retry: about the current latency of a request."""
        return max(1, min(60, round(self._recent)))

    def refuse(self, status: int) -> None:
        """Count a refused request."""
        self._refused.labels(self._model, str(status)).inc()

    def observe(self, result: Result) -> None:
        """Count a finished request."""
        self._ended.labels(self._model, result.finish_reason).inc()
        if result.finish_reason == "error":
            return
        if result.stamps.e2e is not None:
            self._recent += 0.1 * (result.stamps.e2e - self._recent)
        for counter, amount in self._counters.items():
            counter.inc(amount(result))
        self._gaps.observe(result.stamps.tokens)
        stages = result.stamps.stages()
        values = {histogram: value(result) for histogram, value in self._histograms.items()}
        values |= {histogram: stages[stage] for histogram, stage in self._stages.items()}
        for histogram, value in values.items():
            if value is not None:
                histogram.observe(value)

    def expose(self, stats: Mapping[str, Stats], accepted: int) -> bytes:
        """Return all metrics in Prometheus' text format.

        Requests that no engine knows yet count as waiting: of the only engine, or under the engine ``""``.

        Args:
            stats: current statistics of each engine; the gauges of absent engines are removed.
            accepted: accepted requests that have not ended.
        """
        unknown = max(0, accepted - sum(engine.running + engine.waiting for engine in stats.values()))
        if len(stats) == 1:
            stats = {name: replace(engine, waiting=engine.waiting + unknown) for name, engine in stats.items()}
            unknown = 0
        for gauge in self._gauges.values():
            gauge.clear()
        for name, engine in stats.items():
            for metric, (_, attribute) in _GAUGES.items():
                self._gauges[metric].labels(self._model, name).set(getattr(engine, attribute))
        if unknown:
            self._gauges[_WAITING].labels(self._model, "").set(unknown)
        return generate_latest(self._registry)

    def _metric(self, kind: type[_Metric], name: str, text: str, *labels: str, **options: Any) -> _Metric:
        return kind(name, text, ("model_name", *labels), registry=self._registry, **options)
