"""The engine against Transformers' `generate()` on a CPU, on the tiny model, interleaved in one process.

    python benchmarks/engine_on_cpu.py

One request at a time: seconds of the same requests, one after the other. Sixteen requests of mixed views: `generate()`
one by one and in batches of 4 and 16 (padded), the engine with all of them in flight and empty caches. Greedy, 32
output tokens each; tokens must be equal.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from panscan import GenerateRunner, Request, Result
from panscan.records.environment import environment
from panscan.runners.base import Runner
from panscan.runners.engine import EngineRunner
from panscan.settings import settings_from
from panscan.workload.requests import Source, load_workload, request_of
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "engine-on-cpu.json"
ROUNDS = 9
REQUESTS = 16
SETTINGS = {"model": "tiny", "dtype": "fp32", "device": "cpu", "max_new_tokens": 32, "ignore_eos": True}


def timed(work: Callable[[], list[Result]]) -> tuple[float, list[list[int]]]:
    """Return the seconds that some work takes, and its tokens."""
    start = time.perf_counter()
    results = work()
    return time.perf_counter() - start, [result.token_ids for result in results]


def one_by_one(runner: Runner, requests: Sequence[Request]) -> Callable[[], list[Result]]:
    return lambda: [runner.run([request])[0] for request in requests]


def batched(runner: Runner, requests: Sequence[Request], size: int) -> Callable[[], list[Result]]:
    return lambda: [
        result for start in range(0, len(requests), size) for result in runner.run(requests[start : start + size])
    ]


def main() -> None:
    settings = settings_from(SETTINGS)
    runner = GenerateRunner.from_settings(settings)
    engine = EngineRunner(runner.loaded, replace(settings, runner="engine"))
    with tempfile.TemporaryDirectory() as folder:
        source = Source(dataset=str(write_samples(Path(folder) / "samples")), num_samples=REQUESTS)
        requests = [request_of(item, settings, source) for item in load_workload(source, on_problem=print).items]
        methods = {
            "generate, one by one": one_by_one(runner, requests),
            "engine, one by one": one_by_one(engine, requests),
            "generate, batches of 4": batched(runner, requests, 4),
            "generate, batches of 16": batched(runner, requests, 16),
            "engine, 16 in flight": lambda: engine.run(requests),
        }
        views = sum(result.views for result in runner.run(requests))
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        tokens = {}
        for turn in range(ROUNDS + 1):
            for name, work in methods.items():
                spent, tokens[name] = timed(work)
                if turn:  # the first warms
                    seconds[name].append(spent)
    if any(answers != tokens["generate, one by one"] for answers in tokens.values()):
        raise SystemExit("the tokens differ: no record is written")
    record = {"requests": REQUESTS, "views": views, "seconds": seconds, "environment": environment(), **SETTINGS}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    others = [method for method in methods if method.startswith("generate")]
    for name, baseline in (("engine, one by one", others[0]), *(("engine, 16 in flight", method) for method in others)):
        ratios = [slow / fast for slow, fast in zip(seconds[baseline], seconds[name], strict=True)]
        print(f"{name}: {statistics.median(ratios):.2f}x the throughput of {baseline} (median of {ROUNDS} rounds)")
    engine.close()


if __name__ == "__main__":
    main()
