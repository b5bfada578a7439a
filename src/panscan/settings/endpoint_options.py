"""Options of the commands that serve an endpoint, load it and verify it, which their rooms extend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from panscan.core.option import Range, integers, option
from panscan.core.sampling import TOKENS
from panscan.settings.declaration import rare_option

Repeated = tuple[str, ...]
"""The texts of an option that may be repeated."""
MAX_PIXELS = 178_956_970
"""Pixels of one image; Pillow's own limit."""
MAX_PROMPTS = 1_000_000
"""Requests of one load level, or of one cell."""
RATE = Range(gt=0, le=1_000_000)
"""Requests per second."""
_COUNT = integers(1, MAX_PROMPTS)


@dataclass(frozen=True, kw_only=True)
class ServerTable:
    """Limits and addresses of a server."""

    host: str = option("127.0.0.1", "Server", "Address to bind.", "serve", metavar="ADDRESS")
    port: int = option(
        8000,
        "Server",
        "TCP port; 0 selects a free port.",
        "serve",
        range=integers(0, 65_535, "0 takes a free port"),
    )
    served_model_name: str | None = option(None, "Server", "Model name in the API.", "serve", metavar="NAME")
    allowed_hosts: Repeated = rare_option((), "Server", "Host name to accept; repeatable.", "serve", metavar="NAME")
    allowed_origins: Repeated = rare_option(
        (), "Server", "Origin whose pages may call the API, or *; repeatable.", "serve", metavar="ORIGIN"
    )
    allowed_media_domains: Repeated = rare_option(
        (), "Server", "Domain to fetch images from; repeatable.", "serve", metavar="DOMAIN"
    )
    allowed_local_media_path: Path | None = rare_option(
        None, "Server", "Directory that file: URLs may read.", "serve", metavar="DIR"
    )
    max_queued_requests: int = option(
        256,
        "Server",
        "Maximum queued requests; more get status 429.",
        "serve",
        range=integers(0, 1_000_000),
    )
    request_timeout: float = option(
        600.0,
        "Server",
        "Seconds until a request fails with status 504.",
        "serve",
        flag="timeout",
        range=Range(gt=0, le=86_400, note="seconds"),
        metavar="SECONDS",
    )
    drain_timeout: float = rare_option(
        60.0,
        "Server",
        "Time to finish requests after SIGTERM, seconds.",
        "serve",
        range=Range(ge=0, le=86_400, note="seconds"),
        metavar="SECONDS",
    )
    max_body_mb: float = rare_option(
        64.0, "Server", "Maximum size of a request body, MB.", "serve", range=Range(gt=0, le=4096)
    )
    max_images: int = option(
        16,
        "Server",
        "Maximum images and documents per request.",
        "serve",
        range=integers(0, 10_000),
    )
    max_pixels: int = rare_option(
        MAX_PIXELS,
        "Server",
        "Maximum pixels per image or page.",
        "serve",
        range=integers(1, MAX_PIXELS),
    )
    max_choices: int = rare_option(
        16,
        "Server",
        "Maximum answers per request (n).",
        "serve",
        range=integers(1, 128),
    )
    otlp_traces_endpoint: str | None = rare_option(
        None, "Server", "Endpoint for OpenTelemetry traces.", "serve", metavar="URL"
    )
    routing: Literal["affinity", "work", "random"] = rare_option(
        "affinity", "Server", "Routing policy: affinity, work or random.", "serve", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class RateTable:
    """How many requests arrive, as a file or for a plan."""

    request_rate: float | None = option(
        None, "Traffic", "Load to size a fleet for, requests/s.", "plan", range=RATE, metavar="RATE"
    )
    trace: str | None = option(
        None, "Traffic", "Arrivals to replay: JSON Lines with timestamp in ms.", "load", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class TrafficTable:
    """What a load run sends, and when; and what it reports."""

    rates: tuple[float | None, ...] = option(
        (None,),
        "Traffic",
        "Rates, requests/s, comma list.",
        "load",
        flag="request-rate",
        comma=True,
        range=RATE,
        none=("inf", "infinity", "none"),
        metavar="RATES",
        shown_default="inf",
    )
    max_concurrencies: tuple[int | None, ...] = option(
        (None,),
        "Traffic",
        "Maximum requests in flight, comma list.",
        "load",
        flag="max-concurrency",
        comma=True,
        range=integers(1, 100_000),
        metavar="INTS",
        shown_default="",
    )
    percentile_metrics: tuple[Literal["ttft", "tpot", "itl", "e2el"], ...] = rare_option(
        ("ttft", "tpot", "itl", "e2el"),
        "Measurement",
        "Times to report.",
        "load",
        comma=True,
        metavar="NAMES",
        shown_default="ttft,tpot,itl,e2el",
    )
    metric_percentiles: tuple[float, ...] = rare_option(
        (50.0, 90.0, 95.0, 99.0),
        "Measurement",
        "Percentiles to report.",
        "load",
        comma=True,
        range=Range(gt=0, le=100),
        metavar="INTS",
        shown_default="50,90,95,99",
    )
    extra_body: str | None = rare_option(
        None, "Traffic", "Request fields to add; null removes one.", "load", metavar="JSON"
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens", "none"] = rare_option(
        "max_tokens", "Traffic", "Request field of the output length.", "load", metavar="NAME"
    )
    stream_options: bool = rare_option(True, "Traffic", "Ask for token counts at the end of streams.", "load")
    arrival: Literal["poisson", "constant"] = option("poisson", "Traffic", "Arrival process.", "load")
    burstiness: float = option(
        1.0,
        "Traffic",
        "Gamma shape of arrivals; below 1 is burstier.",
        "load plan",
        range=Range(gt=0, le=1_000_000),
    )
    trace_speedup: float = rare_option(
        1.0, "Traffic", "Speed-up of the replayed trace.", "load", range=Range(gt=0, le=1_000_000)
    )
    num_prompts: int = option(80, "Traffic", "Requests per level.", "load", range=_COUNT)
    num_warmups: int = option(
        1,
        "Traffic",
        "Discarded requests before the first level.",
        "load",
        range=integers(0, MAX_PROMPTS),
    )
    find_max_rate: bool = option(False, "Traffic", "Search for the highest rate that meets --goodput.", "load")
    processes: int | None = rare_option(
        None,
        "Traffic",
        "Client processes.",
        "load",
        range=integers(1, 256),
        shown_default="by the rate",
    )
    goodput_attainment: float = option(
        0.95,
        "Measurement",
        "Share of requests that must meet the limits.",
        "load plan",
        range=Range(gt=0, le=1),
    )
    min_tokens: int | None = option(
        None, "Generation", "Minimum of output lengths drawn up to --max-new-tokens.", "load", range=TOKENS
    )
    image_reuse: float = option(
        0.0, "Traffic", "Share of requests that repeat an image.", "load plan", range=Range(ge=0, le=1)
    )


@dataclass(frozen=True, kw_only=True)
class VerifyTable:
    """What ``panscan verify`` asks an endpoint for."""

    max_requests: int = option(32, "Server", "Maximum requests to send.", "verify", range=integers(3, 32))
    max_tokens: int = option(
        16,
        "Measurement",
        "Output tokens per request.",
        "verify",
        flag="max-new-tokens",
        range=integers(1, 256),
    )
    top_logprobs: int = option(
        20,
        "Measurement",
        "Log-probabilities per token to request.",
        "verify",
        range=integers(0, 20),
    )
