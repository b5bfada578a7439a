"""``panscan batch``: the answers of ``generate()``, and the same file whatever stopped the job; tensor parallelism."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.batch.shuffling import unchanging
from tests.conftest import Panscan, documented, file_size_limit, noise, only_run, until_in
from tests.forked_workers import runs
from tests.images.site import Site

from panscan import GenerateRunner, Sampling
from panscan.cli.main import run
from panscan.core import EngineError
from panscan.engine.loop import Loop
from panscan.model.bundled import tiny_directory
from panscan.verdict.judgement import merged_axes, verdict_of
from panscan.workload.samples import write_samples

pytestmark = pytest.mark.usefixtures("without_charts")

QUICK = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "6"]
QUESTION = "What is the total?"
RUN_DEPENDENT = ("cached_tokens", "ttft_ms", "e2el_ms", "retries")


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with a directory of two pictures (one with crops) and a PDF of two pages."""
    (folder / "docs").mkdir()
    noise(260, 800).save("docs/a.png")
    noise(90, 90, 1).save("docs/c.jpg")
    noise(150, 150, 2).save("docs/b.pdf", save_all=True, append_images=[noise(300, 130, 3)])
    return folder


def asked(*arguments: str, code: int = 0, output: str = "answers.jsonl") -> list[dict[str, Any]]:
    """The file after ``panscan batch``."""
    assert run(["batch", *QUICK, *arguments, "-o", output]) == code
    return lines_of(Path(output))


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n")[:-1]]


def test_values_reach_the_checkpoints_template(folder: Path, panscan: Panscan) -> None:
    shutil.copytree(tiny_directory(), "model")
    template = Path("model/chat_template.jinja")
    template.write_text("{{ polite }}" + template.read_text())
    words = ["docs/c.jpg", "-p", QUESTION, "--model", "model"]
    [plain], [polite] = (
        asked(*words, *values, output=f"{number}.jsonl")
        for number, values in enumerate([[], ["--template-kwargs", '{"polite": "Please, please."}']])
    )
    assert polite["prompt_tokens"] > plain["prompt_tokens"]
    said = panscan("batch --resume -o 1.jsonl", *QUICK, *words, code=3).err
    assert "was made with a different --template-kwargs" in said
    said = panscan("batch -o 2.jsonl", *QUICK, *words, "--template-kwargs", '{"rude": 1}', code=2).err
    assert "'rude' is not read by the chat template" in said


DATASET = [
    {"image": "a.png", "question": "Who?", "id": "first"},
    {"image": ["c.jpg", "a.png"], "question": "Where?", "answers": ["here"]},
]
PAGES = ["docs/a.png", "docs/b.pdf#page=1", "docs/b.pdf#page=2", "docs/c.jpg"]
ASKED = [
    (["docs", "-p", QUESTION], {name: [name] for name in PAGES}),
    (["docs/b.pdf", "-p", QUESTION, "--whole-files"], {"docs/b.pdf": PAGES[1:3]}),
    (["docs/q.jsonl"], {"first": ["a.png"], "00001": ["c.jpg", "a.png"]}),
]


