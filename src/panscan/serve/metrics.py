"""Prometheus metrics of one server, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from panscan.core import Result, Stats

__all__ = ["ServerMetrics"]

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)
_TOKENS = tuple(float(2**power) for power in range(18))
_VIEWS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 13.0, 17.0, 25.0, 33.0, 65.0)


class ServerMetrics:
    """The counters and histograms of requests, and the gauges of engines.

    Args:
        model_name: value of the label ``model_name``.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._recent = 1.0  # seconds that a request takes: an exponential moving average
        self._ended = self._counter("vllm:request_success", "Requests that ended, by finish reason", "finished_reason")
        self._refused = self._counter("panscan:requests_refused", "Refused requests, by HTTP status", "status")
        self.retried = self._gauge("panscan:requests_retried", "Requests retried after a process died")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self._output = self._counter("vllm:generation_tokens", "Output tokens")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._views = self._counter("panscan:views", "Views in prompts")
        self._image_tokens = self._counter("panscan:image_tokens", "Image tokens in prompts")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token", _SECONDS)
        self._tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Time per output token", _SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "End-to-end latency", _SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time in the queue", _SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Time in prefill", _SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Time in decode", _SECONDS)
        self._preprocess = self._histogram("panscan:request_preprocess_time_seconds", "Time in preprocessing", _SECONDS)
        self._vision = self._histogram("panscan:request_vision_time_seconds", "Time in the vision tower", _SECONDS)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self._outputs = self._histogram("vllm:request_generation_tokens", "Output tokens per request", _TOKENS)
        self._view_counts = self._histogram("panscan:request_views", "Views per request", _VIEWS)
        self.active = self._gauge("panscan:http_requests_active", "HTTP requests being handled")
        self._shown: set[str] = set()
        self._elsewhere = False  # whether some requests count as waiting that no engine knows
        self._engines = {
            name: self._gauge(name, text, "engine")
            for name, text in (
                ("vllm:num_requests_running", "Running requests"),
                ("vllm:num_requests_waiting", "Accepted requests that are not running"),
                ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1"),
                ("vllm:num_preemptions", "Preemptions since startup"),
                ("panscan:views_encoded", "Views encoded since startup"),
                ("panscan:views_reused", "Views found in the vision cache since startup"),
            )
        }

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
        for counter, amount in (
            (self._prompt, result.prompt_tokens),
            (self._output, result.output_tokens),
            (self._queries, result.prompt_tokens),
            (self._hits, result.cached_tokens),
            (self._views, result.views),
            (self._image_tokens, result.image_tokens),
        ):
            counter.labels(self._model).inc(amount)
        stamps, stages = result.stamps, result.stamps.stages()
        if stamps.e2e is not None:
            self._recent += 0.1 * (stamps.e2e - self._recent)
        for histogram, value in (
            (self._ttft, stamps.ttft),
            (self._tpot, stamps.tpot),
            (self._e2e, stamps.e2e),
            (self._queue, stages["queue"]),
            (self._prefill, stages["prefill"]),
            (self._decode, stages["decode"]),
            (self._vision, stages["vision"]),
            (self._preprocess, stages["preprocess"]),
            (self._prompts, result.prompt_tokens),
            (self._outputs, result.output_tokens),
            (self._view_counts, result.views),
        ):
            if value is not None:
                histogram.labels(self._model).observe(value)

    def expose(self, stats: Mapping[str, Stats], accepted: int) -> bytes:
        """Return all metrics in Prometheus' text format.

        Requests that no engine knows yet count as waiting: of the only engine, or under the engine ``""``.

        Args:
            stats: current statistics of each engine; the gauges of absent engines are removed.
            accepted: accepted requests that have not ended.
        """
        unknown = max(0, accepted - sum(each.running + each.waiting for each in stats.values()))
        if len(stats) == 1:
            stats = {name: replace(each, waiting=each.waiting + unknown) for name, each in stats.items()}
            unknown = 0
        for engine in self._shown - stats.keys():
            for gauge in self._engines.values():
                gauge.remove(self._model, engine)
        self._shown = set(stats)
        for engine, each in stats.items():
            used, total = each.kv_blocks_used[0], each.kv_blocks[0]
            values = {
                "vllm:num_requests_running": each.running,
                "vllm:num_requests_waiting": each.waiting,
                "vllm:kv_cache_usage_perc": used / total if total else 0.0,
                "vllm:num_preemptions": each.preemptions,
                "panscan:views_encoded": each.views_encoded,
                "panscan:views_reused": each.views_reused,
            }
            for name, value in values.items():
                self._engines[name].labels(self._model, engine).set(value)
        waiting = self._engines["vllm:num_requests_waiting"]
        if unknown:
            waiting.labels(self._model, "").set(unknown)
        elif self._elsewhere:
            waiting.remove(self._model, "")
        self._elsewhere = bool(unknown)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
