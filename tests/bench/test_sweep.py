"""The sweep on the real tiny model: what is recorded, what is skipped, and that killing it loses nothing."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import draw_documents

from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.cli.main import run
from panscan.records.metrics import RepeatWork
from panscan.records.store import Run, read_run
from panscan.workload.requests import Source

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


def only_run(folder: Path) -> Path:
    [directory] = (folder / "runs").iterdir()
    return directory


def facts(run: Run) -> dict[tuple[str, int], list[Any]]:
    """What two runs of one plan must have in common: everything but times and peaks."""
    names = ("request", "image", "image_sha256", "batch", "views", "prompt_tokens", "output_tokens", "finish_reason")
    return {key: [[getattr(record, name) for name in names] for record in run.requests[key]] for key in run.repeats}


def test_a_killed_run_resumes_to_the_same_cells_and_requests(folder: Path, undisturbed: Path) -> None:
    line = [sys.executable, "-m", "panscan", "bench", *SMALL, "--images", "*.png", "--output-dir", "killed"]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while sum(path.read_bytes().count(b'"type":"repeat"') for path in folder.glob("killed/*/records.jsonl")) < 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(timeout=0.02) is None, "the run ended before it could be killed"
        process.kill()
    [directory] = (folder / "killed").iterdir()
    before = (directory / "records.jsonl").read_bytes()
    finished = read_run(directory).finished()
    assert 2 <= len(finished) < 6, "the kill came too late to show anything"
    resumed = bench(folder, "--resume", str(directory))
    assert resumed.returncode == 0, resumed.stderr
    after = (directory / "records.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1]), "finished work was rewritten"
    assert after.count(b'"type":"repeat"') == 6, "finished work was measured again"
    assert facts(read_run(directory)) == facts(read_run(only_run(undisturbed)))
    assert (directory / "summary.csv").exists()


def test_a_finished_run_resumes_to_itself_and_holds_no_content(undisturbed: Path) -> None:
    directory = only_run(undisturbed)
    before = (directory / "records.jsonl").read_bytes()
    assert bench(undisturbed, "--resume", str(directory)).returncode == 0
    assert (directory / "records.jsonl").read_bytes() == before
    requests = [line for line in map(json.loads, before.splitlines()) if line["type"] == "request"]
    assert {request["image"][0] for request in requests} == {"doc0.png", "doc1.png", "doc2.png"}
    assert not any("content" in request for request in requests)


def test_what_this_machine_cannot_do_is_a_skipped_cell(folder: Path) -> None:
    line = (
        "doc0.png --device cpu --max-new-tokens 2 --attn_impl sdpa,flash_attention_2 --runner generate,generate_batch"
    )
    done = bench(folder, *line.split(), *TINY)
    assert done.returncode == 4
    run = read_run(only_run(folder))
    found = {(run.cells[cell]["runner"], run.cells[cell]["attention"]): o.outcome for cell, o in run.outcomes.items()}
    assert found == {
        ("generate", "sdpa"): "done",
        ("generate", "flash_attention_2"): "skipped",
        ("generate_batch", "sdpa"): "skipped",
        ("generate_batch", "flash_attention_2"): "skipped",
    }
    assert "flash_attention_2 makes Gemma 3's image tokens causal" in done.stdout + done.stderr
    assert "generate_batch: images are not supported" in done.stdout + done.stderr


def test_a_failure_in_a_cell_is_an_outcome_and_the_sweep_goes_on(folder: Path) -> None:
    """A prompt without its image fails in one cell; batches without trouble are measured in the other."""
    done = bench(folder, "doc0.png", *TINY, "--raw-prompt", "-p", "no place for an image", "--max-new-tokens", "2")
    assert done.returncode == 4
    [outcome] = read_run(only_run(folder)).outcomes.values()
    assert outcome.outcome == "failed"
    assert "0 image placeholder(s)" in outcome.reason


def test_order_is_random_but_seeded() -> None:
    cells = build_cells({"batch_size": [str(n) for n in range(1, 9)], "dtype": ["bf16", "fp32"]})

    def order(seed: int, *, verify: bool = False) -> list[list[tuple[str, int | None]]]:
        plan = SweepPlan(
            cells=cells, items=[], source=Source(no_images=True, prompt="x"), repeats=2, seed=seed, verify=verify
        )
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
    source = Source(no_images=True, prompt="x")
    one = SweepPlan(cells=build_cells({"batch_size": ["1", "2"]}), items=[], source=source, repeats=5)
    assert len(list(one.order())) == 1
    cells = build_cells({"runner": ["generate", "engine", "pipeline"]})
    several = SweepPlan(cells=cells, items=[], source=source, repeats=8, verify=False)
    visits = [(cell.settings.runner, repeat) for load in several.order() for cell, repeat in load]
    assert [repeat for _, repeat in visits] == [repeat for repeat in range(8) for _ in cells]
    assert {visits[3 * repeat][0] for repeat in range(8)} == {"generate", "engine", "pipeline"}
    assert len(list(several.order())) == 8 * 2 + 1, "the model of a repeat's end begins the next one"


def test_repeats_go_on_until_the_interval_is_narrow() -> None:
    plan = SweepPlan(cells=[], items=[], source=Source(no_images=True, prompt="x"), repeats=5, precision=2.0)

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
    cells = build_cells({"quantization": ["int8", "none"], "dtype": ["fp32", "bf16"]})
    plan = SweepPlan(cells=cells, items=[], source=Source(no_images=True, prompt="x"))
    kinds = [visits[0][0].settings.quantization for visits in plan.order()]
    assert kinds == [None, None, "int8", "int8"]
