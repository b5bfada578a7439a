"""W1 with quantised weights on a large GPU, also limited to the memory of smaller GPUs. One load per kind.

    python -m benchmarks.workloads.quantized --model-shape 27b --random-weights --quantization int4 \
        --memory 40,24 --output w1-27b-int4.json

The weights are quantised as they are drawn, and the record holds the peak memory of loading. With the whole GPU memory,
the benchmark measures the throughput of 128 requests and the latency of a single one. For each ``--memory`` in GB, it
measures the throughput of ``--fewer`` requests and how many ran concurrently. The engine enforces the memory limit
(``--gpu-memory-gb``), so compute and bandwidth remain those of the large GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from benchmarks.workloads.common import RequestSeeds, ask, base_record, open_runners, parse, save, say, verdicts
from benchmarks.workloads.turns import turn_of, with_tokens
from benchmarks.workloads.w1 import alone
from panscan.core import Request, Result
from panscan.model.machine import peak_memory, reset_peak_memory
from panscan.runners.engine import EngineRunner

_FEWER = 48


def measure(runner: EngineRunner, requests: Sequence[Request], repeats: int) -> dict[str, Any]:
    """Return throughput turns of all requests, after a short warm-up, and the engine's startup decisions."""
    runner.run([with_tokens(request, 2) for request in requests[:8]])
    results: list[Result] = []

    def answer(batch: Sequence[Request]) -> list[Result]:
        results[:] = runner.run(batch)
        return results

    turns = []
    for turn in range(repeats):
        say(f"throughput, turn {turn + 1} of {repeats}, {len(requests)} requests")
        turns.append(turn_of(answer, requests, runner))
    return {"throughput": turns, "most_at_once": most_at_once(results), "decisions": list(runner.engine.decisions)}


def most_at_once(results: Sequence[Result]) -> int:
    """Return the largest number of requests that were between their first and last tokens at the same time."""
    starts = [(result.stamps.tokens[0], 1) for result in results]
    ends = [(result.stamps.tokens[-1], -1) for result in results]
    return max(accumulate(change for _, change in sorted(starts + ends)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure W1 and write the record."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--memory", default="")
    parser.add_argument("--fewer", type=int, default=_FEWER)
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, rest = parser.parse_known_args(arguments)
    work = parse("quantized", __doc__ or "", rest, requests=128, max_new_tokens=128, prefix_caching=False)
    work = replace(work, command=shlex.join(["python", "-m", "benchmarks.workloads.quantized", *arguments]))
    reset_peak_memory()
    [runner] = open_runners(work).values()
    assert isinstance(runner, EngineRunner)
    loading = peak_memory()
    requests = ask(work, runner.loaded, [RequestSeeds(seed, seed) for seed in range(work.num_requests)])
    verdict = verdicts(work, {"engine": runner}, requests)
    [result] = runner.run([with_tokens(requests[0], 1)])
    record = base_record(work, runner.loaded, result) | {"verdict": verdict, "loading": loading}
    record["measured"] = measure(runner, requests, work.repeats) | {"alone": alone(runner, requests)}
    for memory in filter(None, options.memory.split(",")):
        say(f"memory limit {memory} GB")
        runner.configure(replace(work.settings, gpu_memory_gb=float(memory)))
        record[f"measured_{memory}gb"] = measure(runner, requests[: options.fewer], 1)
    save(work, record)
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
