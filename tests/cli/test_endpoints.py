"""``panscan load`` and ``panscan verify``: known figures, files, exit codes and refusals."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import noise, only_run, until
from tests.load.fake_server import fake_server

from panscan.analysis.cells import cell_metrics
from panscan.cli.main import run
from panscan.core import from_perf_counter
from panscan.records.store import Run

QUICK = ["--num-warmups", "0", "--ready-check-timeout-sec", "0"]
TTFT_MS, ITL_MS, TOKENS = 40.0, 6.0, 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_ms=TTFT_MS, itl_ms=ITL_MS) as url:
        yield url


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two documents."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (folder / "docs").mkdir()
    noise(100, 150).save("docs/a.png")
    noise(200, 90, 1).save("docs/b.jpg")
    return folder


def load(*words: str, code: int = 0) -> Run:
    """Run ``panscan load`` on the documents and return its run."""
    assert run(["load", *words, "--images", "docs", "-p", "What is it?", *QUICK]) == code
    return only_run(Path())


def test_figures_are_those_of_the_server(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--request-rate", "20,40", "--arrival", "constant", "--num-prompts", "12", "--max-new-tokens", str(TOKENS)]
    words += ["--goodput", "ttft:5000", "tpot:500", "--save-result", "--include-content", "--api-key", "secret-key"]
    words += ["--images", "https://someone:hush-login@127.0.0.1:9/x.png?token=hush-token"]
    words += ["--prompt", "--api-key", "--api_key", "hush-key"]  # a prompt, then a key
    run = load(*words, f"{url}?key=hush-query", "--header", "X-Team: hidden-team")
    assert list(run.cells) == ["rate-20", "rate-40"]
    shown = capsys.readouterr().out
    first = "per request: 1 page of 100x150, 200x90 pixels, 1 view, 256 image tokens\n"
    assert shown.startswith(first)
    directory = run.path.parent
    for cell in run.cells:
        for record in run.requests[cell, 0]:
            received, *sent = (from_perf_counter(float(text)) for text in record.answer.split())
            stamps = record.stamps
            assert len(sent) == record.chunks == record.output_tokens == TOKENS
            assert record.image_tokens == 256 and stamps.accepted <= received <= sent[0]
            assert all(at > true for at, true in zip(stamps.tokens, sent, strict=True))
        metrics = cell_metrics(run, cell).values
        result: dict[str, Any] = json.loads((directory / f"vllm-{cell}.json").read_text())
        ttft, with_ramp = metrics["median_ttft_ms"], result["median_ttft_ms"]
        assert min(ttft, with_ramp) >= TTFT_MS and ttft == pytest.approx(with_ramp, rel=0.5)
        assert metrics["completed"] == result["completed"] == 12
        assert metrics["total_output_tokens"] == result["total_output_tokens"] == 12 * TOKENS
        assert result["request_goodput"] == result["request_throughput"]
        assert {"p99_ttft_ms", "std_tpot_ms", "mean_e2el_ms", "duration", "model_id", "request_rate"} <= result.keys()
    assert "20 req/s" in shown and (directory / "report.html").exists()
    everything = b"".join(file.read_bytes() for file in directory.iterdir())
    assert not [word for word in (b"secret-key", b"hidden-team", b"hush") if word in everything]
    assert run.header.command[:2] == ["panscan", "load"] and url in run.header.command


def test_a_level_without_an_answer_is_code_4(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "fake:500", "--max-concurrency", "2", "--num-prompts", "3"]
    run = load(f"{url}?key=hush", *words, "--json", code=4)
    assert run.outcomes["concurrency-2"].reason == "no request succeeded: HTTP 500: CUDA out of memory"
    said = capsys.readouterr()
    assert "refused a prompt with an image" in said.out + said.err
    assert [row["reason"] for row in json.loads(said.out)["levels"]] == [run.outcomes["concurrency-2"].reason]
    assert not [word for word in ("Traceback", "hush") if word in said.err + said.out]


def test_a_signal_ends_the_run_with_its_figures(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        first = b'"cell":"rate-40","outcome"'
        until(lambda: any(first in file.read_bytes() for file in folder.glob("runs/*/records.jsonl")))
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    run = load(url, "--request-rate", "40,0.05", "--num-prompts", "4", "--arrival", "constant", code=130)
    stopper.join()
    assert run.outcomes["rate-40"].outcome == "done"
    assert "rate-0.05" not in run.outcomes or "interrupted" in run.outcomes["rate-0.05"].reason
    assert "results so far" in capsys.readouterr().err
    assert next(Path("runs").iterdir()).joinpath("report.html").exists()


# The command ``panscan verify``: options, broken endpoints, files, and exit codes.


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An endpoint that answers with text that is not the model's; the served model's name selects a fault."""
    with fake_server(tokens=3) as url:
        yield url


def verify(url: str, *options: str) -> int:
    words = ["verify", url, "--model", "tiny", "--device", "cpu", "--max-new-tokens", "3", "--max-requests", "4"]
    return run([*words, *options])


def test_another_models_answers_differ(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "verdict.json"
    code = verify(endpoint, "--output", str(output))
    report = json.loads(output.read_text())
    shown = capsys.readouterr().out
    assert code == {"different": 5, "unknown": 6}[report["verdict"]]
    inputs, message = shown.splitlines()[:2]
    assert message.startswith(report["message"][:40])
    asked = [answer for answer in report["answers"] if answer["pixels"]]
    views = [answer["views"] for answer in asked]
    assert asked and all(answer["image_tokens"] == 64 * answer["views"] for answer in asked)
    assert inputs.startswith(f"{len(asked)} question")
    assert asked[0]["pixels"][0] in inputs and f"{max(views)} view" in inputs and f"{64 * max(views)} image" in inputs
    assert report["requests"] <= 4
    assert "Not checked: distributions: the endpoint reports no log-probabilities" in shown
    assert verify(endpoint, "--output", str(output)) == 2
    assert f"--output {output}: the file exists" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["html", "early-close", "malformed", "refuse-images", "500", "close"])
@pytest.mark.usefixtures("folder")
def test_a_broken_endpoint_ends_with_one_line(endpoint: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = ["--images", "docs/b.jpg", "--prompt", "What is it?"]  # small: an explanation computes it many times
    code = verify(endpoint, "--served-model", f"fake:{fault}", "--max-requests", "3", *page)
    shown = capsys.readouterr()
    assert code in (3, 5, 6)
    assert "Traceback" not in shown.out + shown.err
    assert code == 5 or "no verdict" in shown.out or shown.err.count("\n") == 1
