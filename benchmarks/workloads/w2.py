"""W2: four questions about each page, caches on. What prefix and vision caches save.

    python -m benchmarks.workloads.w2 --model-shape 27b --random-weights --output w2.json
    python -m benchmarks.workloads.w2 --model tiny --num-requests 8 --max-new-tokens 8 --output w2.json

All requests at once, page after page and in rounds over the pages, each time from empty caches; then once more with
everything cached; then follow-up questions on a page that is known, one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.workloads.common import (
    Asked,
    Work,
    ask,
    base_record,
    open_runners,
    parse,
    save,
    say,
    verdicts,
)
from benchmarks.workloads.figures import spread, ttft_ms
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request, SettingError
from panscan.runners.engine import EngineRunner

_QUESTIONS = 4  # of each page
_FOLLOW_UPS = 5
_OTHERS = 10_000  # seeds from here are of pages and questions for follow-ups


def orders(num_requests: int) -> dict[str, list[Asked]]:
    """The same requests page after page, and in rounds over the pages."""
    pages = range(num_requests // _QUESTIONS)
    asked = [[Asked(page, _QUESTIONS * page + number) for number in range(_QUESTIONS)] for page in pages]
    return {
        "image_major": [each for page in asked for each in page],
        "round_robin": [each for each_round in zip(*asked, strict=True) for each in each_round],
    }


def follow_ups(work: Work, runner: EngineRunner) -> dict[str, Any]:
    """TTFT of a question on a page that another question was asked about, milliseconds; the first warms up."""
    found = []
    for number in range(_FOLLOW_UPS + 1):
        asked = [Asked(_OTHERS + number, 2 * (_OTHERS + number) + turn, tokens=1) for turn in range(2)]
        first, second = ask(work, runner.loaded, asked)
        runner.run([first])  # from empty caches
        [result] = runner.answer([second])
        found.append((ttft_ms(result), result.cached_tokens))
    return {"ttft_ms": spread([ms for ms, _ in found[1:]]), "cached_tokens": found[-1][1]}


def measure(work: Work, runner: EngineRunner, requests: dict[str, list[Request]]) -> dict[str, Any]:
    """Turns of all orders, interleaved; the first of each is thrown away."""
    found: dict[str, Any] = {**{order: [] for order in requests}, "all_cached": []}
    for turn in range(work.repeats + 1):
        say(f"turn {turn} of {work.repeats}")
        turns = {order: turn_of(runner.run, asked, runner) for order, asked in requests.items()}
        turns["all_cached"] = turn_of(runner.answer, requests["round_robin"], runner)
        if turn:
            for name, done in turns.items():
                found[name].append(done)
    return found | {"follow_up": follow_ups(work, runner)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("w2", __doc__ or "", argv, requests=64, max_new_tokens=128)
    if work.num_requests % _QUESTIONS or work.runners != ("engine",):
        raise SettingError(f"W2 has {_QUESTIONS} questions a page, and is the engine's: generate() has no caches")
    runner = open_runners(work)["engine"]
    assert isinstance(runner, EngineRunner)  # as it is named
    requests = {order: ask(work, runner.loaded, asked) for order, asked in orders(work.num_requests).items()}
    verdict = verdicts(work, {"engine": runner}, requests["round_robin"])
    measured = measure(work, runner, requests)
    [one] = runner.run([with_tokens(requests["image_major"][0], 1)])
    record = base_record(work, runner.loaded, one)
    record["work"]["pages"] = work.num_requests // _QUESTIONS
    record["decisions"] = list(runner.engine.decisions)
    save(work, record | {"verdict": verdict, "measured": {"engine": measured}})
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
