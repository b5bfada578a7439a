"""``--tensor-parallel-size`` on the command line: the same answers, and a job that a lost rank does not spoil."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conftest import noise
from tests.forked_workers import runs

from panscan.cli.main import run
from panscan.records.store import Run, read_run
from panscan.verdict.judgement import merged_axes, verdict_of
from panscan.workload.samples import write_samples

pytestmark = pytest.mark.usefixtures("without_charts")

SPLIT = ["--tensor-parallel-size", "2"]
QUICK = ["--model", "tiny", "--device", "cpu", "--kv-cache-gb", "0.05"]
QUESTION = "What is the total?"


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with two pictures, one of them with crops."""
    (folder / "docs").mkdir()
    noise(260, 800).save("docs/a.png")
    noise(90, 90, 1).save("docs/b.png")
    return folder


def unchanging(path: Path) -> list[bytes]:
    """The lines of an answers file, up to what depends on the run."""
    return [line.partition(b', "cached_tokens"')[0] for line in path.read_bytes().split(b"\n")[:-1]]


def stop_a_rank(job: subprocess.Popen[str], output: Path, lines: int) -> None:
    """Kill one of a job's rank processes once the file has so many lines."""
    while not (output.exists() and output.read_bytes().count(b"\n") >= lines):
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert job.wait(timeout=0.01) is None, "the job ended before it could be stopped"
    children = psutil.Process(job.pid).children()
    ranks = [child for child in children if runs(child, "panscan.engine.rank_worker")]
    assert len(ranks) == 2
    ranks[1].kill()


def test_a_batch_has_the_same_answers_and_outlives_a_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(folder / "samples", count=8)
    line = ["samples/questions.jsonl", "--max-num-seqs", "2", "--num-prompts", "12", "--max-new-tokens", "24", *QUICK]
    assert run(["batch", *line, "-o", "whole.jsonl"]) == 0
    command = [sys.executable, "-m", "panscan", "batch", *line, *SPLIT, "-o", "split.jsonl"]
    split = folder / "split.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        stop_a_rank(job, split, 3)
        _, said = job.communicate(timeout=60)
    assert job.returncode == 1
    errors = [each for each in said.splitlines() if "rank 1 was killed by SIGKILL" in each]
    assert len(errors) == 1 and "--tensor-parallel-size 2: " in errors[0], said
    assert "Traceback" not in said
    before = split.read_bytes()
    assert 3 <= before.count(b"\n") < 12
    capsys.readouterr()
    assert run(["batch", *line, "-o", "split.jsonl", "--resume"]) == 0
    assert capsys.readouterr().out == "12 answered: split.jsonl\n"
    assert {*before.splitlines()} <= {*split.read_bytes().splitlines()}, "kept, in the order of the questions"
    assert unchanging(split) == unchanging(folder / "whole.jsonl")


def benched(folder: Path, *arguments: str) -> Run:
    """The run of ``panscan bench`` with the engine."""
    line = ["--runner", "engine", "--images", "docs/*.png", "--prompt", QUESTION, "--max-new-tokens", "4", *QUICK]
    assert run(["bench", "--repeats", "1", *line, "--warmup", "0", "--output-dir", "runs", *arguments]) == 0
    [directory] = (folder / "runs").iterdir()
    return read_run(directory)


def test_a_sweep_compares_sizes_and_quantised_weights(folder: Path) -> None:
    found = benched(folder, "--tensor-parallel-size", "1,2", "--quantization", "none,int8", "--repeats", "1")
    cells = {(each["tensor_parallel_size"], each["quantization"]): cell for cell, each in found.cells.items()}
    verdicts = {key: verdict_of(found, cell) for key, cell in cells.items()}
    exact = [verdicts[1, None], verdicts[2, None]]
    assert [(verdict.word, verdict.reason) for verdict in exact] == [("exact", "")] * 2
    [gpus] = [axis for axis in merged_axes(axis for verdict in exact for axis in verdict.axes) if axis.axis == "gpus"]
    assert (gpus.requests, gpus.differ) == (2, 0)
    for size in (1, 2):  # inputs of split matrices have scales per rank, so the two may differ in rounding
        answer = verdicts[size, "int8"].answer
        assert answer is not None and 1e-5 < answer.kl < 0.5
        assert found.loads[cells[size, "int8"]].weights == "int8"
    peaks = {cell: repeat.peak_rss_bytes for (cell, _), repeat in found.repeats.items()}
    if (peak := peaks[cells[1, None]]) is not None:  # the system can reset the peak of a process
        assert peaks[cells[2, None]] > 1.5 * peak, "the ranks' peaks count"
