"""Simulated against measured: W1 and W2 (benchmarks/workloads) and mixed documents under load, 27B on one H200.

    python -m benchmarks.plan_simulation

Each committed record is replayed: the same numbers of views, prompt tokens, output tokens and arrival times go through
:mod:`panscan.plan.simulate` instead of an engine. Nothing runs on a GPU, and nothing is fitted here. Writes
``benchmarks/records/plan-simulation.json``.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, as people do

from benchmarks.markdown import table
from panscan.engine.options import EngineOptions
from panscan.model.shapes import SHAPES
from panscan.plan.gpus import gpu_named
from panscan.plan.layouts import ClockTimes, PlanInputs, layout_of
from panscan.plan.mix import PageShare, RequestSketch, WorkloadMix
from panscan.plan.simulate import SimulatedEngine, SimulatedRequest, route_arrivals
from panscan.records.store import Run, read_run
from panscan.settings import default_of

RECORDS = Path(__file__).parent / "records"
RECORD = RECORDS / "plan-simulation.json"
CPU_RECORD = RECORDS / "plan-on-cpu.json"
TARGET = 0.2
QUESTIONS = 4  # of each page in W2
FIGURES = ("requests_per_s", "ttft_p95_ms", "ttft_p50_ms", "tpot_p50_ms")

Figures = dict[str, float]


def mix_of(prompt_tokens: int, views: int, output_tokens: int) -> WorkloadMix:
    """Return a mix of equal requests with these tokens."""
    mix = WorkloadMix((PageShare(views, 1.0),), 1, (output_tokens, output_tokens))
    return replace(mix, text_tokens=prompt_tokens - mix.prompt_tokens(views) + 1)


def engine_for(
    mix: WorkloadMix, *, prefix_caching: bool, served: bool = False, tpot_target: float | None = None
) -> SimulatedEngine:
    """Return one engine on an H200 with the options of the records; ``served``: behind panscan serve."""
    inputs = PlanInputs(shape=SHAPES["27b"], gpu=gpu_named("h200"), count=1, mix=mix, options=EngineOptions())
    layout = layout_of(inputs, None, 1)
    assert layout is not None  # the whole model on one GPU
    sizes = layout.sizes(inputs.options, prefix_caching=prefix_caching, gpu=inputs.gpu)
    sizes = replace(sizes, tpot_target=tpot_target)
    return SimulatedEngine(sizes, ClockTimes(inputs.clock(layout.variant), served=served))


def burst(engine: SimulatedEngine, sketches: Sequence[RequestSketch]) -> Figures:
    """Return the figures of requests that all arrive at the start."""
    started = engine.now
    requests = route_arrivals([engine], sketches, [started] * len(sketches))
    return figures(requests, max(request.tokens[-1] for request in requests) - started)


def figures(requests: Sequence[SimulatedRequest], seconds: float) -> Figures:
    stamps = [request.times.stamps for request in requests]
    ttft = [time for times in stamps if (time := times.ttft) is not None]
    tpot = [time for times in stamps if (time := times.tpot) is not None]
    return {
        "requests_per_s": len(requests) / seconds,
        "ttft_p50_ms": 1e3 * float(np.percentile(ttft, 50)),
        "ttft_p95_ms": 1e3 * float(np.percentile(ttft, 95)),
        "tpot_p50_ms": 1e3 * float(np.percentile(tpot, 50)),
    }


def of_turns(turns: Sequence[dict[str, Any]]) -> Figures:
    """Return the medians of a workload's turns."""

    def median(get: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(get, turns))

    return {
        "requests_per_s": median(lambda turn: turn["requests_per_s"]),
        "ttft_p50_ms": median(lambda turn: turn["latencies"]["ttft_ms"]["p50"]),
        "ttft_p95_ms": median(lambda turn: turn["latencies"]["ttft_ms"]["p95"]),
        "tpot_p50_ms": median(lambda turn: turn["latencies"]["tpot_ms"]["p50"]),
    }


def w1() -> list[dict[str, Any]]:
    """Return the row of W1: distinct documents, all at once."""
    record = json.loads((RECORDS / "w1-27b.json").read_text("utf-8"))
    work = record["work"]
    mix = mix_of(work["prompt_tokens"], work["views"], work["output_tokens"])
    simulated = burst(engine_for(mix, prefix_caching=False), mix.requests(work["requests"]))
    measured = of_turns(record["measured"]["engine"]["throughput"])
    return [row("w1-27b.json", "W1: distinct documents at once", measured, simulated)]


def w2() -> list[dict[str, Any]]:
    """Return the rows of W2: four questions per page, page after page, in rounds, and with everything cached."""
    record = json.loads((RECORDS / "w2-27b.json").read_text("utf-8"))
    work, measured = record["work"], record["measured"]["engine"]
    views, tokens = work["views"], work["output_tokens"]
    mix = mix_of(work["prompt_tokens"], views, tokens)
    pages = range(work["pages"])
    sketches = [[mix.sketch(page, QUESTIONS * page + n, views, tokens) for n in range(QUESTIONS)] for page in pages]
    page_after_page = [sketch for page in sketches for sketch in page]
    in_rounds = [sketch for sketch_round in zip(*sketches, strict=True) for sketch in sketch_round]
    engine = engine_for(mix, prefix_caching=True)
    simulated = {
        "image_major": burst(engine_for(mix, prefix_caching=True), page_after_page),
        "round_robin": burst(engine, in_rounds),
        "all_cached": burst(engine, in_rounds),
    }
    names = {"image_major": "page after page", "round_robin": "in rounds", "all_cached": "all cached"}
    return [
        row("w2-27b.json", f"W2: four questions per page, {name}", of_turns(measured[key]), simulated[key])
        for key, name in names.items()
    ]


