"""One configuration of :mod:`benchmarks.phases`, measured in one process with one load of the weights.

    python -m benchmarks.phases_worker 27b:bf16:1 --output part.json

Requests are those of W1: one synthetic page (four views) and one question each. Milliseconds throughout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.phases import Configuration
from benchmarks.workloads.common import RequestSeeds, Work, ask, say
from benchmarks.workloads.device import Power
from benchmarks.workloads.figures import e2e_ms, latencies, spread, stage_means, step_ms, ttft_ms
from benchmarks.workloads.turns import with_tokens
from panscan.core import PanAndScan, Request, Result, now
from panscan.core.files import write_file
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.model.ceilings import measure_ceilings
from panscan.model.load import load_for, load_meta_model_for
from panscan.model.machine import peak_memory, release_memory, reset_peak_memory
from panscan.model.runtime import apply_attention, forbid_tf32
from panscan.records.environment import environment
from panscan.settings import Settings, settings_from

_TURNS = 3  # of what takes milliseconds, after one that warms up
_WARM_UP = 24  # requests that run first: kernels are compiled for the row counts of their passes
_FEW = 8  # requests of the middle decode batch


class _Bench:
    """A model that is loaded once, and engines of different options on it, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ranks: RankGroup | None = None
        self._engine: Engine | None = None
        if settings.tensor_parallel_size > 1:
            self.loaded = load_meta_model_for(settings)
            self._ranks = RankGroup(settings)
        else:
            self.loaded = load_for(settings)
            apply_attention(self.loaded.model, settings.attention)
            forbid_tf32()

    def open(self, settings: Settings) -> list[str]:
        """Open an engine with these settings in place of the previous one, and return its startup decisions."""
        self._close_engine()
        self._engine = Engine(self.loaded, EngineOptions.of(settings), settings, ranks=self._ranks)
        return list(self._engine.decisions)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Answer requests with empty caches, all at once.

        Raises:
            PanscanError: of a request that failed.
        """
        assert self._engine is not None  # it is open
        self._engine.reset_caches()
        results = dict(self._engine.stream_results(requests, max_concurrency=len(requests)))
        for result in results.values():
            if result.error is not None:
                raise result.error
        return [results[index] for index in range(len(requests))]

    def peaks(self) -> list[dict[str, int | None]]:
        """Return the peak bytes of each computing process since the last call, and reset the peaks."""
        if self._ranks is not None:
            return self._ranks.peak_memory()
        peaks = peak_memory()
        reset_peak_memory()
        return [peaks]

    def close(self) -> None:
        """Close the engine and the ranks."""
        self._close_engine()
        if self._ranks is not None:
            self._ranks.close()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            release_memory()


def weight_bytes(bench: _Bench) -> int | None:
    """Return the bytes of all weights; None where ranks have them."""
    if bench.settings.tensor_parallel_size > 1:
        return None
    model = bench.loaded.model
    sizes: list[int] = [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]
    return sum(sizes)


def alone(bench: _Bench, requests: Sequence[Request]) -> dict[str, Any]:
    """Return TTFT and stages of single requests with one output token, and one request's end-to-end latency."""
    first = [bench.run([with_tokens(request, 1)])[0] for request in requests[: _TURNS + 1]][1:]
    [complete] = bench.run(requests[:1])
    return {
        "ttft_ms": spread([ttft_ms(result) for result in first]),
        "stages_ms": {name: spread([result.stages_ms[name] for result in first]) for name in first[0].stages_ms},
        "e2e_ms": e2e_ms(complete),
        "step": decode_step([complete]),
    }


def decode_step(results: Sequence[Result]) -> dict[str, Any]:
    """Return the decode step of requests that ran at once, while all of them decoded."""
    step = step_ms([result.stamps for result in results])
    return {
        "batch": len(results),
        "ms_per_step": None if step is None else step[0],
        "steps": 0 if step is None else step[1],
        "output_tokens": results[0].output_tokens,
    }


def w1(bench: _Bench, requests: Sequence[Request]) -> dict[str, Any]:
    """Return throughput and latencies of all requests at once, and the end and tokens of every pass."""
    with Power(bench.loaded.device) as power:
        start = now()
        results = bench.run(requests)
        seconds = now() - start
    ends = Counter(stamp for result in results for stamp in result.stamps.tokens)
    return {
        "requests": len(results),
        "seconds": seconds,
        "requests_per_s": len(results) / seconds,
        "latencies": latencies(results),
        "stages_ms": stage_means(results),
        "step": decode_step(results),
        "passes": [[round(1e3 * (stamp - start), 2), count] for stamp, count in sorted(ends.items())],
        "power": power.summary(),
    }


