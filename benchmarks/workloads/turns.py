"""One turn of some requests, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.device import Power
from benchmarks.workloads.figures import latencies, stage_means
from panscan.core import Request, Result
from panscan.runners.base import Runner
from panscan.runners.vllm import VllmRunner


def turn_of(
    answer: Callable[[Sequence[Request]], list[Result]], requests: Sequence[Request], runner: Runner
) -> dict[str, Any]:
    """Return throughput, latencies, stages, energy and peak memory of one turn. All requests arrive at its start.

    Args:
        answer: takes all requests at once.
        requests: with their pages in memory.
        runner: answers them; its ranks, if it has any, report their own peak memory.
    """
    runner.reset_peak_memory()
    with Power(runner.loaded.device, runner.settings.tensor_parallel_size) as power:
        start = time.perf_counter()
        results = answer(requests)
        seconds = time.perf_counter() - start
    if isinstance(runner, VllmRunner):
        seconds = _inside_vllm(results)
    measured = power.summary()
    return {
        "requests": len(results),
        "seconds": seconds,
        "requests_per_s": len(results) / seconds,
        "output_tokens_per_s": sum(result.output_tokens for result in results) / seconds,
        "joules_per_request": None if measured is None else measured["joules"] / len(results),
        "cached_share": sum(result.cached_tokens for result in results)
        / sum(result.prompt_tokens for result in results),
        "latencies": latencies(results),
        "stages_ms": stage_means(results),
        "power": measured,
        **runner.peak_memory(),
    }


def _inside_vllm(results: Sequence[Result]) -> float:
    """Return the seconds of ``LLM.generate()`` alone: what panscan does before and after it is not vLLM's time."""
    stamps = results[0].stamps
    assert stamps.loaded is not None and stamps.end is not None  # the runner sets them
    return stamps.end - stamps.loaded


def with_tokens(request: Request, tokens: int) -> Request:
    """Return the same request with another number of output tokens."""
    return replace(request, sampling=replace(request.sampling, max_new_tokens=tokens))