@pytest.mark.parametrize(("words", "images"), ASKED)
def test_every_request_gets_the_answer_of_generate(
    folder: Path, tiny: GenerateRunner, words: list[str], images: dict[str, list[str]]
) -> None:
    Path("docs/q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in DATASET))
    lines = asked(*words, "--system", "In French.")
    assert [(line["id"], line["image"]) for line in lines] == [*images.items()]
    questions = [row["question"] for row in DATASET] if "docs/q.jsonl" in words else [QUESTION] * len(lines)
    for line, question in zip(lines, questions, strict=True):
        paths = [str(Path("docs", Path(name).name)) for name in line["image"]]
        request = tiny.request(question, paths, system="In French.", sampling=Sampling(6))
        [result] = tiny.generate([request])
        fields = ("finish_reason", "views", "crops", "prompt_tokens", "output_tokens", "error")
        assert (line["answer"], line.get("question", QUESTION)) == (result.text, question)
        assert {name: line[name] for name in fields} == {name: getattr(result, name) for name in fields}
        assert 0 < line["ttft_ms"] <= line["e2el_ms"]
    assert tuple(lines[0])[-4:] == RUN_DEPENDENT
    assert json.loads(Path("answers.jsonl.run.json").read_text())["prompt"] == (None if "-p" not in words else QUESTION)


def test_a_servers_answers_are_limited_by_its_option_only(panscan: Panscan) -> None:
    """A preset has the length of measured answers."""
    pytest.importorskip("ray")
    for words, limit in (((), 2**20), (("--max-new-tokens", "64"), 64)):
        printed, note = panscan("serve --device cpu --preset balanced", *words, "--print-config")
        assert f"max_new_tokens: {limit}\n" in printed and "ignoring max_new_tokens" in note


def test_an_interrupted_job_says_how_to_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(folder / "my samples", count=12)
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.005):
            if Path("a.jsonl").exists() and Path("a.jsonl").read_bytes():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        line = ["my samples", "-p", QUESTION, "-o", "a.jsonl", "--max-num-seqs", "1", *QUICK]
        assert run(["batch", *line, "--force"]) == 130
    finally:
        ended.set()
        watcher.join()
    hint = f"resume with: panscan batch 'my samples' -p '{QUESTION}' -o a.jsonl --max-num-seqs 1"
    assert f"{hint} --model tiny --device cpu --max-new-tokens 6 --resume\n" in capsys.readouterr().err
    assert 1 <= len(lines_of(folder / "a.jsonl")) < 12


def test_a_full_disk_ends_the_job_and_it_can_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("docs/b.pdf").unlink()  # the limit holds for the processes that decode it, too
    first = asked("docs", "-p", QUESTION, "--num-prompts", "1")
    with file_size_limit(Path("answers.jsonl").stat().st_size + 100):  # room for a part of a line
        assert asked("docs", "-p", QUESTION, "--resume", code=3) == first
    said = capsys.readouterr().err
    assert "answers.jsonl could not be written: File too large" in said
    assert "resume with: panscan batch --model tiny --device cpu --max-new-tokens 6 docs" in said
    assert len(asked("docs", "-p", QUESTION, "--resume")) == 2


def test_failed_documents_are_lines_and_can_be_asked_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("docs/a.png", "whole.png")
    cut = Path("whole.png").read_bytes()[:-2000]  # its header is fine: found out when it is decoded
    Path("docs/a.png").write_bytes(cut)
    Path("docs/d.png").write_text("not a picture")
    lines = asked("docs", "-p", QUESTION, code=3)
    captured = capsys.readouterr()
    assert [line["id"] for line in lines if line["error"]] == ["docs/a.png", "docs/d.png"]
    assert [line["id"] for line in lines][-1] == "docs/d.png"
    assert all((line["error"] is None) == (line["answer"] is not None) for line in lines)
    for line in lines:
        assert (f"failed: {line['error']}" in captured.err) == (line["error"] is not None)
    assert captured.out == "3 answered, 2 failed (ask them again with --resume --retry-failed): answers.jsonl\n"
    shutil.copy("whole.png", "docs/a.png")
    assert asked("docs", "-p", QUESTION, "--resume", code=3) == lines
    capsys.readouterr()
    again = asked("docs", "-p", QUESTION, "--resume", "--retry-failed", "--json", code=3)
    counts = documented("batch", capsys.readouterr().out)
    assert (counts["answers"], counts["requests"], counts["failed_pages"]) == ("answers.jsonl", 5, 1)
    assert [start["ending"] for start in counts["starts"]] == ["finished", "finished"]
    assert [line["id"] for line in again] == [line["id"] for line in lines]
    assert again[1:] == lines[1:]
    assert [line["id"] for line in again if line["error"]] == ["docs/d.png"]


