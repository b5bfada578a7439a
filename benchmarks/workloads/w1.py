"""W1: distinct documents, all at once. Throughput, the request alone, decode steps, the vision tower, and the floor.

    python -m benchmarks.workloads.w1 --model-shape 27b --random-weights --output w1.json
    python -m benchmarks.workloads.w1 --model-shape 27b --random-weights --tensor-parallel-size 2 --output w1-tp2.json
    python -m benchmarks.workloads.w1 --model-shape 27b --random-weights --runner vllm --vllm-attention TRITON_ATTN \\
      --brief --output w1-vllm.json
    python -m benchmarks.workloads.w1 --model tiny --num-requests 8 --max-new-tokens 8 --output w1.json

The first line reproduces records/w1-27b.json on an H200. The last one checks on a CPU that the workload runs. Each
request is one synthetic page of 896 x 2688 pixels (four views) and a question of its own, with the same number of
prompt tokens on every tokenizer. No cache helps: prefix caching is off, as all turns ask the same. With another
--model-shape it is W4.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.common import (
    RequestSeeds,
    Work,
    ask,
    base_record,
    floors_of,
    open_runners,
    parse,
    save,
    say,
    shown,
    verdicts,
)
from benchmarks.workloads.device import Power, decode_idle, start_profiler
from benchmarks.workloads.figures import decode_window, e2e_ms, spread, stage_means, step_ms, ttft_ms
from benchmarks.workloads.floors import ratios
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request, now
from panscan.runners.base import Runner
from panscan.runners.engine import EngineRunner
from panscan.runners.vllm import VllmRunner

_STEPS_AT = (1, 64, 128)  # requests that decode together
_VIEWS_AT = (4, 32)  # views in the vision tower at once
_ALONE = 5  # times that one request is answered alone
_FIRST_TOKENS = 20  # times that its TTFT is measured: the first ones follow full load, with a hot GPU


def alone(runner: Runner, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the latencies of requests one after another: end to end, and with one output token (TTFT).

    The first of each warms up.
    """
    first = [runner.run([with_tokens(request, 1)])[0] for request in requests[: _FIRST_TOKENS + 1]][1:]
    runner.run(requests[:1])
    with Power(runner.loaded.device, runner.settings.tensor_parallel_size) as power:
        complete = [runner.run([request])[0] for request in requests[1 : _ALONE + 1]]
    measured = power.summary()
    return {
        "ttft_ms": spread([ttft_ms(result) for result in first]),
        "e2e_ms": spread([e2e_ms(result) for result in complete]),
        "stages_ms": stage_means(complete),
        "joules_per_request": None if measured is None else measured["joules"] / len(complete),
    }


def decode(runner: Runner, requests: Sequence[Request], tokens: int) -> dict[str, Any]:
    """Return the milliseconds of a step in which all of these requests decode, and the GPU's idle share.

    Args:
        runner: runs them twice where there is a GPU: the second time beside the profiler.
        requests: all at once.
        tokens: of each answer; long enough that the last has begun when the first ends.
    """
    longer = [with_tokens(request, tokens) for request in requests]
    started = now()
    stamps = [result.stamps for result in runner.run(longer)]
    step, window = step_ms(stamps), decode_window(stamps)
    measured: dict[str, Any] = {"batch": len(requests), "ms_per_step": None, "steps": 0, "idle": None}
    if step is not None and window is not None:
        measured |= {"ms_per_step": step[0], "steps": step[1]}
        if runner.loaded.device.type == "cuda" and runner.settings.tensor_parallel_size == 1:
            measured["idle"] = decode_idle(lambda: runner.run(longer), (window[0] - started, window[1] - started))
    return measured


def vision(runner: Runner, requests: Sequence[Request], views: int) -> dict[str, Any] | None:
    """Return milliseconds per view of the engine's vision stage, ``views`` in one batch; None with too few pages.

    One request with all pages, in one pass: requests of one page each would come as they are prepared.
    """
    [first] = runner.run([with_tokens(requests[0], 1)])
    count = views // first.views
    if len(requests) < count:
        return None
    chunk = count * first.prompt_tokens
    runner.configure(replace(runner.settings, prefill_chunk_size=chunk, vision_batch_size=views))
    pages = [page for request in requests[:count] for page in request.images]
    together = with_tokens(replace(requests[0], images=pages), 1)
    turns = [runner.run([together])[0] for _ in range(_ALONE + 1)][1:]
    return {"views": views, "ms_per_view": spread([result.stages_ms["vision"] / views for result in turns])}


