"""W1 over HTTP: the server's throughput and TTFT compared with direct calls of the engine, in one run.

    python -m benchmarks.workloads.serving --model-shape 27b --random-weights --output serving.json
    python -m benchmarks.workloads.serving --model mini --device cpu --max-concurrency 32 --output serving-mini.json

The same requests, with pages as PNG files, go to an engine in this process, then to ``panscan serve`` with the same
settings; images are sent as base64. ``/health`` is timed during the load.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.client import Health, as_files, chat_requests, requests_per_s, running_server, send_all
from benchmarks.workloads.common import (
    TEXT_TOKENS,
    RequestSeeds,
    Work,
    ask,
    base_record,
    open_runners,
    parse,
    save,
    say,
)
from benchmarks.workloads.figures import spread, ttft_ms
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request
from panscan.runners.engine import EngineRunner

_MINI_TEXT_TOKENS = 160  # the bundled tokenizer needs more tokens for the text around crops
_ALONE = 9  # requests streamed one after another, for TTFT; the first warms up


def direct(work: Work, runner: EngineRunner, turns: Sequence[Sequence[Request]]) -> dict[str, Any]:
    """Return measurements of the engine in this process; the first turn is discarded."""
    measured = []
    for number, requests in enumerate(turns):
        say(f"engine: turn {number} of {work.repeats}")
        measured.append(turn_of(runner.run, requests, runner))
    alone = [runner.run([with_tokens(request, 2)])[0] for request in turns[0][:_ALONE]][1:]
    texts = [result.text for result in runner.run(turns[0][:4])]
    rates = spread([turn["requests_per_s"] for turn in measured[1:]])
    return {"requests_per_s": rates, "ttft_ms": spread([ttft_ms(result) for result in alone]), "texts": texts}


def over_http(work: Work, turns: Sequence[Sequence[Request]], max_concurrency: int) -> dict[str, Any]:
    """Return measurements of the server; the first turn is discarded.

    The runner of :func:`direct` empties its caches before each turn; here each turn has different pages.
    """
    short = [with_tokens(request, 2) for request in turns[-1][:_ALONE]]
    turn_rates: list[float] = []
    with running_server(work.settings) as url:
        texts = [exchange.text for exchange in send_all(url, turns[0][:4], max_concurrency=1).exchanges]
        alone = send_all(url, short, max_concurrency=1).exchanges
        ttft = [1e3 * (exchange.tokens[0] - exchange.accepted) for exchange in alone][1:]
        with Health(url) as health:
            for number, requests in enumerate(turns):
                say(f"server: turn {number} of {work.repeats}")
                turn_rates.append(requests_per_s(send_all(url, requests, max_concurrency=max_concurrency)))
    rates = spread(turn_rates[1:])
    bodies = [request.body for request in chat_requests(turns[0])]
    megabytes = sum(len(segment) for body in bodies for segment in body) / len(bodies) / 1e6
    return {
        "requests_per_s": rates,
        "ttft_ms": spread(ttft),
        "health": health.summary(),
        "texts": texts,
        "body_mb": megabytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, compare, write the record."""
    work = parse("serving", __doc__ or "", argv, requests=128, max_new_tokens=128, prefix_caching=False)
    most = work.settings.max_concurrency or work.num_requests
    runner = open_runners(work)["engine"]
    assert isinstance(runner, EngineRunner)  # the settings select it
    text_tokens = TEXT_TOKENS if work.settings.random_weights else _MINI_TEXT_TOKENS
    turns = [
        as_files(ask(work, runner.loaded, [RequestSeeds(seed, seed) for seed in seeds], text_tokens))
        for seeds in _seeds(work.repeats + 1, work.num_requests)
    ]
    [result] = runner.run([with_tokens(turns[0][0], 1)])
    record = base_record(work, runner.loaded, result)
    engine = direct(work, runner, turns)
    runner.close()
    server = over_http(without_concurrency(work), turns, most)
    same = engine.pop("texts") == server.pop("texts")
    ratios = {
        "requests_per_s": server["requests_per_s"]["median"] / engine["requests_per_s"]["median"],
        "ttft_ms_added": server["ttft_ms"]["median"] - engine["ttft_ms"]["median"],
    }
    save(
        work,
        record | {"max_concurrency": most, "engine": engine, "server": server, "ratios": ratios, "same_texts": same},
    )
    say(f"{ratios} health {server['health']} same texts: {same}")
    return 0


def without_concurrency(work: Work) -> Work:
    """Return the work without ``max_concurrency``, which only the client uses here."""
    return replace(work, settings=replace(work.settings, max_concurrency=None))


def _seeds(turns: int, count: int) -> list[range]:
    """Return the seeds of each turn's pages and questions, all different."""
    return [range(turn * count, (turn + 1) * count) for turn in range(turns)]


if __name__ == "__main__":
    sys.exit(main())
