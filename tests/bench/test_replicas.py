"""Real replicas of the tiny model: one run of all their records, and what happens when one of them fails or dies."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import forked_workers
from tests.bench.observing import RecordingObserver

from panscan.bench import replicas
from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.replicas import gpu_slots
from panscan.bench.run import plan_of, resume, start
from panscan.core import PanscanError, PanscanWarning, UnsupportedError
from panscan.records.store import Run, read_run
from panscan.verdict.judgement import verdict_of
from panscan.workload.requests import Source, build_workload

pytestmark = pytest.mark.usefixtures("without_charts")


@pytest.fixture
def folder(tmp_path: Path, documents: list[Path]) -> Path:
    return tmp_path


def plan(folder: Path, batch_sizes: list[int], **fields: Any) -> SweepPlan:
    source = Source(images=(str(folder / "*.png"),), prompt="What is it?")
    axes = {"model": ["tiny"], "batch_size": batch_sizes, "dtype": ["fp32"], "device": ["cpu"], "max_new_tokens": [4]}
    return SweepPlan(cells=build_cells(axes), items=build_workload(source, on_problem=print), source=source, **fields)


def workers(parent: int | None = None) -> list[psutil.Process]:
    """The replicas of a process, in the order in which they were started."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if forked_workers.runs(child, "panscan.bench.replica_worker") and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return sorted(found, key=lambda child: child.pid)


def facts(run: Run) -> dict[tuple[str, int], list[Any]]:
    """What two runs of one plan must have in common."""
    names = ("replica", "request", "image_sha256", "views", "prompt_tokens", "output_tokens", "finish_reason")
    return {key: [[getattr(record, name) for name in names] for record in run.requests[key]] for key in run.repeats}


def test_two_replicas_make_one_run(folder: Path) -> None:
    chosen = plan(folder, [1, 2], include_content=True, warmup=0)
    watch = RecordingObserver()
    run = start(replace(chosen, replicas=2), folder / "two", [], watch)
    alone = start(replace(chosen, verify=False), folder / "one", [], RecordingObserver())
    assert (watch.loads, watch.batches, len(watch.starts), watch.problems) == (["tiny"], 3 + 2, 2, []), (
        "one bar for both"
    )
    assert (run.header.settings.replicas, run.header.settings.gpus_per_replica) == (2, 1)
    assert plan_of(run, on_problem=print) == replace(chosen, replicas=2)
    assert [(len(run.loads), len(run.truths), len(run.verdicts))] == [(2, 1, 2)]
    text = run.path.read_text()
    assert [text.count(f'"type":"{kind}"') for kind in ("load", "truth", "cell", "repeat")] == [1, 1, 2, 2]
    assert {verdict_of(run, cell).word for cell in run.cells} == {"exact"}
    assert {each.outcome for each in run.outcomes.values()} == {"done"}
    for key, line in run.repeats.items():
        for number in (0, 1):
            asked = [record for record in run.requests[key] if record.replica == number]
            assert [answer_of(record) for record in asked] == [answer_of(record) for record in alone.requests[key]]
        assert not {r.batch for r in run.requests[key] if r.replica == 0} & {
            r.batch for r in run.requests[key] if r.replica == 1
        }
        first, second = line.replicas
        for each in line.replicas:
            assert (each.tokens.requests, each.tokens.equal) == (3, True), "each compares its own tokens"
        assert (line.started, line.ended) == (max(first.started, second.started), min(first.ended, second.ended))
        assert line.started < line.ended
        assert line.peak_rss_bytes == first.peak_rss_bytes + second.peak_rss_bytes
        cores = len(os.sched_getaffinity(0))
        assert {each.torch_threads for each in line.replicas} == {max(1, cores // 2)}


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

    kept = before.path.read_bytes()
    resumed = resume(plan_of(before, on_problem=print), folder / "run", RecordingObserver())
    assert resumed.path.read_bytes().startswith(kept), "what was there is kept"
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
        while not any(b'"type":"load"' in path.read_bytes() for path in folder.glob("runs/*/records.jsonl")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(timeout=0.05) is None, "the run ended before it could be stopped"
        running = workers(process.pid)
        assert len(running) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate()
        assert psutil.wait_procs(running, timeout=30)[1] == []
        assert process.returncode == 130
        assert "resume with: panscan bench --resume" in said
        assert len(list(folder.glob("runs/*/summary.csv"))) == 1
    finally:  # nothing of a test that fails may work on beside the others
        for each in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()


@given(count=st.integers(1, 6), each=st.integers(1, 4), there=st.integers(0, 30), named=st.booleans())
def test_slices_of_gpus_are_disjoint_and_called_by_both_names(count: int, each: int, there: int, named: bool) -> None:
    outer = [f"GPU-{100 + index}" for index in range(there)] if named else [str(index) for index in range(there)]
    given_list = ", ".join(outer) if named else None
    if count * each > there:
        with pytest.raises(UnsupportedError, match=rf"need {count * each} GPUs; visible: {there}"):
            gpu_slots(count, each, there, given_list)
        return
    found = gpu_slots(count, each, there, given_list)
    visible = [(slot.visible or "").split(",") for slot in found]
    assert [len(names) for names in visible] == [each] * count
    assert [name for names in visible for name in names] == outer[: count * each], "no GPU twice, none from elsewhere"
    for slot, names in zip(found, visible, strict=True):
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
    assert [each.device for each in line.replicas] == ["cuda:0", "cuda:1"]
    assert line.peak_allocated_bytes == sum(each.peak_allocated_bytes for each in line.replicas)
