"""W1 over HTTP: the server's throughput and TTFT beside those of the engine called directly, in one run.

    python -m benchmarks.workloads.serving --model-shape 27b --random-weights --output serving.json
    python -m benchmarks.workloads.serving --model mini --device cpu --max-concurrency 32 --output serving-mini.json

The same requests, with pages as PNG files, go to an engine in this process, then to ``panscan serve`` with the same
settings; images travel as base64. ``/health`` is timed all along.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.client import Health, as_files, bodies, post_all, running_server, stream_alone
from benchmarks.workloads.common import TEXT_TOKENS, Asked, Work, ask, base_record, open_runners, parse, save, say
from benchmarks.workloads.figures import spread, ttft_ms
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request
from panscan.runners.engine import EngineRunner

_MINI_TEXT_TOKENS = 160  # the bundled models write the words around crops in more tokens
_ALONE = 9  # requests streamed one after another, for TTFT; the first warms up


def direct(work: Work, runner: EngineRunner, requests: Sequence[Request]) -> dict[str, Any]:
    """Return figures of the engine in this process; its first turn is discarded."""
    turns = []
    for turn in range(work.repeats + 1):
        say(f"engine: turn {turn} of {work.repeats}")
        done = turn_of(runner.run, requests, runner)
        turns += [done] if turn else []
    alone = [runner.run([with_tokens(request, 2)])[0] for request in requests[:_ALONE]][1:]
    texts = [result.text for result in runner.run(requests[:4])]
    rates = spread([turn["requests_per_s"] for turn in turns])
    return {"requests_per_s": rates, "ttft_ms": spread([ttft_ms(result) for result in alone]), "texts": texts}


def over_http(work: Work, requests: Sequence[Request], max_concurrency: int) -> dict[str, Any]:
    """Return figures of the server; its first turn is discarded."""
    contents = bodies(requests)
    short = bodies([with_tokens(request, 2) for request in requests[:_ALONE]], stream=True)
    turns: list[dict[str, Any]] = []
    with running_server(work.settings) as url:
        with Health(url) as health:
            for turn in range(work.repeats + 1):
                say(f"server: turn {turn} of {work.repeats}")
                done = post_all(url, contents, max_concurrency=max_concurrency)
                turns += [done] if turn else []
        ttft = [1e3 * seconds for seconds in stream_alone(url, short)][1:]
        texts = post_all(url, contents[:4], max_concurrency=1)["texts"]
    rates = spread([turn["requests_per_s"] for turn in turns])
    megabytes = sum(map(len, contents)) / len(contents) / 1e6
    return {
        "requests_per_s": rates, "ttft_ms": spread(ttft), "health": health.summary(), "texts": texts,
        "body_mb": megabytes,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, compare, write the record."""
    work = parse("serving", __doc__ or "", argv, requests=128, max_new_tokens=128, prefix_caching=False)
    most = work.settings.max_concurrency or work.num_requests
    runner = open_runners(work)["engine"]
    assert isinstance(runner, EngineRunner)  # as the settings name it
    text_tokens = TEXT_TOKENS if work.settings.random_weights else _MINI_TEXT_TOKENS
    asked = [Asked(seed, seed) for seed in range(work.num_requests)]
    requests = as_files(ask(work, runner.loaded, asked, text_tokens))
    [one] = runner.run([with_tokens(requests[0], 1)])
    record = base_record(work, runner.loaded, one)
    engine = direct(work, runner, requests)
    runner.close()
    # The engine of `panscan serve` takes requests as they come: the option belongs to the load here.
    server = over_http(replace_settings(work), requests, most)
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


def replace_settings(work: Work) -> Work:
    """Return the work without the option that only offline runs have."""
    return replace(work, settings=replace(work.settings, max_concurrency=None))


if __name__ == "__main__":
    sys.exit(main())
