"""Summaries as text and as a page, comparisons, and ``panscan trace`` from the command line to its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.inspect.trace.kineto import KinetoTrace, busy_trace, decode_trace

from panscan.cli.main import run
from panscan.inspect.trace.output import compare, lines, page, short_names
from panscan.inspect.trace.summary import short_name, summarize


@pytest.fixture
def folder(folder: Path) -> Path:
    decode_trace().save(folder / "before.json.gz")
    decode_trace(prepare=400, graph=True).save(folder / "after.json")
    busy_trace(kernels=20).save(folder / "foreign.json")
    return folder


def test_two_traces_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "before.json.gz", "after.json", "--html", "both.html"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("20.0 ms per decode step became 12.4 ms (1.61x faster); GPU idle 12.0 ms became 4.39 ms.\n")
    assert "GPU idle 12.0 ms became 4.39 ms" in (folder / "both.html").read_text()


def test_json_has_the_summaries_and_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "before.json.gz", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"traces"}
    assert document["traces"][0]["steps"]["idle_ms"] == pytest.approx(11.99)
    assert run(["trace", "before.json.gz", "foreign.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["comparison"]["names"] == ["before.json.gz", "foreign.json"]
    assert document["comparison"]["headline"].startswith("The traces have no steps in common")


def test_the_page_holds_every_name_and_no_markup_of_the_trace() -> None:
    trace = KinetoTrace(gpu={"name": "<b>GPU</b>"})
    trace.launch(0, [("</script><script>alert(1)</script>", 10, 5)])
    trace.cpu("cpu_op", "evil\x00\u202e<img src=x>", 0, 100)
    text = page([summarize(trace.events, name="<i>name</i>")])
    assert "<script>alert" not in text and "<img" not in text and "<i>name" not in text and "<b>GPU" not in text
    assert "\x00" not in text and "\u202e" not in text
    assert "&lt;/script&gt;" in text
    assert "http://" not in text and "https://" not in text
    assert all("\x00" not in line and "\u202e" not in line for line in lines([summarize(trace.events)], width=100))


def test_notes_say_what_a_trace_lacks() -> None:
    trace = KinetoTrace(gpu={"name": "Some GPU"})
    trace.launch(0, [("k", 10, 5)])
    notes = " ".join(summarize(trace.events).notes)
    assert "no panscan.* ranges" in notes and "--step NAME" in notes and "no Python functions" in notes
    kernels = summarize([event for event in trace.events if event.get("cat") == "kernel"])
    assert any("host wait is unknown" in note for note in kernels.notes)
    assert kernels.headline == "GPU events only: 5.00 us of activity in 5.00 us"
    cpu = summarize([{"ph": "X", "ts": 0, "dur": 5, "name": "f", "pid": 1, "tid": 1}])
    assert any("no GPU events" in note for note in cpu.notes)


def test_compared_names_that_repeat_are_numbered() -> None:
    summary = summarize(decode_trace().events, name="trace.json")
    comparison = compare([summary, summary])
    assert comparison.names == ("trace.json (1)", "trace.json (2)")
    assert {figure.difference for figure in comparison.figures} == {0.0}


def test_names_are_short_and_differ() -> None:
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3>>(int)"
    assert short_name(add) == "vectorized_elementwise_kernel (CUDAFunctor_add)"
    assert short_name("/usr/lib/python3/transformers/generation/utils.py(2717): _sample") == "_sample (utils.py:2717)"
    assert short_name("## Call CompiledFxGraph fgnz2nsx4 ##") == "compiled graph"
    assert short_name("Memcpy HtoD (Pageable -> Device)") == "Memcpy HtoD (Pageable -> Device)"
    assert set(short_names(["gemm<1>", "gemm<2>", "add<1>"]).values()) == {"gemm<1>", "gemm<2>", "add"}


def test_traces_and_plans_need_no_torch(folder: Path) -> None:
    lines = [
        "import sys",
        "from panscan.cli.main import run",
        "assert run(['trace', 'before.json.gz', '--html', 't.html']) == 0",
        "plan = 'plan --model 27b --gpu h200'.split()",
        "assert run([*plan, '--json']) == 0",
        "limits = '--goodput ttft:1500 tpot:500 --output-tokens 8'.split()",
        "assert run([*plan, '--quantization', 'fp8', '--count', '1', '--request-rate', '2', *limits]) == 0",
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules",
    ]
    code = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(code, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "The GPU is idle for 12.0 ms of 20.0 ms per decode step" in done.stdout
    assert "1 replica on 1 x NVIDIA H200" in " ".join(done.stdout.split())