def test_an_output_is_resumed_with_what_it_began_with_only(folder: Path, panscan: Panscan) -> None:
    first = asked("docs/a.png", "-p", QUESTION)
    before = Path("answers.jsonl").read_bytes()
    for arguments, reason in (
        ((QUESTION, "--resume", "--dtype", "bf16"), "was made with --dtype fp32, not bf16"),
        (("Who?", "--resume"), "was made with a different --prompt"),
        ((QUESTION, "--resume", "--whole-files"), "whole-files"),
    ):
        assert reason in panscan("batch docs -o answers.jsonl", *QUICK, "-p", *arguments, code=3).err
        assert Path("answers.jsonl").read_bytes() == before
    more = asked("docs", "-p", QUESTION, "--resume", "--max-num-seqs", "1", "--dtype", "fp32", "--num-prompts", "2")
    assert [line["id"] for line in more] == ["docs/a.png", "docs/b.pdf#page=1"]
    assert more[:1] == first
    assert [line["id"] for line in asked("docs/c.jpg", "-p", QUESTION, "--force")] == ["docs/c.jpg"]


def test_answers_can_be_choices_and_calls(folder: Path) -> None:
    long = ("--max-new-tokens", "40")
    choices = ("docs", "-p", QUESTION, *long, "--choice", "cash", "--choice", 'by "card"')
    lines = asked(*choices)
    assert {line["answer"] for line in lines} <= {"cash", 'by "card"'} and "tool_calls" not in lines[0]
    assert asked(*choices, "--resume") == lines
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "pay", "parameters": parameters}}]
    Path("tools.json").write_text(json.dumps(tools))
    called = ("docs", "-p", QUESTION, "--tools", "tools.json", "--tool-choice", "pay", *long)
    for line in asked(*called, output="calls.jsonl"):
        [call] = json.loads(line["tool_calls"])
        assert call["name"] == "pay" and call["arguments"] in ({"n": 1}, {"n": 2}) and line["answer"] == ""


def test_a_finished_job_loads_no_model(folder: Path) -> None:
    shutil.copytree(tiny_directory(), "checkpoint")
    model = ("--model", "./checkpoint")
    lines = asked("docs/c.jpg", "-p", QUESTION, *model)
    shutil.rmtree("checkpoint")
    assert asked("docs/c.jpg", "-p", QUESTION, *model, "--resume") == lines
    assert run(["batch", *QUICK, "docs", "-p", QUESTION, *model, "-o", "new.jsonl"]) == 3
    asked("docs/c.jpg", "-p", QUESTION, output="new.jsonl")  # what never began need not be forced


@pytest.mark.parametrize("left", ["no ledger", "the last write", "an interrupted start"])
def test_a_finished_job_whose_ledger_is_behind_completes_it(folder: Path, left: str) -> None:
    """What a process leaves that is killed after its last answer, before its ledger."""
    asked("docs", "-p", QUESTION, "--num-prompts", "2")
    path = Path("answers.jsonl.ledger.json")
    ledger = json.loads(path.read_text())
    behind = {**ledger, "starts": [{**ledger["starts"][0], "ending": "running"}]}
    if left == "the last write":
        behind |= {"requests": 0, "pages": 0, "successful_pages": 0, "prompt_tokens": 0, "output_tokens": 0}
    path.unlink() if left == "no ledger" else path.write_text(json.dumps(behind))
    asked("docs", "-p", QUESTION, "--num-prompts", "2", "--resume")
    counts = ("requests", "pages", "successful_pages", "failed_pages", "prompt_tokens", "image_tokens", "output_tokens")
    completed = json.loads(path.read_text())
    assert {name: completed[name] for name in counts} == {name: ledger[name] for name in counts}
    assert (completed["requests"], completed["starts"][-1]["ending"]) == (2, "finished")
    before = path.stat().st_mtime_ns
    asked("docs", "-p", QUESTION, "--num-prompts", "2", "--resume")
    assert path.stat().st_mtime_ns == before


def started(*arguments: str) -> list[str]:
    return ["batch", *QUICK, *arguments]