def w3() -> list[dict[str, Any]]:
    """Return the rows of W3: mixed documents over HTTP that arrive over time, with the TPOT target and without."""
    rows = []
    for record, target in (("w3-27b-panscan", default_of("tpot_target_ms", "serve") / 1e3), ("w3-27b-unpaced", None)):
        run = read_run(RECORDS / record)
        for cell in run.cells:
            rate = run.level(cell).request_rate
            name = f"W3: mixed documents, {rate:g} requests/s" + ", no TPOT target" * (not target)
            rows.append(row(record, name, *of_level(run, cell, target)))
    return rows


def of_level(run: Run, cell: str, tpot_target: float | None) -> tuple[Figures, Figures]:
    """Return the measured and the simulated figures of a level."""
    records = run.answered(cell)
    start = min(record.due or 0.0 for record in records)
    sketches, measured = [], []
    for number, record in enumerate(records):
        mix = mix_of(record.prompt_tokens or 0, record.views or 0, record.output_tokens)
        sketches.append(mix.sketch(number, number, record.views or 0, record.output_tokens))
        stamps = [stamp - start for stamp in record.stamps.tokens]
        measured.append(SimulatedRequest(sketches[-1], record.stamps.accepted - start, stamps))
    order = sorted(range(len(records)), key=lambda index: measured[index].arrived)
    engine = engine_for(mix_of(1102, 4, 256), prefix_caching=True, served=True, tpot_target=tpot_target)
    arrivals = [measured[index].arrived for index in order]
    simulated = route_arrivals([engine], [sketches[index] for index in order], arrivals)
    return _over_time(measured), _over_time(simulated)


def _over_time(requests: Sequence[SimulatedRequest]) -> Figures:
    """Return the figures of requests of an open loop, which starts at 0."""
    return figures(requests, max(request.tokens[-1] for request in requests))


def row(record: str, name: str, measured: Figures, simulated: Figures) -> dict[str, Any]:
    """Return one row of the record."""
    ratios = {figure: simulated[figure] / measured[figure] for figure in FIGURES}
    return {"record": record, "name": name, "measured": measured, "simulated": simulated, "ratios": ratios}


def simulate_records() -> list[dict[str, Any]]:
    """Return measured and simulated figures of all records, with their ratios."""
    return [*w1(), *w2(), *w3()]


def factors_digest() -> str:
    """Return the SHA-256 of the efficiency factors: after they change, the record must be made again."""
    return hashlib.sha256(files("panscan.plan").joinpath("efficiency.json").read_bytes()).hexdigest()


def plan_simulation() -> str:
    """Return the table of simulated against measured figures."""
    record = json.loads(RECORD.read_text("utf-8"))
    rows = [
        [
            workload["name"],
            *(
                text
                for figure, digits in (("requests_per_s", 2), ("ttft_p95_ms", 0), ("tpot_p50_ms", 1))
                for text in (
                    f"{workload['measured'][figure]:,.{digits}f}",
                    f"{workload['simulated'][figure]:,.{digits}f}",
                    f"{100 * (workload['ratios'][figure] - 1):+.0f}%",
                )
            ),
        ]
        for workload in record["rows"]
    ]
    headings = ["workload"]
    for figure in ("req/s", "TTFT p95 ms", "TPOT p50 ms"):
        headings += [figure, "simulated", "error"]
    inside = sum(abs(workload["ratios"][name] - 1) <= TARGET for workload in record["rows"] for name in FIGURES[:2])
    notes = (
        f"27B shape in bf16 on one NVIDIA H200. Requests/s and TTFT p95 within {TARGET:.0%}: {inside} of"
        f" {2 * len(record['rows'])}. Record: `benchmarks/records/plan-simulation.json`. Command:"
        " `python -m benchmarks.plan_simulation`"
    )
    return table(headings, rows) + "\n\n" + notes


def plan_on_cpu() -> str:
    """Return the table of simulated over measured figures."""
    record = json.loads(CPU_RECORD.read_text("utf-8"))
    rows = []
    for turn, name in (("at_once", "all at once"), ("over_time", "arriving at half of that rate")):
        comparisons = [round_turns[turn] for round_turns in record["rounds"]]
        ratios = []
        for key in ("requests_per_s", "ttft_p50_ms"):
            values = [comparison["simulated"][key] / comparison["measured"][key] for comparison in comparisons]
            ratios.append(f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        measured, simulated = zip(*(comparison["passes"] for comparison in comparisons), strict=True)
        passes = [", ".join(map(str, counts)) for counts in (measured, simulated)]
        rows.append([name, *ratios, *passes])
    headings = ["requests", "requests/s: simulated / measured", "TTFT p50", "passes, measured", "simulated"]
    facts = record["environment"]
    notes = (
        f"{record['requests']} requests of {record['tokens'][0]} to {record['tokens'][1]} output tokens, mini model,"
        f" float32, {len(record['rounds'])} rounds, on {facts['cpu']}, {facts['cpu_count']} cores. Record:"
        " `benchmarks/records/plan-on-cpu.json`. Command: `python -m benchmarks.plan_on_cpu`"
    )
    return table(headings, rows) + "\n\n" + notes


def main() -> None:
    rows = simulate_records()
    RECORD.write_text(json.dumps({"factors_sha256": factors_digest(), "rows": rows}, indent=1) + "\n", "utf-8")
    for workload in rows:
        ratios = ", ".join(f"{name} {workload['ratios'][name]:.2f}" for name in FIGURES)
        print(f"{workload['name']}: simulated / measured: {ratios}")


if __name__ == "__main__":
    main()
