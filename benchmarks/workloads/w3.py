"""W3: a mixed pile that arrives over time. How much of the engine's capacity may be offered before latencies give way.

    python -m benchmarks.workloads.w3 --model-shape 27b --random-weights --output w3.json
    python -m benchmarks.workloads.w3 --model tiny --num-requests 8 --max-new-tokens 8 --output w3.json

Pages of five sizes and answers of 1/16 of ``--max-new-tokens`` up to all of it. First all at once: that is the
capacity. Then Poisson arrivals at shares of it. Goodput counts requests with TTFT <= 2 s and TPOT <= 50 ms.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from benchmarks.workloads.common import Asked, Work, ask, base_record, open_runners, parse, save, say, verdicts
from benchmarks.workloads.device import Power
from benchmarks.workloads.figures import goodput, latencies
from panscan.core import Request, Result, SettingError
from panscan.engine.engine import Engine

_SIZES = {(1240, 1754): 30, (600, 2400): 25, (2400, 900): 15, (1920, 1080): 20, (1024, 1024): 10}
"""Pixels of an A4 page, a receipt, a chart, a screenshot and a photo, and of how many percent of requests."""
_SHARES = (0.5, 0.8, 0.95)  # of the capacity
_LIMITS = {"limit_ttft_ms": 2000.0, "limit_tpot_ms": 50.0}
_WARM = 16  # requests of the turn that is thrown away


def pile(num_requests: int, most_tokens: int) -> list[Asked]:
    """Requests of drawn sizes and answers, the same for the same numbers."""
    rng = random.Random(0)
    sizes = rng.choices(list(_SIZES), weights=list(_SIZES.values()), k=num_requests)
    lengths = [rng.randint(max(1, most_tokens // 16), most_tokens) for _ in sizes]
    return [Asked(seed, seed, *each) for seed, each in enumerate(zip(sizes, lengths, strict=True))]


def arrivals(rate: float, count: int) -> list[float]:
    """Seconds at which ``count`` requests arrive, in a Poisson stream of ``rate`` a second; the same for the same."""
    rng = random.Random(1)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


async def answer(engine: Engine, requests: Sequence[Request], at: Sequence[float]) -> list[Result]:
    """Submit each request at its time; results in their order.

    Raises:
        PanscanError: of the first request that failed.
    """

    async def one(request: Request, delay: float) -> Result:
        await asyncio.sleep(delay)
        result = await engine.submit(request).result()
        if result.error is not None:
            raise result.error
        return result

    return list(await asyncio.gather(*(one(request, delay) for request, delay in zip(requests, at, strict=True))))


def turn(engine: Engine, requests: Sequence[Request], at: Sequence[float]) -> dict[str, Any]:
    """Figures of one turn, from the first arrival to the last token, from empty caches."""
    engine.reset_caches()
    with Power(engine.loaded.device) as power:
        results = asyncio.run(answer(engine, requests, at))
    seconds = max(each.stamps.tokens[-1] for each in results) - min(each.stamps.accepted for each in results)
    return {
        "requests": len(results),
        "seconds": seconds,
        "requests_per_s": len(results) / seconds,
        "output_tokens_per_s": sum(each.output_tokens for each in results) / seconds,
        "goodput": goodput(results, seconds, **_LIMITS),
        "latencies": latencies(results),
        "views": sum(each.views for each in results),
        "prompt_tokens": sum(each.prompt_tokens for each in results),
        "power": power.summary(),
    }


def measure(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """All at once, then at shares of what that gave."""
    now = [0.0] * len(requests)
    turn(engine, requests[:_WARM], now[:_WARM])
    say("all at once")
    found = {"at_once": turn(engine, requests, now)}
    for share in _SHARES:
        rate = share * found["at_once"]["requests_per_s"]
        say(f"{rate:.2f} requests a second")
        done = turn(engine, requests, arrivals(rate, len(requests)))
        found[f"at_{share:.0%}"] = {"offered_per_s": rate, **done}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work: Work = parse("w3", __doc__ or "", argv, requests=256, max_new_tokens=256)
    if work.runners != ("engine",):
        raise SettingError("W3 is the engine's: nothing else takes requests as they come")
    runner = open_runners(work)["engine"]
    loaded = runner.loaded
    requests = ask(work, loaded, pile(work.num_requests, work.settings.max_new_tokens))
    verdict = verdicts(work, {"engine": runner}, requests)
    [one] = runner.run(requests[:1])
    runner.close()  # its cache, not the model: that is still held here
    with Engine(loaded, settings=work.settings) as engine:
        measured, decisions = measure(engine, requests), list(engine.decisions)
    record = base_record(work, loaded, one)
    record["work"] |= dict.fromkeys(("views", "prompt_tokens", "image_tokens", "repeats"))  # they differ; and one turn
    record |= {"decisions": decisions, "limits": _LIMITS, "verdict": verdict}
    save(work, record | {"measured": {"engine": measured}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
