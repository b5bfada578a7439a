"""Runner ``engine``: in a sweep beside ``generate``, with verdicts through its own passes; what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import noise
from tests.engine.driving import TINY_ENGINE
from tests.verdict.test_cells import STEPS as VERDICT_STEPS
from tests.verdict.test_cells import Bench as VerdictBench

from panscan import GenerateRunner, PanAndScan, Request
from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.sweep import run_sweep
from panscan.core import ImageError, UnsupportedError
from panscan.model.support import unsupported_reason
from panscan.records.request_records import RequestRecord
from panscan.records.verdict_records import VerdictRecord
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import open_runner, ready_runner
from panscan.settings import ENGINE_AXES, ENGINE_LIMITS, Settings, axes, settings_from
from panscan.verdict.cells import Verifier
from panscan.verdict.references import References

STEPS = 6
SMALL = {**TINY_ENGINE, "max_new_tokens": STEPS, "kv_cache_gb": 0.02}


def batch() -> list[Request]:
    settings = settings_from(SMALL)
    fields = {"pan_and_scan": PanAndScan(max_num_crops=2), "sampling": settings.sampling}
    return [
        Request(prompt="What is it?", images=[noise(300, 900)], id="a", **fields),
        Request(prompt="And this, the second one?", images=[noise(200, 200, 1)], id="b", **fields),
        Request(prompt="No picture at all.", id="c", **fields),
    ]


def test_a_sweep_of_both_runners(tmp_path: Path) -> None:
    """Both are exact; the engine has one cell however many batch sizes there are, with all requests in one call."""
    bench = VerdictBench(tmp_path)
    fixed = {"model": "tiny", "dtype": "fp32", "device": "cpu", "max_new_tokens": "6", "kv_cache_gb": "0.02"}
    flags = {"runner": ["generate", "engine"], "batch_size": ["1", "3"], "max_num_seqs": ["2"]}
    flags |= {name: [value] for name, value in fixed.items()}
    cells = build_cells(flags)
    assert [(cell.settings.runner, cell.settings.batch_size, cell.settings.max_num_seqs) for cell in cells] == [
        ("generate", 1, Settings().max_num_seqs),
        ("generate", 3, Settings().max_num_seqs),
        ("engine", 1, 2),
    ]
    plan = SweepPlan(cells=cells, items=bench.items, source=bench.source, include_content=True)
    lines = RecordingWriter()
    verifier = Verifier(References(bench.items, bench.source, STEPS, None, [], lines.write, lambda _: None))
    run_sweep(plan, lines, set(), RecordingObserver(), verifier)
    verdicts = {line.cell: line for line in lines.records if isinstance(line, VerdictRecord)}
    assert [verdicts[cell.id].verdict for cell in cells] == ["exact"] * 3
    assert all(verdict.equal_tokens for verdict in verdicts.values())
    answers: dict[str, list[str]] = {cell.id: [] for cell in cells}
    for line in lines.records:
        if isinstance(line, RequestRecord):
            answers[line.cell].append(line.content.answer)
            assert (line.stamps.scheduled is not None) == (line.cell == cells[2].id)
            assert line.cell != cells[2].id or line.batch == 0
    assert answers[cells[0].id] == answers[cells[1].id] == answers[cells[2].id]


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_size": 100}, {"max_num_seqs": 2}], ids=str)
def test_its_verdict_in_bf16_is_exact(tmp_path: Path, changes: dict[str, int]) -> None:
    settings = settings_from({**SMALL, "dtype": "bf16", "max_new_tokens": VERDICT_STEPS, **changes})
    runner = ready_runner(settings)
    verdict = VerdictBench(tmp_path).verifier().verdict(runner, settings)
    assert (verdict.verdict, verdict.reason) == ("exact", None)
    assert verdict.image is not None and verdict.image.positions > 0
    runner.close()


def test_each_call_begins_with_empty_caches(tiny: GenerateRunner) -> None:
    runner = EngineRunner(tiny.loaded, settings_from(SMALL))
    first, second = runner.run(batch()), runner.run(batch())
    assert runner.engine.generate(batch())[0].cached_tokens > 20
    runner.drop()
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    assert max(each.cached_tokens for each in [*first, *second]) < 20, "no more than how all turns begin"


def test_a_request_that_fails_is_raised(tiny: GenerateRunner, tmp_path: Path) -> None:
    runner = EngineRunner(tiny.loaded, settings_from(SMALL))
    with pytest.raises(ImageError, match="none"):
        runner.run([*batch(), Request(prompt="What?", images=[tmp_path / "none.png"])])
    assert len(runner.run(batch())) == 3
    runner.drop()


def test_what_only_one_of_them_has_is_refused() -> None:
    other = {"attention": "eager", "cache": "static", "compile": "default", "batch_size": 2, "equal_views": True}
    assert other.keys() == ENGINE_LIMITS.keys()
    for name, value in other.items():
        reason = unsupported_reason(replace(settings_from(SMALL), **{name: value}))
        assert reason is not None and f"--{name.replace('_', '-')} must " in reason
    changed = {"max_concurrency": 3, "max_num_seqs": 3, "kv_cache_gb": 0.5, "prefix_caching": False}
    changed |= {"vision_cache_gb": 0.5, "vision_batch_size": 3, "attention_backend": "sdpa", "image_memory_gb": 0.5}
    changed |= {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "gpu_memory_gb": 8.0, "kv_cache_dtype": "fp8"}
    changed |= {"tpot_target_ms": 40.0}
    assert changed.keys() == set(ENGINE_AXES) and changed.keys() <= axes().keys()
    for name, value in changed.items():
        reason = unsupported_reason(replace(Settings(device="cpu"), **{name: value}))
        assert reason is not None and f"--{name.replace('_', '-')} is for --runner engine" in reason
    with pytest.raises(UnsupportedError, match="--cache"):
        ready_runner(settings_from({**SMALL, "cache": "static"}))


def test_the_engine_is_made_anew_for_other_sizes_only(tiny: GenerateRunner) -> None:
    """A cell's settings reach the engine; requests' settings need no other engine."""
    settings = settings_from(SMALL)
    runner = open_runner(settings)
    runner.configure(settings)
    runner.run(batch())
    first = runner.engine
    runner.configure(replace(settings, max_new_tokens=3, pan_and_scan_max_num_crops=1))
    runner.run(batch())
    assert runner.engine is first
    runner.configure(replace(settings, prefill_chunk_size=64))
    runner.run(batch())
    assert runner.engine is not first
    assert runner.engine.options.prefill_chunk_size == 64
    runner.close()
