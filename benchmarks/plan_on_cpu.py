"""Simulated against measured on a CPU: the mini model's engine, and the simulation fed with the same run's pass times.

    python -m benchmarks.plan_on_cpu

Each round answers the same requests twice, all at once and as they arrive at half of that rate. The time of a pass is
fitted to the passes of the turn (a constant, and a share per decode row, prefill row and view); what is compared is
the rest: scheduling, preparation and waiting. Writes ``benchmarks/records/plan-on-cpu.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from panscan.core import Request, Result, Stamps, now
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import WaitForPass
from panscan.engine.request_state import RequestState
from panscan.engine.scheduling.batch import FlatBatch, PromptLayout
from panscan.engine.worker import Worker, ahead_of_need
from panscan.model.checkpoint import Loaded
from panscan.model.load import load_for
from panscan.plan.mix import RequestSketch
from panscan.plan.simulate import EngineSizes, SimulatedEngine, route_arrivals
from panscan.records.environment import environment
from panscan.settings import settings_from
from panscan.workload.requests import Source, load_workload, request_of
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "plan-on-cpu.json"
SETTINGS = {"model": "mini", "dtype": "fp32", "device": "cpu", "runner": "engine", "ignore_eos": True}
REQUESTS, ROUNDS, TOKENS = 24, 3, (4, 48)
OPTIONS = EngineOptions(prefill_chunk_size=1024, kv_cache_gb=0.2, prefix_caching=False)


class TimedRunner:
    """A model runner that keeps the size and the seconds of each pass."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.facts, self.pixels, self.sample = runner, runner.facts, runner.pixels, runner.sample
        self.passes: list[tuple[int, int, int, float]] = []

    def execute(self, batch: FlatBatch) -> WaitForPass:
        """Compute a pass; on a CPU, this returns when the pass is finished."""
        started = time.perf_counter()
        launched = self._runner.execute(batch)
        decode = sum(row.position > 0 for row in batch.sampling or ())
        self.passes.append((decode, batch.rows - decode, len(batch.encode), time.perf_counter() - started))
        return launched

    def stop(self) -> None:
        self._runner.stop()


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Pass times of one round: seconds = factors . (1, decode rows, prefill rows, views)."""

    factors: tuple[float, ...]
    prepare: float

    @classmethod
    def of(cls, passes: Sequence[tuple[int, int, int, float]], prepare: float) -> FittedTimes:
        sizes = np.array([(1, decode, prefill, views) for decode, prefill, views, _ in passes], float)
        seconds = np.array([elapsed for *_, elapsed in passes])
        return cls(tuple(np.linalg.lstsq(sizes, seconds, rcond=None)[0].tolist()), prepare)

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        rows = sum(end - start for start, end in prefill)
        return max(1e-4, float(np.dot(self.factors, (1, len(decode_contexts), rows, views))))

    def prepare_seconds(self, views: int, known: int) -> float:
        return self.prepare


def answered(
    loaded: Loaded, requests: Sequence[Request], arrivals: Sequence[float]
) -> tuple[list[Result], TimedRunner]:
    """Return the results of requests that arrive at these times, and the runner that computed them."""
    runner = TimedRunner(ModelRunner(loaded, OPTIONS))
    worker = Worker(lambda: Loop(loaded, OPTIONS, runner))
    finished: SimpleQueue[Result] = SimpleQueue()
    started = now()
    for number, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
        time.sleep(max(0.0, started + arrival - now()))
        worker.accept(state_of(number, request, finished.put))
    results = sorted((finished.get() for _ in requests), key=lambda result: int(result.id))
    worker.close()
    return results, runner


def compared(
    loaded: Loaded, requests: Sequence[Request], sketches: Sequence[RequestSketch], rate: float | None
) -> dict[str, Any]:
    """Return measured and simulated requests/s and median TTFT of one turn; at once without a rate."""
    count = len(requests)
    gaps = np.random.default_rng(0).exponential(1.0, count)
    arrivals = [0.0] * count if rate is None else (np.cumsum(gaps) / rate).tolist()
    results, runner = answered(loaded, requests, arrivals)
    stamps = [result.stamps for result in results]
    prepare = statistics.median(
        times.preprocessed - times.preparing for times in stamps if times.preprocessed and times.preparing
    )
    sizes = EngineSizes(
        kv_shape=runner.facts.kv_shape,
        slabs=runner.facts.slabs,
        window=runner.facts.window,
        prefill_chunk_size=OPTIONS.prefill_chunk_size,
        prefix_caching=False,
        overlap=False,
        ahead=ahead_of_need("cpu"),
    )
    engine = SimulatedEngine(sizes, FittedTimes.of(runner.passes, prepare))
    first = min(times.accepted for times in stamps)
    simulated = route_arrivals([engine], sketches, [times.accepted - first for times in stamps])
    return {
        "measured": figures(
            [times.tokens[-1] - first for times in stamps], [times.tokens[0] - times.accepted for times in stamps]
        ),
        "simulated": figures(
            [request.tokens[-1] for request in simulated],
            [request.tokens[0] - request.arrived for request in simulated],
        ),
        "passes": [len(runner.passes), len(engine.passes)],
    }


def figures(ends: Sequence[float], ttft: Sequence[float]) -> dict[str, float]:
    return {"requests_per_s": len(ends) / max(ends), "ttft_p50_ms": 1e3 * statistics.median(ttft)}


def requests_of(folder: Path) -> list[Request]:
    """Return requests about sample documents with answers of different lengths."""
    source = Source(dataset=str(write_samples(folder)), num_samples=REQUESTS)
    lengths = np.random.default_rng(0).integers(*TOKENS, REQUESTS, endpoint=True).tolist()
    settings = settings_from(SETTINGS)
    requests = []
    for number, (item, tokens) in enumerate(zip(load_workload(source, on_problem=print).items, lengths, strict=True)):
        request = request_of(item, settings, source)
        requests.append(
            replace(request, id=str(number), sampling=replace(request.sampling, max_new_tokens=tokens, ignore_eos=True))
        )
    return requests


def sketch_of(loaded: Loaded, request: Request) -> RequestSketch:
    """Return what the scheduler knows of a request."""
    state = state_of(0, request, lambda _: None)
    runner = ModelRunner(loaded, OPTIONS)
    Loop(loaded, OPTIONS, runner).preparer.prepare(state)
    return RequestSketch(list(state.ids), PromptLayout(state.layout.spans), request.sampling.max_new_tokens)


def state_of(number: int, request: Request, on_end: Callable[[Result], None]) -> RequestState:
    stamps = Stamps(accepted=now())
    return RequestState(number, request=request, stamps=stamps, on_event=lambda _: None, on_end=on_end, seed=0)


def main() -> None:
    import tempfile

    loaded = load_for(settings_from(SETTINGS))
    rounds = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        requests = requests_of(Path(folder) / "samples")
        sketches = [sketch_of(loaded, request) for request in requests]
        answered(loaded, requests, [0.0] * len(requests))  # warms up
        for number in range(ROUNDS):
            at_once = compared(loaded, requests, sketches, None)
            over_time = compared(loaded, requests, sketches, at_once["measured"]["requests_per_s"] / 2)
            rounds.append({"at_once": at_once, "over_time": over_time})
            for name, turn in rounds[-1].items():
                ratios = {key: turn["simulated"][key] / turn["measured"][key] for key in turn["measured"]}
                print(number, name, {key: round(value, 3) for key, value in ratios.items()}, turn["passes"], flush=True)
    record = {"requests": REQUESTS, "tokens": TOKENS, "rounds": rounds, "environment": environment(), **SETTINGS}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
