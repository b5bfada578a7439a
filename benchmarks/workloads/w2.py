"""W2: four questions about each page, caches on. What prefix and vision caches save.

    python -m benchmarks.workloads.w2 --model-shape 27b --random-weights --output w2.json
    python -m benchmarks.workloads.w2 --model-shape 27b --random-weights --runner vllm --output w2-vllm.json
    python -m benchmarks.workloads.w2 --model tiny --num-requests 8 --max-new-tokens 8 --output w2.json

The first line reproduces records/w2-27b.json on an H200. The last one checks on a CPU that the workload runs. All
requests at once, page after page and in rounds over the pages, each time from empty caches; then once more with
everything cached; then follow-up questions about a known page, one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.workloads.common import (
    RequestSeeds,
    Work,
    ask,
    base_record,
    open_runners,
    parse,
    save,
    say,
    shown,
    verdicts,
)
from benchmarks.workloads.figures import spread, ttft_ms
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request, SettingError
from panscan.runners.engine import EngineRunner
from panscan.runners.vllm import VllmRunner

_QUESTIONS = 4  # of each page
_FOLLOW_UPS = 5
_OTHERS = 10_000  # seeds from here are of pages and questions for follow-ups


def orders(num_requests: int) -> dict[str, list[RequestSeeds]]:
    """Return the same requests page after page, and in rounds over the pages."""
    pages = range(num_requests // _QUESTIONS)
    by_page = [[RequestSeeds(page, _QUESTIONS * page + number) for number in range(_QUESTIONS)] for page in pages]
    return {
        "image_major": [seeds for page_seeds in by_page for seeds in page_seeds],
        "round_robin": [seeds for round_seeds in zip(*by_page, strict=True) for seeds in round_seeds],
    }


def follow_ups(work: Work, runner: EngineRunner | VllmRunner) -> dict[str, Any]:
    """Return the TTFT in milliseconds of second questions about a page; the first page warms up."""
    measured = []
    for number in range(_FOLLOW_UPS + 1):
        seeds = [RequestSeeds(_OTHERS + number, 2 * (_OTHERS + number) + turn, tokens=1) for turn in range(2)]
        first, second = ask(work, runner.loaded, seeds)
        runner.run([first])  # from empty caches
        [result] = runner.answer([second])
        measured.append((ttft_ms(result), result.cached_tokens))
    return {"ttft_ms": spread([ms for ms, _ in measured[1:]]), "cached_tokens": measured[-1][1]}


def measure(work: Work, runner: EngineRunner | VllmRunner, requests: dict[str, list[Request]]) -> dict[str, Any]:
    """Return the turns of all orders, interleaved, after a warm-up of all orders, or of one with ``--brief``."""
    measured: dict[str, Any] = {**{order: [] for order in requests}, "all_cached": []}
    for turn in range(work.repeats + 1):
        say(f"turn {turn} of {work.repeats}")
        if work.brief and not turn:
            runner.run(requests["round_robin"])
            continue
        turns = {order: turn_of(runner.run, order_requests, runner) for order, order_requests in requests.items()}
        turns["all_cached"] = turn_of(runner.answer, requests["round_robin"], runner)
        if turn:
            for name, turn_record in turns.items():
                measured[name].append(turn_record)
    return measured | {"follow_up": follow_ups(work, runner)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("w2", __doc__ or "", argv, requests=64, max_new_tokens=128)
    if work.num_requests % _QUESTIONS:
        raise SettingError(f"--num-requests takes a multiple of {_QUESTIONS}, the questions about each page")
    if len(work.runners) > 1 or "generate" in work.runners:
        raise SettingError("--runner takes engine or vllm: generate() keeps no caches")
    [name] = work.runners
    runner = open_runners(work)[name]
    assert isinstance(runner, EngineRunner | VllmRunner)  # as named
    requests = {order: ask(work, runner.loaded, seeds) for order, seeds in orders(work.num_requests).items()}
    verdict = verdicts(work, {name: runner}, requests["round_robin"])
    measured = measure(work, runner, requests)
    [result] = runner.run([with_tokens(requests["image_major"][0], 1)])
    record = base_record(work, runner.loaded, result)
    record["work"]["pages"] = work.num_requests // _QUESTIONS
    if isinstance(runner, EngineRunner):
        record["decisions"] = list(runner.engine.decisions)
    else:
        record["arguments"] = shown(runner.arguments)
    save(work, record | {"verdict": verdict, "measured": {name: measured}})
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
