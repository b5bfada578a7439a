"""One repeat of a cell on the real model: its seeds, its memory, and memory that comes back after a failure."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import noise
from tests.forked_workers import program

from panscan import GenerateRunner
from panscan.bench import sweep
from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.sweep import measure, run_sweep
from panscan.core import Request, Result, now
from panscan.model.machine import peak_memory, reset_peak_memory
from panscan.records.request_records import RepeatRecord
from panscan.records.scores import scores_of
from panscan.records.store import parse_record
from panscan.settings import Settings
from panscan.workload.requests import Source, build_workload


@pytest.fixture
def plan(runner: GenerateRunner, tmp_path: Path) -> SweepPlan:
    noise(300, 900).save(tmp_path / "doc.png")
    source = Source(images=(str(tmp_path / "doc.png"),), prompt="What?", num_samples=3)
    settings = Settings(model="tiny", dtype="fp32", device="cpu", max_new_tokens=3, temperature=1.0)
    return SweepPlan(
        cells=[Cell.of(settings)], items=build_workload(source, on_problem=print), source=source, repeats=2, seed=7
    )


def test_a_sampled_cell_records_its_seed_and_repeats_are_draws_of_their_own(
    runner: GenerateRunner, plan: SweepPlan
) -> None:
    runner.configure(plan.cells[0].settings)
    repeats = [
        [r for r in measure(plan, plan.cells[0], n, runner, RecordingObserver()) if isinstance(r, RepeatRecord)]
        for n in (0, 1)
    ]
    assert [line.sampling_seed for [line] in repeats] == [7, 8]
    assert [(line.device, line.dtype) for [line] in repeats] == [("cpu", "float32")] * 2


@pytest.mark.parametrize(("finished", "loads"), [((), 4), ((1, 2), 2)], ids=["ABBAAB", "A needs one repeat: ABBB"])
def test_a_model_stays_loaded_until_another_is_needed(plan: SweepPlan, finished: Sequence[int], loads: int) -> None:
    """In turns, three repeats of two models are four loads; where one needs no more repeats, the other stays."""
    first = plan.cells[0]
    cells = [first, Cell.of(replace(first.settings, dtype="bf16"))]
    chosen = replace(plan, cells=cells, items=plan.items[:1], repeats=3, warmup=0, verify=False)
    lines, [[(early, _)], *_] = RecordingWriter(), chosen.order()
    run_sweep(chosen, lines, {(early.id, repeat) for repeat in finished}, RecordingObserver())
    kinds = [type(record).__name__ for record in lines.records]
    assert (kinds.count("LoadRecord"), kinds.count("RepeatRecord")) == (loads, 6 - len(finished))


def test_warm_up_is_not_measured(runner: GenerateRunner, plan: SweepPlan) -> None:
    runner.configure(plan.cells[0].settings)
    watcher = RecordingObserver()
    *requests, line = measure(plan, plan.cells[0], 0, runner, watcher)
    assert watcher.batches == len(requests) == 3
    assert line.warmup_s > 0
    assert all(request.stamps.accepted >= line.started for request in requests)
    assert all(request.stamps.end <= line.ended for request in requests)


def test_answers_are_scored_when_the_time_has_been_taken(
    runner: GenerateRunner, plan: SweepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[float] = []

    def score(text: str, answers: Sequence[str]) -> dict[str, float]:
        scored.append(now())
        return scores_of(text, answers)

    monkeypatch.setattr(sweep, "scores_of", score)
    items = [replace(item, answers=("x",), tags=(("type", "form"),)) for item in plan.items]
    runner.configure(plan.cells[0].settings)
    *requests, line = measure(replace(plan, items=items), plan.cells[0], 0, runner, RecordingObserver())
    assert len(scored) == len(requests)
    assert min(scored) >= line.ended
    assert all(request.tags == {"type": ["form"]} and "anls" in request.scores for request in requests)


def test_a_failing_cell_lets_go_of_what_it_held(plan: SweepPlan) -> None:
    """What a failed batch had allocated must be free before the next cell starts."""
    held: list[weakref.ref[Any]] = []
    alive_at_next: list[bool] = []

    class Failing:
        loaded: Any = SimpleNamespace(device=torch.device("cpu"))
        settings = plan.cells[0].settings

        def configure(self, settings: Settings) -> None:
            if held:
                alive_at_next.append(held[0]() is not None)

        def run(self, batch: list[Request]) -> list[Result]:
            big = torch.zeros(10)
            held.append(weakref.ref(big))
            raise torch.OutOfMemoryError(f"no room beside {big.numel()} numbers")

        def close(self) -> None: ...

    other = Cell.of(Settings(model="tiny", dtype="fp32", device="cpu", batch_size=2))
    watcher, lines = RecordingObserver(), RecordingWriter()
    gc.disable()
    try:
        sweep._Sweep(plan, lines, watcher, None, set())._visit([(plan.cells[0], 0), (other, 0)], Failing())
    finally:
        gc.enable()
    assert alive_at_next == [False]
    assert [outcome for _, outcome, _ in watcher.problems] == ["oom", "oom"]
    assert [record.outcome for record in lines.records] == ["oom", "oom"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be reset here")
def test_peak_memory_is_since_the_last_reset() -> None:
    big = bytearray(300 << 20)
    big[::4096] = b"x" * len(big[::4096])
    high = peak_memory()["peak_rss_bytes"] or 0
    del big
    reset_peak_memory()
    peaks = peak_memory()
    assert high - (peaks["peak_rss_bytes"] or 0) > 200 << 20
    if not torch.cuda.is_available():
        assert (peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory that allocations obey is Linux's")
def test_where_no_memory_is_left_a_load_is_recorded_without_ceilings() -> None:
    """In a process of its own, which may take 64 MiB more than it has: half of what a ceiling's copy reads."""
    code = """if True:
        import msgspec, resource
        from panscan.bench.grid import Cell
        from panscan.bench.sweep import _load_record
        from panscan.runners.generate import GenerateRunner
        import panscan.model.ceilings, panscan.model.gemma3.config
        import psutil

        runner = GenerateRunner.from_pretrained("tiny", dtype="fp32", device="cpu")
        most = psutil.Process().memory_info().vms + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        print(msgspec.json.encode(_load_record([Cell.of(runner.settings)], runner, 1.0)).decode())
    """
    done = subprocess.run(program(code), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    record = parse_record(done.stdout.encode())
    assert (record.flops_per_s, record.bytes_per_s) == (None, None)
