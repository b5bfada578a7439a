"""Replicas on Ray Serve: throughput compared with one replica, and cache hits of follow-up questions by routing.

    python -m benchmarks.workloads.replicas --model-shape 4b --random-weights --output replicas.json
    python -m benchmarks.workloads.replicas --model mini --device cpu --num-requests 8 --output replicas-mini.json

Distinct documents (W1) measure throughput. Then clients ask four questions about each of several documents, in rounds,
so that questions about other documents come in between. The share of prompt tokens found in the prefix cache shows how
many follow-up questions reached the replica that has cached the document.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.client import as_files, requests_per_s, running_server, send_all, wait_for_replicas
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
from benchmarks.workloads.figures import spread
from benchmarks.workloads.turns import with_tokens
from panscan.core import Request
from panscan.model.checkpoint import Loaded
from panscan.settings import Settings

_MINI_TEXT_TOKENS = 160  # the bundled tokenizer needs more tokens for the text around crops
_REPLICAS = 2
_QUESTIONS = 4  # about each document
_FOLLOW_UP_TOKENS = 16  # output tokens of the questions that measure cache hits


def throughput(settings: Settings, turns: Sequence[Sequence[Request]], replicas: int) -> dict[str, Any]:
    """Return the throughput of distinct documents; the first turn is discarded."""
    rates = []
    with running_server(settings, "--replicas", str(replicas)) as url:
        wait_for_replicas(url, replicas)
        for number, requests in enumerate(turns):
            say(f"{replicas} replica(s): turn {number} of {len(turns) - 1}")
            rates.append(requests_per_s(send_all(url, requests, max_concurrency=len(requests))))
    return {"requests_per_s": spread(rates[1:])}


def cache_hits(settings: Settings, rounds: Sequence[Request], concurrency: int, routing: str | None) -> dict[str, Any]:
    """Return the share of prompt tokens that a server finds in its prefix caches; ``routing`` None: one engine."""
    options = [] if routing is None else ["--replicas", str(_REPLICAS), "--routing", routing]
    with running_server(settings, *options) as url:
        if routing is not None:
            wait_for_replicas(url, _REPLICAS)
        level = send_all(url, rounds, max_concurrency=concurrency)
    cached = sum(exchange.cached_tokens or 0 for exchange in level.exchanges)
    prompt_tokens = sum(exchange.prompt_tokens or 0 for exchange in level.exchanges)
    return {"cached_share": cached / prompt_tokens, "requests_per_s": requests_per_s(level)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("replicas", __doc__ or "", argv, requests=256, max_new_tokens=128)
    runner = open_runners(work)["engine"]
    turns, rounds = _requests(work, runner.loaded)
    [result] = runner.run([with_tokens(turns[0][0], 1)])
    record = base_record(work, runner.loaded, result)
    runner.close()  # the servers need its memory
    fresh = replace(work.settings, prefix_caching=False)
    halves = [turn[: len(turn) // _REPLICAS] for turn in turns]  # one replica's share of the requests
    speed = {
        "1": throughput(fresh, turns, 1),
        str(_REPLICAS): throughput(fresh, turns, _REPLICAS),
        "1, its share": throughput(fresh, halves, 1),
    }
    concurrency = max(2, len(rounds) // 8)
    routings = {"one engine": None, "affinity": "affinity", "random": "random"}
    hits = {name: cache_hits(work.settings, rounds, concurrency, routing) for name, routing in routings.items()}
    medians = {count: figures["requests_per_s"]["median"] for count, figures in speed.items()}
    ratios = {
        "requests_per_s": medians[str(_REPLICAS)] / medians["1"],
        "requests_per_s_same_batch": medians[str(_REPLICAS)] / medians["1, its share"],
        **{
            f"cached_share_{name}": hits[name]["cached_share"] / hits["one engine"]["cached_share"]
            for name in ("affinity", "random")
        },
    }
    results = {"replicas": _REPLICAS, "throughput": speed, "cache_hits": hits, "ratios": ratios}
    save(work, record | results | {"follow_ups": {"requests": len(rounds), "max_concurrency": concurrency}})
    say(str(ratios))
    return 0


def _requests(work: Work, loaded: Loaded) -> tuple[list[list[Request]], list[Request]]:
    """Return the turns of distinct documents, and the rounds of questions about the same documents."""
    count, tokens = work.num_requests, TEXT_TOKENS if work.settings.random_weights else _MINI_TEXT_TOKENS
    turns = [
        as_files(
            ask(work, loaded, [RequestSeeds(seed, seed) for seed in range(turn * count, (turn + 1) * count)], tokens)
        )
        for turn in range(work.repeats + 1)
    ]
    documents = max(2, count // _QUESTIONS)
    question_seeds = [
        RequestSeeds(page, 1_000_000 + number * documents + page)
        for number in range(_QUESTIONS)
        for page in range(documents)
    ]
    rounds = [
        with_tokens(request, _FOLLOW_UP_TOKENS) for request in as_files(ask(work, loaded, question_seeds, tokens))
    ]
    return turns, rounds


if __name__ == "__main__":
    sys.exit(main())
