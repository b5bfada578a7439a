"""The sweep on the real tiny model: what is recorded, what is skipped, and that killing it loses nothing."""

import contextlib
import csv
import gc
import io
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import Panscan, draw_documents, noise, only_run, until_in
from tests.forked_workers import program

from panscan import GenerateRunner, __version__
from panscan.bench import sweep
from panscan.bench.grid import Cell, build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.run import new_directory, plan_of, resume, start
from panscan.bench.sweep import measure, run_sweep
from panscan.cli.main import run
from panscan.core import RecordsError, Request, Result, now
from panscan.model.machine import peak_memory, reset_peak_memory
from panscan.records.metrics import RepeatWork
from panscan.records.schema import RecordedCell
from panscan.records.scores import scores_of
from panscan.records.store import SCHEMA, Run, parse_record, read_run
from panscan.settings import Settings
from panscan.workload.requests import Source, load_workload

pytestmark = pytest.mark.usefixtures("without_charts")

TINY = ["--model", "tiny"]
SMALL = [*TINY, "--max-new-tokens", "4", "--batch-size", "1,2", "--repeats", "3", "-p", "What is it?", "--no-verify"]


@pytest.fixture
def folder(tmp_path: Path, documents: list[Path]) -> Path:
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run of :data:`SMALL` on the same documents."""
    folder = tmp_path_factory.mktemp("undisturbed")
    draw_documents(folder)
    done = bench(folder, *SMALL, "--images", "*.png")
    assert done.returncode == 0, done.stderr
    return folder


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: starting another one takes longer than most sweeps here."""
    once = [] if "--resume" in arguments or "--repeats" in arguments else ["--repeats", "1"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run(["bench", *once, *arguments])
    return subprocess.CompletedProcess(["bench", *arguments], code, stdout.getvalue(), stderr.getvalue())


def facts(run: Run) -> dict[tuple[str, int], list[Any]]:
    """What two runs of one plan must have in common: everything but times and peaks."""
    names = ("request", "image", "image_sha256", "batch", "views", "prompt_tokens", "output_tokens", "finish_reason")
    return {key: [[getattr(record, name) for name in names] for record in run.requests[key]] for key in run.repeats}


def test_a_killed_run_resumes_to_the_same_cells_and_requests(folder: Path, undisturbed: Path) -> None:
    line = [sys.executable, "-m", "panscan", "bench", *SMALL, "--images", "*.png", "--output-dir", "killed"]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        repeat, written = b'"type":"repeat"', folder / "killed"
        until_in(process, lambda: sum(path.read_bytes().count(repeat) for path in written.glob("*/*.jsonl")) >= 2)
        process.kill()
    records = only_run(folder, "killed").path
    directory = records.parent
    before = records.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    records.write_bytes(before + b'{"type":"repeat","cell":"to')  # at the latest moment
    finished = read_run(directory).finished()
    assert 2 <= len(finished) < 6, "the kill came too late to show anything"
    resumed = bench(folder, "--resume", str(directory))
    assert resumed.returncode == 0, resumed.stderr
    after = records.read_bytes()
    assert after.startswith(before), "finished work was rewritten"
    assert b"repeat" in records.with_name("records.jsonl.torn").read_bytes()
    assert after.count(b'"type":"repeat"') == 6, "finished work was measured again"
    assert facts(read_run(directory)) == facts(only_run(undisturbed))
    assert (directory / "summary.csv").exists()


def test_a_finished_run_resumes_to_itself_and_holds_no_content(undisturbed: Path) -> None:
    directory = only_run(undisturbed).path.parent
    before = (directory / "records.jsonl").read_bytes()
    assert bench(undisturbed, "--resume", str(directory)).returncode == 0
    assert (directory / "records.jsonl").read_bytes() == before
    requests = [line for line in map(json.loads, before.splitlines()) if line["type"] == "request"]
    assert {request["image"][0] for request in requests} == {"doc0.png", "doc1.png", "doc2.png"}
    assert not any("content" in request for request in requests)


def unasked(axes: dict[str, list[Any]], **fields: Any) -> SweepPlan:
    """The plan of cells without a request."""
    return SweepPlan(cells=build_cells(axes), items=[], source=Source(no_images=True, prompt="x"), **fields)


def test_order_is_random_but_seeded() -> None:
    axes = {"batch_size": [*range(1, 9)], "dtype": ["bf16", "fp32"]}
    cells = build_cells(axes)

    def order(seed: int, *, verify: bool = False) -> list[list[tuple[str, int | None]]]:
        plan = unasked(axes, repeats=2, seed=seed, verify=verify)
        return [[(cell.id, repeat) for cell, repeat in visits] for visits in plan.order()]

    assert order(1) == order(1)
    assert order(1) != order(2)
    by_load = order(1)
    assert [{repeat for _, repeat in visits} for visits in by_load] == [{0}, {0, 1}, {1}]
    measured = [visit for visits in by_load for visit in visits]
    assert sorted(measured) == sorted((cell.id, repeat) for cell in cells for repeat in range(2))
    assert [cell for cell, _ in measured[:16]] != [cell for cell, _ in measured[16:]]
    for visits, plain in zip(order(1, verify=True), by_load, strict=True):
        assert [visit for visit in visits if visit[1] is not None] == plain
        compared = [(visits[at - 1], cell) for at, (cell, repeat) in enumerate(visits) if repeat is None]
        assert compared == [(last, last[0]) for last in plain if last[1] == 1], "each right after its last repeat"


def test_one_model_is_loaded_once_and_several_take_turns() -> None:
    """In each repeat every runner has its turn, in changing order: none is always first, or measured before others."""
    one = unasked({"batch_size": [1, 2]}, repeats=5)
    assert len(list(one.order())) == 1
    assert replace(one, repeats=50_000).repeats == 50_000, "as many measurements as are allowed"
    several = unasked({"runner": ["generate", "engine", "pipeline"]}, repeats=8, verify=False)
    visits = [(cell.settings.runner, repeat) for load in several.order() for cell, repeat in load]
    assert [repeat for _, repeat in visits] == [repeat for repeat in range(8) for _ in several.cells]
    assert {visits[3 * repeat][0] for repeat in range(8)} == {"generate", "engine", "pipeline"}
    assert len(list(several.order())) == 8 * 2 + 1, "the model of a repeat's end begins the next one"


def test_repeats_go_on_until_the_interval_is_narrow() -> None:
    plan = unasked({}, repeats=5, precision=2.0)

    def work(noise: float, count: int, seconds: float = 1.0) -> list[RepeatWork]:
        return [RepeatWork(10, 100, seconds * (1 + noise * (-1) ** number)) for number in range(count)]

    assert not plan.is_last(3, work(0.0, 4)), "five at least"
    assert plan.is_last(4, work(0.01, 5)) and not plan.is_last(4, work(0.03, 5))
    assert not plan.is_last(8, work(0.2, 9)) and plan.is_last(9, work(0.2, 10)), "twice as many at most"
    assert not plan.is_last(1, work(0.5, 2, seconds=55.0))
    assert plan.is_last(0, work(0.0, 1, seconds=121.0)), "not for longer than two minutes, even if that is once"
    exactly = replace(plan, precision=None)
    assert exactly.is_last(4, work(0.5, 5)) and not exactly.is_last(3, work(0.5, 4, seconds=121.0))
    assert replace(plan, replicas=2).is_last(4, work(0.5, 5)), "replicas cannot know of each other"


def test_quantised_weights_come_after_those_whose_truth_they_share() -> None:
    plan = unasked({"quantization": ["int8", "none"], "dtype": ["fp32", "bf16"]})
    kinds = [visits[0][0].settings.quantization for visits in plan.order()]
    assert kinds == [None, None, "int8", "int8"]


# One repeat of a cell on the real model: its seeds, its memory, and memory that comes back after a failure.


@pytest.fixture
def plan(runner: GenerateRunner, tmp_path: Path) -> SweepPlan:
    noise(300, 900).save(tmp_path / "doc.png")
    source = Source(images=(str(tmp_path / "doc.png"),), prompt="What?", num_samples=3)
    settings = Settings(model="tiny", dtype="fp32", device="cpu", max_new_tokens=3, temperature=1.0)
    return SweepPlan(
        cells=[Cell.of(settings)], items=load_workload(source, on_problem=print).items, source=source, repeats=2, seed=7
    )


def test_repeats_of_a_sampled_cell_have_seeds_of_their_own(runner: GenerateRunner, plan: SweepPlan) -> None:
    runner.configure(plan.cells[0].settings)
    lines = [measure(plan, plan.cells[0], n, runner, RecordingObserver())[0] for n in (0, 1)]
    assert [line.sampling_seed for line in lines] == [7, 8]
    assert [(line.device, line.dtype) for line in lines] == [("cpu", "float32")] * 2


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
    line, requests = measure(plan, plan.cells[0], 0, runner, watcher)
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
    line, requests = measure(replace(plan, items=items), plan.cells[0], 0, runner, RecordingObserver())
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
        visits = [(plan.cells[0], 0), (plan.cells[0], 1), (other, 0)]  # what has failed is not tried again
        sweep._Sweep(plan, lines, watcher, None, set())._visit(visits, Failing())
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


# A run directory's life around the sweep: its name, its header, and the planned that comes back out of it.


QUICK = {"model": ["tiny"], "dtype": ["fp32"], "device": ["cpu"]}
SKIPPED = {"attention": ["flash_attention_2"], "device": ["cpu"]}
"""Cells that no machine measures, so that a run takes no model."""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    noise(260, 800).save(tmp_path / "a.png")
    noise(300, 300).save(tmp_path / "b.png")
    return tmp_path


def planned(axes: dict[str, list[Any]], **fields: Any) -> SweepPlan:
    source = Source(images=("a.png", "b.png"), prompt="What?", system="Be brief.", num_samples=3, seed=5)
    return SweepPlan(
        cells=build_cells(axes), items=load_workload(source, on_problem=pytest.fail).items, source=source, **fields
    )


def edited(run: Run, edit: Any) -> Run:
    """The run after an edit of its header, as another version might have written it."""
    header, *lines = run.path.read_text().splitlines()
    changed = json.loads(header)
    edit(changed)
    run.path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    return read_run(run.path)


DIRECTORIES = [
    ("google/gemma-3-27b-it", "gemma-3-27b-it"),
    ("/data/My Model_v2/", "my-model-v2"),
    (".", "model"),
    ("模", "model"),
]


@pytest.mark.parametrize(("model", "slug"), DIRECTORIES)
def test_a_new_directory_is_named_by_time_and_model(tmp_path: Path, model: str, slug: str) -> None:
    place = new_directory(tmp_path / "a" / "b", model)
    assert place.parent == tmp_path / "a" / "b"
    day, time, name = place.name.split("-", 2)
    assert (len(day), len(time), name) == (8, 6, slug)
    assert list(place.iterdir()) == []


def test_new_directories_never_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        directories = list(pool.map(new_directory, [tmp_path] * 20, ["tiny"] * 20))
    assert sorted(directories) == sorted(tmp_path.iterdir())
    assert len(directories) == 20


def test_a_run_starts_with_its_header_and_ends_with_its_summary(two: Path) -> None:
    watch = RecordingObserver()
    chosen = planned({**QUICK, "batch_size": [2], "max_new_tokens": [2]}, repeats=2, warmup=0)
    measured = start(chosen, two / "run", ["panscan", "bench", "--x", "a b"], watch)
    assert (watch.loads, watch.batches, watch.problems) == (["tiny"], 4, [])
    header = measured.header
    assert (header.schema, header.command) == (SCHEMA, ["panscan", "bench", "--x", "a b"])
    assert header.machine.panscan == __version__
    assert header.cells == [RecordedCell(cell.id, asdict(cell.settings)) for cell in chosen.cells]
    assert [len(requests) for requests in measured.requests.values()] == [3, 3]
    with (two / "run" / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["outcome"], row["completed"], row["measured_repeats"]) == ("done", "6", "2")


def test_a_second_run_into_a_directory_is_refused(two: Path) -> None:
    start(planned(SKIPPED), two / "run", [], RecordingObserver())
    before = (two / "run" / "records.jsonl").read_bytes()
    with pytest.raises(RecordsError, match="already holds a run"):
        start(planned(SKIPPED), two / "run", [], RecordingObserver())
    assert (two / "run" / "records.jsonl").read_bytes() == before


def test_nothing_is_not_resumed(two: Path) -> None:
    with pytest.raises(RecordsError, match="there is no run"):
        resume(planned(SKIPPED), two / "run", RecordingObserver())
    assert not (two / "run" / "records.jsonl").exists()


def test_the_plan_comes_back_out_of_the_records(two: Path) -> None:
    chosen = planned({**SKIPPED, "batch_size": [1, 2]}, repeats=3, warmup=2, seed=9, include_content=True)
    chosen = replace(chosen, source=replace(chosen.source, template_kwargs={"polite": True}))
    measured = start(chosen, two / "run", [], RecordingObserver())
    assert plan_of(measured, on_problem=pytest.fail) == chosen
    assert list(plan_of(measured, on_problem=pytest.fail).order()) == list(chosen.order())


@pytest.mark.parametrize("change", ["pixels", "prompt", "fewer"])
def test_another_workload_is_not_resumed(two: Path, change: str) -> None:
    measured = start(planned(SKIPPED), two / "run", [], RecordingObserver())
    if change == "pixels":
        noise(300, 300, 1).save(two / "b.png")
    elif change == "prompt":
        measured = edited(measured, lambda header: header["settings"]["source"].update(prompt="Who?"))
    else:
        measured = edited(measured, lambda header: header["settings"]["source"].update(num_samples=2))
    with pytest.raises(RecordsError, match="have changed since the run began"):
        plan_of(measured, on_problem=pytest.fail)


OTHER_HEADERS = [
    lambda header: header["settings"].pop("source"),
    lambda header: header["settings"].pop("warmup"),
    lambda header: header["settings"].pop("workload_sha256"),
    lambda header: header["settings"]["source"].update(tomorrow=1),
    lambda header: header["cells"][0]["settings"].update(tomorrow=1),
]


@pytest.mark.parametrize("edit", OTHER_HEADERS)
def test_a_header_of_another_version_is_said(two: Path, edit: Any) -> None:
    measured = edited(start(planned(SKIPPED), two / "run", [], RecordingObserver()), edit)
    with pytest.raises(RecordsError, match="another version") as caught:
        plan_of(measured, on_problem=pytest.fail)
    assert "\n" not in str(caught.value)


def test_a_run_is_not_resumed_elsewhere(two: Path, panscan: Panscan) -> None:
    panscan("bench a.png --repeats 1 --model tiny -p x --max-new-tokens 1 --device cpu")
    [records] = two.glob("runs/*/records.jsonl")
    text = records.read_text("utf-8")
    for old, new, began in (
        ('"torch":"', '"torch":"0.', "the run began with torch 0."),
        ('"cpu":"', '"cpu":"Another ', "the run began with cpu Another"),
        ('"gpus":[', '"gpus":[{"name":"X"}', "the run began with gpus [{'name': 'X'"),
        ('"tiny":"', '"tiny":"0', "the weights of tiny have changed since the run began (weights 0"),
        ('"bundled":{"', '"bundled":{"another-', "since the run began (weights of an older version, now "),
    ):
        records.write_text(text.replace(old, new, 1), "utf-8")
        words = " ".join(panscan("bench --resume", str(records.parent), code=3).err.split())
        assert began in words and words.endswith("start a new run")
