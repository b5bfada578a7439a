"""Real replicas of the tiny model: one run of all their records, and what happens when one of them fails or dies."""

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests import forked_workers
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import until_in
from tests.records import synthetic
from tests.records.synthetic import load, record_of, records_of, repeat, verdict

from panscan.bench import replicas
from panscan.bench.grid import Cell, build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.replicas import Message, Progress, Ready, ReplicaSignal, ReplicaSync, gpu_slots, merged_repeat
from panscan.bench.run import plan_of, resume, start
from panscan.core import PanscanError, PanscanWarning, RecordsError, UnsupportedError
from panscan.records.request_records import RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, LoadRecord
from panscan.records.store import AnyRecord, Run, read_run
from panscan.records.verdict_records import VerdictRecord
from panscan.settings import Settings
from panscan.verdict.judgement import verdict_of
from panscan.workload.requests import Source, load_workload

pytestmark = pytest.mark.usefixtures("without_charts")


@pytest.fixture
def folder(tmp_path: Path, documents: list[Path]) -> Path:
    return tmp_path


def plan(folder: Path, batch_sizes: list[int], **fields: Any) -> SweepPlan:
    source = Source(images=(str(folder / "*.png"),), prompt="What is it?")
    axes = {"model": ["tiny"], "batch_size": batch_sizes, "dtype": ["fp32"], "device": ["cpu"], "max_new_tokens": [4]}
    workload = load_workload(source, on_problem=print)
    return SweepPlan(cells=build_cells(axes), items=workload.items, source=source, **fields)


def workers(parent: int | None = None) -> list[psutil.Process]:
    """The replicas of a process, in the order in which they were started."""
    children = []
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if forked_workers.runs(child, "panscan.bench.replica_worker") and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
    return sorted(children, key=lambda child: child.pid)


def facts(run: Run) -> dict[tuple[str, int], list[Any]]:
    """What two runs of one plan must have in common."""
    names = ("replica", "request", "image_sha256", "views", "prompt_tokens", "output_tokens", "finish_reason")
    return {key: [[getattr(record, name) for name in names] for record in run.requests[key]] for key in run.repeats}