def test_answers_behind_a_slow_one_survive_kill_9(folder: Path, site: Site, panscan: Panscan) -> None:
    answering = threading.Event()
    site.before_answer = lambda path, port: answering.wait(60)
    slow = site.put("/slow.png", Path("docs/a.png").read_bytes())
    rows = [{"image": name, "question": f"{QUESTION} {name}"} for name in (slow, "a.png", "b.pdf", "c.jpg")]
    Path("docs/q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = Path("a.jsonl")
    words = ("docs/q.jsonl", "-o", "a.jsonl", "--allow-external-images")
    line = [sys.executable, "-m", "panscan", *started(*words)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until_in(process, lambda: answers.exists() and answers.read_bytes().count(b"\n") == 3)
        process.send_signal(signal.SIGKILL)
    waiting = {line["id"]: line for line in lines_of("a.jsonl")}
    assert sorted(waiting) == ["00001", "00002", "00003"]
    with answers.open("ab") as file:
        file.write(b'{"id": "0000')
    answering.set()
    assert "a.jsonl already has answers: continue with --resume" in panscan(*started(*words), code=3).err
    captured = panscan(*started(*words, "--resume"))
    assert captured.out == "4 answered: a.jsonl\n"
    lines = lines_of("a.jsonl")
    assert [line["id"] for line in lines] == ["00000", "00001", "00002", "00003"]
    assert lines[1:] == [waiting[line["id"]] for line in lines[1:]]  # their times, too: none was asked again


def test_a_failed_load_or_another_limit_keeps_failures(folder: Path, panscan: Panscan) -> None:
    originals = {name: Path(name).read_bytes() for name in ("docs/a.png", "docs/c.jpg")}
    for name in originals:
        Path(name).write_bytes(b"not a picture")
    job = ["docs", "-p", QUESTION, "-o", "a.jsonl"]
    shutil.copytree(tiny_directory(), "checkpoint")
    assert run(started(*job, "--model", "./checkpoint")) == 3
    first = Path("a.jsonl").read_bytes()
    for name, picture in originals.items():
        Path(name).write_bytes(picture)
    Path("checkpoint").rename("elsewhere")
    retry = [*job, "--resume", "--retry-failed", "--model", "./checkpoint"]
    assert run(started(*retry)) == 3
    assert Path("a.jsonl").read_bytes() == first
    Path("elsewhere").rename("checkpoint")
    assert run(started(*retry, "--num-prompts", "1")) == 3
    assert [line["error"] is None for line in lines_of("a.jsonl")] == [True, True, True, False]
    assert run(started(*retry)) == 0
    assert [(line["id"], line["error"]) for line in lines_of("a.jsonl")] == [(name, None) for name in PAGES]
    assert panscan(*started(*retry)).out == "nothing left to ask: 4 answered already: a.jsonl\n"


def test_a_broken_engine_is_no_failure_of_documents_and_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Loop.step, 0

    def breaking(loop: Loop) -> bool:
        nonlocal steps
        if steps == 8:  # six of the first document, two of the second
            raise RuntimeError("a bug")
        busy = step(loop)
        steps += busy
        return busy

    monkeypatch.setattr("sys.stdin", io.StringIO("What's\tthe total?\n"))
    monkeypatch.setattr(Loop, "step", breaking)
    one_by_one = ["--max-num-seqs", "1", "--max-concurrency", "1"]
    options = ["--overwrite=true", "--system", "--resume"]  # the second is a system prompt, which stays
    job = started("docs/c.jpg", "docs/a.png", "-o", "a.jsonl", "-p", "-", *options, *one_by_one)
    assert run(job) == EngineError.exit_code
    monkeypatch.setattr(Loop, "step", step)
    lines = lines_of("a.jsonl")
    assert [(line["id"], line["error"]) for line in lines] == [("docs/c.jpg", None)]
    said = capsys.readouterr().err
    assert "panscan: the engine stopped: RuntimeError: a bug" in said
    _, _, line = said.partition("resume with: ")
    words = shlex.split(line.partition("\npanscan: ")[0])
    assert words[-3:] == ["-p", "What's\tthe total?\n", "--resume"]
    assert run(words[1:]) == 0
    assert [line["id"] for line in lines_of("a.jsonl")] == ["docs/c.jpg", "docs/a.png"]


# ``--tensor-parallel-size`` on the command line: the same answers, and a job that a lost rank does not spoil.


SPLIT = ["--tensor-parallel-size", "2"]
SMALL = ["--model", "tiny", "--device", "cpu", "--kv-cache-gb", "0.05"]


def stop_a_rank(job: subprocess.Popen[str], output: Path, lines: int) -> None:
    """Kill one of a job's rank processes once the file has so many lines."""
    until_in(job, lambda: output.exists() and output.read_bytes().count(b"\n") >= lines)
    children = psutil.Process(job.pid).children()
    ranks = [child for child in children if runs(child, "panscan.engine.rank_worker")]
    assert len(ranks) == 2
    ranks[1].kill()


def test_a_batch_has_the_same_answers_and_outlives_a_rank(folder: Path, panscan: Panscan) -> None:
    write_samples(folder / "samples", count=8)
    line = ["samples/questions.jsonl", "--max-num-seqs", "2", "--num-prompts", "12", "--max-new-tokens", "24", *SMALL]
    assert run(["batch", *line, "-o", "whole.jsonl"]) == 0
    command = [sys.executable, "-m", "panscan", "batch", *line, *SPLIT, "-o", "split.jsonl"]
    split = folder / "split.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        stop_a_rank(job, split, 3)
        _, said = job.communicate(timeout=60)
    assert job.returncode == 1
    errors = [message for message in said.splitlines() if "rank 1 was killed by SIGKILL" in message]
    assert len(errors) == 1 and "--tensor-parallel-size 2: " in errors[0], said
    assert "Traceback" not in said
    before = split.read_bytes()
    assert 3 <= before.count(b"\n") < 12
    assert panscan("batch", *line, "-o", "split.jsonl", "--resume").out == "12 answered: split.jsonl\n"
    assert {*before.splitlines()} <= {*split.read_bytes().splitlines()}, "kept, in the order of the questions"
    assert unchanging(split) == unchanging(folder / "whole.jsonl")


def test_a_sweep_compares_sizes_and_quantised_weights(folder: Path) -> None:
    line = "bench --runner engine --repeats 1 --warmup 0 --images docs/a.png docs/c.jpg --max-new-tokens 4"
    line += " --tensor-parallel-size 1,2 --quantization none,int8"
    assert run([*line.split(), "--prompt", QUESTION, *SMALL]) == 0
    recorded = only_run(folder)
    settings = {id: cell.settings for id, cell in recorded.cells.items()}
    cells = {(values["tensor_parallel_size"], values["quantization"]): id for id, values in settings.items()}
    verdicts = {key: verdict_of(recorded, cell) for key, cell in cells.items()}
    exact = [verdicts[1, None], verdicts[2, None]]
    assert [(verdict.word, verdict.reason) for verdict in exact] == [("exact", "")] * 2
    [gpus] = [axis for axis in merged_axes(axis for verdict in exact for axis in verdict.axes) if axis.axis == "gpus"]
    assert (gpus.requests, gpus.differ) == (2, 0)
    for size in (1, 2):  # inputs of split matrices have scales per rank, so the two may differ in rounding
        answer = verdicts[size, "int8"].answer
        assert answer is not None and 1e-5 < answer.kl < 0.5
        assert recorded.loads[cells[size, "int8"]].weights == "int8"
    peaks = {cell: repeat.peak_rss_bytes for (cell, _), repeat in recorded.repeats.items()}
    if (peak := peaks[cells[1, None]]) is not None:  # the system can reset the peak of a process
        assert peaks[cells[2, None]] > 1.5 * peak, "the ranks' peaks count"