def measure(work: Work, runners: Mapping[str, Runner], requests: Sequence[Request]) -> dict[str, Any]:
    """Return all figures by runner, one after another: an open engine changes the loaded model."""
    return {name: _measure(name, work, runner, requests) for name, runner in runners.items()}


def _measure(name: str, work: Work, runner: Runner, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the figures of one runner. Its first turn is discarded; with ``--brief``, that turn has a quarter of the
    requests, but at least a batch of ``generate()``, which compiles or plans for each batch size."""
    measured: dict[str, Any] = {"throughput": []}
    for turn in range(work.repeats + 1):
        say(f"{name}: throughput, turn {turn} of {work.repeats}")
        turn_requests = _share(name, work, requests)
        if work.brief and not turn:
            turn_requests = turn_requests[: max(work.batch_size, -(-len(turn_requests) // 4))]
        turn_record = turn_of(runner.run, turn_requests, runner)
        if turn:
            measured["throughput"].append(turn_record)
    say(f"{name}: alone")
    measured["alone"] = alone(runner, requests)
    if isinstance(runner, VllmRunner):
        measured["arguments"] = shown(runner.arguments)
    if isinstance(runner, EngineRunner):
        measured["decisions"] = list(runner.engine.decisions)
    if not work.brief:
        measured |= _kernels(name, work, runner, requests)
    if isinstance(runner, EngineRunner | VllmRunner):
        runner.drop()  # the next runner and the ceilings need its memory
    return measured


def _kernels(name: str, work: Work, runner: Runner, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the figures of decode steps, and those of the engine's vision tower."""
    say(f"{name}: decode")
    most = len(_share(name, work, requests))
    sizes = dict.fromkeys(min(size, most) for size in _STEPS_AT)
    tokens = work.settings.max_new_tokens
    batches = [decode(runner, requests[:size], tokens if size == 1 else 2 * tokens) for size in sizes]
    if not isinstance(runner, EngineRunner):
        return {"decode": batches}
    say(f"{name}: vision")
    visions = [vision(runner, requests, views) for views in _VIEWS_AT]
    return {"decode": batches, "vision": [figures for figures in visions if figures is not None]}


def against_floor(measured: dict[str, Any], floors: dict[str, float]) -> dict[str, float]:
    """Return the figures of one runner as ratios to the floors of the same names."""
    figures: dict[str, float | None] = {
        "requests_per_s": spread([turn["requests_per_s"] for turn in measured["throughput"]])["median"],
        "ttft_ms": measured["alone"]["ttft_ms"]["median"],
        "e2e_ms": measured["alone"]["e2e_ms"]["median"],
        **{f"step_ms_{step['batch']}": step["ms_per_step"] for step in measured.get("decode", ())},
    }
    if measured.get("vision"):
        figures["vision_ms_per_view"] = measured["vision"][-1]["ms_per_view"]["median"]
    return ratios(figures, floors)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("w1", __doc__ or "", argv, requests=128, max_new_tokens=128, prefix_caching=False)
    runners = open_runners(work)
    first = next(iter(runners.values()))
    if not work.brief:
        start_profiler(first.loaded.device)
    requests = ask(work, first.loaded, [RequestSeeds(seed, seed) for seed in range(work.num_requests)])
    verdict = verdicts(work, runners, requests)
    [result] = first.run([with_tokens(requests[0], 1)])
    measured = measure(work, runners, requests)
    floor = {}
    for name, figures in measured.items():
        steps = tuple(step["batch"] for step in figures.get("decode", ()))
        batch = figures["throughput"][0]["requests"]
        floor[name] = floors_of(first.loaded, work.settings, result).as_dict(batch, steps)
        figures["ratios"] = against_floor(figures, floor[name])
    save(work, base_record(work, first.loaded, result) | {"verdict": verdict, "measured": measured, "floor": floor})
    for runner in runners.values():
        runner.close()
    return 0


def _share(name: str, work: Work, requests: Sequence[Request]) -> Sequence[Request]:
    """Return the requests of a turn: one batch of ``generate()``, which answers a few per second at best."""
    return requests[: work.batch_size] if name == "generate" else requests


if __name__ == "__main__":
    sys.exit(main())
