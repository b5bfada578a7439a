"""Load runs with known times, for tests of everything that reads their records."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.records.synthetic import header, outcome, repeat, request

START = 1000.0
_SERVER = {"endpoint": "http://127.0.0.1:8000/v1/chat/completions", "server": "panscan 0.5.0", "model": "mini"}
_TRAFFIC = {"arrival": "constant", "scenario": None, "image_reuse": 0.0, "num_prompts": 20, "num_warmups": 2, "seed": 0}
_SHOWN = {"metric_percentiles": [50, 90, 95, 99], "percentile_metrics": ["ttft", "tpot", "itl", "e2el"]}
_LIMITS = {"goodput": {"ttft": 100.0, "tpot": 20.0}, "attainment": 0.95}
LOAD: dict[str, Any] = {**_SERVER, **_TRAFFIC, **_SHOWN, **_LIMITS, "ignore_eos": True}
CLIENT: dict[str, Any] = {"processes": 1, "lag_median_ms": 0.2, "lag_p99_ms": 1.5, "cpu_share": 0.3}
CLIENT |= {"limited": False, "reason": ""}


def level(rate: float | None = None, concurrency: int | None = None) -> dict[str, Any]:
    """Return the settings of a load level."""
    return {"request_rate": rate, "max_concurrency": concurrency, "burstiness": None if rate is None else 1.0}


def load_header(cells: Mapping[str, Mapping[str, Any]], **load: Any) -> dict[str, Any]:
    line = header({name: dict(settings) for name, settings in cells.items()})
    return line | {"schema": 3, "command": ["panscan", "load"], "settings": {"verify": False, "load": LOAD | load}}


def load_request(
    cell: str, number: int, due: float, ttft: float, itl: float, *, chunks: int = 5, **others: Any
) -> dict[str, Any]:
    """Return a request that is sent when it is due; times in seconds. One token per chunk unless given otherwise."""
    tokens = [due + ttft + index * itl for index in range(chunks)]
    unknown = dict.fromkeys(("views", "crops", "image_tokens"))
    load = {"chunks": chunks, "due": due, "queued": 0.0, "status": 200, "error_kind": None}
    return request(cell, f"q{number}", due, tokens, batch=number, **{**unknown, **load, **others})


def failed_request(cell: str, number: int, due: float, kind: str = "http", error: str = "HTTP 500") -> dict[str, Any]:
    line = load_request(cell, number, due, 0.0, 0.0, chunks=0, status=500, error_kind=kind, error=error)
    return line | {"prompt_tokens": None, "finish_reason": None}


def probe(**fields: Any) -> dict[str, Any]:
    """Return what a probe of the endpoint found: an image adds the expected tokens, unless fields say otherwise."""
    tokens = {"text_prompt_tokens": 10, "image_prompt_tokens": 266, "expected_image_tokens": 256}
    return {"type": "probe", "model": "mini", **tokens, "warnings": [], **fields}


def level_records(
    cell: str, requests: Sequence[dict[str, Any]], *, client: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the records of one finished level: from :data:`START` to its last token."""
    ended = max([line["stamps"]["accepted"], *line["stamps"]["tokens"]][-1] for line in requests)
    peaks = {"peak_rss_bytes": None, "load": {"client": CLIENT | dict(client or {})}}
    return [*requests, repeat(cell, 0, START, ended, **peaks), outcome(cell, "done")]


def steady(
    cell: str, rate: float, ttft: float, itl: float = 0.01, count: int = 20, **others: Any
) -> list[dict[str, Any]]:
    """Return a level of constant arrivals, each answered with the same times."""
    lines = [load_request(cell, number, START + number / rate, ttft, itl, **others) for number in range(count)]
    return level_records(cell, lines)


def saturated(cell: str, rate: float, capacity: float, ttft: float, count: int = 20) -> list[dict[str, Any]]:
    """Return a level of constant arrivals at a server that completes fewer: the time to first token grows."""
    waits = [max(0.0, number / capacity - number / rate) for number in range(count)]
    lines = [load_request(cell, n, START + n / rate, ttft + wait, 0.01) for n, wait in enumerate(waits)]
    return level_records(cell, lines)


def load_run(**load: Any) -> list[dict[str, Any]]:
    """Return a run of three levels: 4 and 8 req/s meet the goodput, 16 req/s saturates the server at 10 req/s."""
    cells = {"rate-4": level(4.0), "rate-8": level(8.0), "rate-16": level(16.0)}
    return [
        load_header(cells, **load),
        *steady("rate-4", 4.0, 0.050),
        *steady("rate-8", 8.0, 0.080),
        *saturated("rate-16", 16.0, 10.0, 0.080),
    ]