def test_two_replicas_make_one_run(folder: Path) -> None:
    chosen = plan(folder, [1, 2], include_content=True, warmup=0)
    watch = RecordingObserver()
    run = start(replace(chosen, replicas=2), folder / "two", [], watch)
    alone = start(replace(chosen, verify=False), folder / "one", [], RecordingObserver())
    assert (watch.loads, watch.batches, len(watch.starts), watch.problems) == (["tiny"], 3 + 2, 2, []), "one bar"
    assert (run.header.settings.replicas, run.header.settings.gpus_per_replica) == (2, 1)
    assert plan_of(run, on_problem=print) == replace(chosen, replicas=2)
    assert [(len(run.loads), len(run.truths), len(run.verdicts))] == [(2, 1, 2)]
    text = run.path.read_text()
    assert [text.count(f'"type":"{kind}"') for kind in ("load", "truth", "cell", "repeat")] == [1, 1, 2, 2]
    assert {verdict_of(run, cell).word for cell in run.cells} == {"exact"}
    assert {outcome.outcome for outcome in run.outcomes.values()} == {"done"}
    for key, line in run.repeats.items():
        for number in (0, 1):
            asked = [record for record in run.requests[key] if record.replica == number]
            assert [answer_of(record) for record in asked] == [answer_of(record) for record in alone.requests[key]]
        assert not {r.batch for r in run.requests[key] if r.replica == 0} & {
            r.batch for r in run.requests[key] if r.replica == 1
        }
        first, second = line.replicas
        for replica in line.replicas:
            assert (replica.tokens.requests, replica.tokens.equal) == (3, True), "each compares its own tokens"
        assert (line.started, line.ended) == (max(first.started, second.started), min(first.ended, second.ended))
        assert line.started < line.ended
        assert line.peak_rss_bytes == first.peak_rss_bytes + second.peak_rss_bytes
        cores = len(os.sched_getaffinity(0))
        assert {replica.torch_threads for replica in line.replicas} == {max(1, cores // 2)}


def answer_of(record: dict[str, Any]) -> Any:
    return record.request, record.content.answer, record.output_tokens


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_what_one_replica_cannot_do_fails_alone_and_a_killed_one_ends_the_run_which_resumes(folder: Path) -> None:
    """Without a file to open, replica 1 cannot read its documents; its measurement after that one is as before."""
    chosen = plan(folder, [1, 2, 3], repeats=2, verify=False, warmup=0, replicas=2)

    def limit(files: int) -> None:
        worker = workers()[1]
        _, most = worker.rlimit(resource.RLIMIT_NOFILE)
        worker.rlimit(resource.RLIMIT_NOFILE, (files, most))

    def kill() -> None:
        workers()[1].kill()

    watch = RecordingObserver({1: lambda: limit(0), 2: lambda: limit(256), 3: kill})
    with pytest.raises(PanscanError, match=r"^replica 1 was killed by SIGKILL") as caught:
        start(chosen, folder / "run", [], watch)
    assert (caught.value.exit_code, str(caught.value).count("\n")) == (1, 0)
    assert workers() == [], "the others are ended too"
    before = read_run(folder / "run")
    first, (failed, _), third, *_ = watch.starts
    reason = before.outcomes[failed].reason
    assert before.outcomes[failed].outcome == "failed"
    assert reason.startswith("replica 1: ")
    assert "too many open files" in reason
    assert watch.problems == [(failed, "failed", reason)]
    assert set(before.repeats) == {first, third}

    content = before.path.read_bytes()
    resumed = resume(plan_of(before, on_problem=print), folder / "run", RecordingObserver())
    assert resumed.path.read_bytes().startswith(content), "what was there is kept"
    assert resumed.path.read_bytes().count(b'"type":"repeat"') == 6, "and not measured again"
    alone = facts(start(replace(chosen, replicas=1), folder / "alone", [], RecordingObserver()))
    assert {key: sorted(asked) for key, asked in facts(resumed).items()} == {
        key: sorted([number, *fact] for number in (0, 1) for _, *fact in asked) for key, asked in alone.items()
    }


def test_a_replica_that_does_not_even_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", str(folder))  # without a standard library
    with pytest.raises(PanscanError, match=r"^replica [01] exited with code 1: \S"):
        start(plan(folder, [1], verify=False, replicas=2), folder / "run", [], RecordingObserver())
    assert read_run(folder / "run").finished() == set()


def test_a_replica_that_hangs_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the folder of ``tests`` is in it
    monkeypatch.setattr(replicas, "_WORKER", "tests.bench.silent_replica")
    monkeypatch.setattr(replicas, "_SILENT_SECONDS", 0.5)
    with pytest.raises(PanscanError, match=r"^replica [01] hangs: no message for"):
        start(plan(folder, [1], verify=False, replicas=2), folder / "run", [], RecordingObserver())
    assert workers() == []


def test_no_replica_outlives_the_interrupted_command(folder: Path) -> None:
    """Both are in the middle of a batch that takes minutes."""
    line = "doc2.png --model tiny --device cpu --no-verify --max-new-tokens 50000 --ignore-eos --replicas 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "panscan", "bench", *line.split()],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running: list[psutil.Process] = []
    try:
        started = b'"type":"load"'
        until_in(process, lambda: any(started in path.read_bytes() for path in folder.glob("runs/*/records.jsonl")))
        running = workers(process.pid)
        assert len(running) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate()
        assert psutil.wait_procs(running, timeout=30)[1] == []
        assert process.returncode == 130
        assert "resume with: panscan bench --resume" in said
        assert len(list(folder.glob("runs/*/summary.csv"))) == 1
    finally:  # nothing of a test that fails may work on beside the others
        for child in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()


@given(count=st.integers(1, 6), per_replica=st.integers(1, 4), total=st.integers(0, 30), named=st.booleans())
def test_slices_of_gpus_are_disjoint_and_have_both_names(count: int, per_replica: int, total: int, named: bool) -> None:
    outer = [f"GPU-{100 + index}" for index in range(total)] if named else [str(index) for index in range(total)]
    given_list = ", ".join(outer) if named else None
    if count * per_replica > total:
        with pytest.raises(UnsupportedError, match=rf"need {count * per_replica} GPUs; visible: {total}"):
            gpu_slots(count, per_replica, total, given_list)
        return
    slots = gpu_slots(count, per_replica, total, given_list)
    visible = [(slot.visible or "").split(",") for slot in slots]
    assert [len(names) for names in visible] == [per_replica] * count
    assert [name for names in visible for name in names] == outer[: count * per_replica], "no GPU twice, no other"
    for slot, names in zip(slots, visible, strict=True):
        assert [outer[int(index)] for index in slot.device.removeprefix("cuda:").split(",")] == names


def test_more_replicas_than_cores_are_warned_of() -> None:
    with pytest.warns(PanscanWarning, match="--replicas 1000 share"):
        assert replicas._threads_per_process(1000, 1, on_cpu=True) == 1
    with pytest.warns(PanscanWarning, match="--replicas 1 of 1000 processes each share"):
        assert replicas._threads_per_process(1, 1000, on_cpu=True) == 1
    with warnings.catch_warnings(action="error"):
        assert replicas._threads_per_process(1, 1, on_cpu=True) == len(os.sched_getaffinity(0))
        assert replicas._threads_per_process(1000, 1, on_cpu=False) == 1


@pytest.mark.gpu
def test_the_command_itself_takes_no_gpu(folder: Path) -> None:
    """A context takes hundreds of megabytes of the first replica's GPU."""
    code = """if True:
        import sys, torch
        from dataclasses import replace
        from pathlib import Path
        from panscan.records.environment import environment
        from panscan.bench.grid import build_cells
        from panscan.bench.replicas import slots
        from tests.bench.test_replicas import plan
        chosen = replace(plan(Path(sys.argv[1]), [1]), cells=build_cells({"model": ["tiny"], "device": ["cuda"]}))
        environment(), chosen.skipped, slots(chosen)
        sys.exit(torch._C._cuda_hasPrimaryContext(0))
    """
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replicas_on_gpus_have_one_each(folder: Path) -> None:
    chosen = plan(folder, [1], verify=False)
    chosen = replace(chosen, cells=build_cells({"model": ["tiny"], "device": ["cuda"]}), replicas=2)
    run = start(chosen, folder / "run", [], RecordingObserver())
    [line] = run.repeats.values()
    assert [replica.device for replica in line.replicas] == ["cuda:0", "cuda:1"]
    assert line.peak_allocated_bytes == sum(replica.peak_allocated_bytes for replica in line.replicas)


# Replicas in step: whichever fails wherever, and in whatever order their messages come, no process waits for ever.


def outcome(cell: str, word: str, reason: str | None = None) -> CellRecord:
    return record_of(synthetic.outcome(cell, word, reason))


def request(cell: str, name: str, accepted: float, tokens: Sequence[float], **fields: Any) -> RequestRecord:
    return record_of(synthetic.request(cell, name, accepted, tokens, **fields))


GROUPS = (("a0", "a1"), ("b0",))
"""Cells that share a load."""
REPEATS = 2
Faults = Mapping[tuple[str, int | None], str]
"""Where a replica fails: at (cell, repeat) "before" it is ready or "measuring"; at (first cell of a load, None)."""
Script = Generator[Message, ReplicaSignal | None, None]


def sync_plan() -> SweepPlan:
    cells = [Cell(name, Settings()) for group in GROUPS for name in group]
    return SweepPlan(cells=cells, items=[], source=Source(no_images=True, prompt="x"), repeats=REPEATS)


def replica(number: int, faults: Faults) -> Script:
    """What a replica says in the course of a sweep, in the order of :func:`panscan.bench.sweep.run_sweep`."""
    for group in GROUPS:
        if (group[0], None) in faults:
            for cell in group:
                yield ([outcome(cell, "failed", "load")])
            continue
        broken = set()
        for turn in range(REPEATS):
            for cell in group:
                if cell in broken:
                    continue
                fault = faults.get((cell, turn))
                go = fault != "before" and (yield Ready(cell, turn)) == ReplicaSignal.PROCEED
                if go and fault is None:
                    done = [outcome(cell, "done")] if turn == REPEATS - 1 else []
                    yield ([request(cell, "q", 0.0, [1.0], repeat=turn), line(cell, turn, number), *done])
                else:
                    broken.add(cell)
                    yield ([outcome(cell, "failed", fault or "told to give up")])


def line(cell: str, turn: int, number: int, **fields: Any) -> RepeatRecord:
    return record_of(repeat(cell, turn, 1.0 + number, 9.0 - number, **{"device": "cpu", **fields}))


def play(faults: Sequence[Faults], data: st.DataObject) -> RecordingWriter:
    """Let replicas speak in a drawn order until all are through."""
    desk = RecordingWriter()
    scripts = [replica(number, replica_faults) for number, replica_faults in enumerate(faults)]
    saying: dict[int, Message | None] = {number: next(script, None) for number, script in enumerate(scripts)}
    waiting: dict[int, Ready] = {}

    def answer(number: int, answer: ReplicaSignal) -> None:
        if answer == ReplicaSignal.PROCEED:
            assert len({*waiting.values()}) <= 1, "some started another visit than the others"
        visit = waiting.pop(number)
        assert answer == ReplicaSignal.ABORT or (visit.cell, visit.repeat) == desk.starts[-1]
        saying[number] = send(scripts[number], pickled(answer))

    step = ReplicaSync(sync_plan(), set(), [""] * len(faults), writer=desk, observer=desk, answer=answer)
    while speakers := [number for number, message in saying.items() if message is not None]:
        number = data.draw(st.sampled_from(speakers))
        message = saying[number]
        if isinstance(message, Ready):
            waiting[number], saying[number] = message, None
        else:
            saying[number] = send(scripts[number], None)
        step.take(number, pickled(message))
    assert waiting == {}, "somebody waits for ever"
    return desk


def pickled(message: Any) -> Any:
    """Return the message as the other process receives it."""
    return pickle.loads(pickle.dumps(message))


def send(script: Script, answer: ReplicaSignal | None) -> Message | None:
    try:
        return script.send(answer)
    except StopIteration:
        return None


PLACES = [(cell, turn) for group in GROUPS for cell in group for turn in range(REPEATS)]
FAULTS = st.dictionaries(st.sampled_from(PLACES), st.sampled_from(["before", "measuring"]), max_size=3)
LOADS = st.dictionaries(st.sampled_from([(group[0], None) for group in GROUPS]), st.just("load"), max_size=1)


@settings(max_examples=300)
@given(faults=st.lists(st.builds(lambda a, b: {**a, **b}, FAULTS, LOADS), min_size=1, max_size=4), data=st.data())
def test_every_cell_has_one_outcome_and_the_repeats_of_all_replicas(faults: list[Faults], data: st.DataObject) -> None:
    desk = play(faults, data)
    for group in GROUPS:
        for cell in group:
            culprits, good = first_failure(faults, group[0], cell)
            lines = [record for record in desk.records if record.cell == cell]
            assert [record.repeat for record in lines if isinstance(record, RepeatRecord)] == list(range(good))
            asked = [(record.repeat, record.replica) for record in lines if isinstance(record, RequestRecord)]
            assert asked == [(turn, number) for turn in range(good) for number in range(len(faults))]
            [last] = [record for record in lines if isinstance(record, CellRecord)]
            assert [name for name, _, _ in desk.problems].count(cell) == bool(culprits)
            assert last.outcome == ("failed" if culprits else "done")
            if len(culprits) == len(faults) and len(set(culprits.values())) == 1:
                assert last.reason == next(iter(culprits.values())), "all agree: no process is named"
            elif culprits:
                assert last.reason in [f"replica {number}: {why}" for number, why in culprits.items()]


def first_failure(faults: Sequence[Faults], load: str, cell: str) -> tuple[dict[int, str], int]:
    """Which replicas are the first to fail in a cell and why, and how many repeats went well before."""
    for turn in range(REPEATS):
        culprits = {
            number: "load" if (load, None) in replica_faults else replica_faults[cell, turn]
            for number, replica_faults in enumerate(faults)
            if (load, None) in replica_faults or (cell, turn) in replica_faults
        }
        if culprits:
            return culprits, turn
    return {}, REPEATS


def heard(*measured: tuple[str, int]) -> tuple[ReplicaSync, RecordingWriter]:
    """What takes messages of two replicas once these repeats are measured, and what it tells."""
    desk = RecordingWriter()
    return ReplicaSync(sync_plan(), {*measured}, ["", ""], writer=desk, observer=desk, answer=lambda *_: None), desk


def test_the_first_replica_alone_speaks_of_loads_and_answers() -> None:
    step, desk = heard(("a0", 0), ("a0", 1))
    for number in (0, 1):
        step.take(number, (records_of([load(["a0"], None)])))
    step.take(0, (records_of([verdict("a0", "exact", 1.0)])))
    step.take(0, ([outcome("a0", "failed", "while answers were compared")]))
    assert [type(record) for record in desk.records] == [LoadRecord, VerdictRecord, CellRecord]


def test_a_failure_after_the_last_repeat_takes_no_measurement_away() -> None:
    step, desk = heard(("a0", 0))
    last = [[*asked, structs.replace(repeat_line, repeat=1), done] for *asked, repeat_line, done in (part(0), part(1))]
    step.take(0, (last[0]))
    step.take(0, ([outcome("a0", "failed", "while answers were compared")]))
    step.take(1, (last[1]))
    assert [record.repeat for record in desk.records if isinstance(record, RepeatRecord)] == [1]
    assert [record.outcome for record in desk.records if isinstance(record, CellRecord)] == ["failed", "done"]


def test_what_else_a_replica_says() -> None:
    step, desk = heard()
    step.take(0, Progress("loading", (Settings(),)))
    step.take(0, Progress("stage", ("computing the reference",)))
    step.take(0, Progress("batch_done"))
    assert (desk.loads, desk.stages, desk.batches) == (["mini"], ["computing the reference"], 1)
    with pytest.warns(PanscanWarning, match="overflow"):
        step.take(1, "overflow")
    with pytest.raises(RecordsError, match=r"^replica 1: --reference"):
        step.take(1, RecordsError("--reference x"))


def part(number: int, **fields: Any) -> list[AnyRecord]:
    asked = [request("a0", f"q{batch}", 0.0, [1.0], batch=batch) for batch in range(3)]
    return [*asked, line("a0", 0, number, **fields), outcome("a0", "done")]


def test_merged_records_are_those_of_one_run() -> None:
    first = part(0, warmup_s=1.0, peak_allocated_bytes=5, peak_rss_bytes=None)
    second = part(1, warmup_s=2.0, peak_allocated_bytes=6, device="cuda:0")
    *asked, repeat, last = merged_repeat([first, second], ["cuda:0,1", "cuda:2,3"])
    assert [(record.replica, record.request) for record in asked] == [(n, f"q{b}") for n in (0, 1) for b in range(3)]
    assert [record.batch for record in asked] == [0, 1, 2, 3, 4, 5]
    assert (repeat.started, repeat.ended, repeat.warmup_s) == (2.0, 8.0, 2.0), "the common window"
    assert (repeat.peak_allocated_bytes, repeat.peak_rss_bytes) == (11, None)
    shares = [(share.started, share.ended, share.device) for share in repeat.replicas]
    assert shares == [(1.0, 9.0, "cpu"), (2.0, 8.0, "cuda:2,3")], "GPUs by their names outside of the processes"
    assert last == outcome("a0", "done")