def long_prompt(bench: _Bench, request: Request) -> dict[str, Any]:
    """Return the stages of one request that a single pass computes."""
    turns = [bench.run([with_tokens(request, 1)])[0] for _ in range(_TURNS + 1)][1:]
    first = turns[0]
    return {
        "views": first.views,
        "prompt_tokens": first.prompt_tokens,
        "vision_ms_per_view": spread([result.stages_ms["vision"] / first.views for result in turns]),
        "prefill_ms": spread([result.stages_ms["prefill"] for result in turns]),
        "ttft_ms": spread([ttft_ms(result) for result in turns]),
    }


def long_prompts(bench: _Bench, requests: Sequence[Request], pages: Sequence[int]) -> list[dict[str, Any]]:
    """Return the stages of prompts with one view, and with all views of each number of pages."""
    single = replace(requests[0], pan_and_scan=PanAndScan(enabled=False))
    joined = [
        replace(requests[0], images=[page for request in requests[:count] for page in request.images])
        for count in pages
    ]
    return [long_prompt(bench, request) for request in (single, *joined)]


def measure(configuration: Configuration, options: argparse.Namespace) -> None:
    """Measure one configuration, saving after every phase."""
    quantization = None if configuration.kind == "bf16" else configuration.kind
    settings = settings_from(
        {
            "runner": "engine",
            "model_shape": configuration.shape,
            "random_weights": True,
            "quantization": quantization,
            "tensor_parallel_size": configuration.ranks,
            "device": options.device,
            "prefix_caching": False,
            "ignore_eos": True,
            "max_new_tokens": options.output_tokens,
            "preprocess": "cpu" if options.device == "cpu" else "device",
        }
    )
    record: dict[str, Any] = {"settings": settings.changed(), "seconds": {}}
    began = now()

    def save(phase: str, **values: Any) -> None:
        nonlocal began
        record.update(values)
        record["seconds"][phase] = round(now() - began, 2)
        began = now()
        write_file(options.output, json.dumps(record, allow_nan=False).encode())
        say(f"{configuration}: {phase}: {record['seconds'][phase]} s")

    bench = _Bench(settings)
    bench.peaks()
    save(
        "load",
        environment=environment(),
        weight_bytes=weight_bytes(bench),
        loaded=bench.peaks(),
        dtype=str(bench.loaded.dtype),
    )
    work = Work("phases", settings, ("engine",), options.requests, 1, 0, options.output, "")
    pages = [int(count) for count in options.pages.split(",")]
    requests = ask(work, bench.loaded, [RequestSeeds(seed, seed) for seed in range(max(options.requests, *pages))])
    save("pages")
    if configuration.ranks == 1:
        save("ceilings", ceilings=asdict(measure_ceilings(bench.loaded.device, bench.loaded.dtype)))
        release_memory()
    try:
        _measure(bench, requests, options.requests, pages, save)
    finally:
        bench.close()


def _measure(bench: _Bench, requests: Sequence[Request], count: int, pages: Sequence[int], save: Any) -> None:
    """Measure with the default options, then with passes that hold the longest prompt."""
    settings = bench.settings
    save("engine", decisions=bench.open(settings))
    bench.run([with_tokens(request, 4) for request in requests[:_WARM_UP]])
    save("warm-up")
    save("alone", alone=alone(bench, requests))
    few = bench.run(
        [with_tokens(request, max(2, settings.sampling.max_new_tokens // 2)) for request in requests[:_FEW]]
    )
    save("decode", decode=decode_step(few))
    bench.peaks()
    save("w1", w1=w1(bench, requests[:count]))
    save("peaks", peaks=bench.peaks())
    [result] = bench.run([with_tokens(requests[0], 1)])
    work = {
        "views": result.views,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": settings.sampling.max_new_tokens,
    }
    longest = max(pages) * result.prompt_tokens
    wide = replace(settings, prefill_chunk_size=longest, vision_batch_size=max(pages) * result.views)
    save("wide engine", work=work, wide_decisions=bench.open(wide))
    save("long prompts", long_prompts=long_prompts(bench, requests, pages))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases_worker", description=__doc__)
    parser.add_argument("configuration", help="SHAPE:KIND:RANKS")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--pages", default="1,2,8")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.device == "auto" and not torch.cuda.is_available():
        options.device = "cpu"
    measure(Configuration.of(options.configuration), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
