"""Traces: every format that holds one, summaries with known times, ``panscan trace``."""

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from itertools import repeat
from pathlib import Path

import pytest
from tests.inspect.trace.hta_figures import FIGURES, hta_figures, traces
from tests.inspect.trace.kineto import HOST, KinetoTrace, busy_trace, decode_trace

from panscan.cli.main import run
from panscan.core import InputError, SettingError
from panscan.inspect.trace.output import compare, lines, page, short_names
from panscan.inspect.trace.read import TraceFile
from panscan.inspect.trace.summary import Summary, short_name, summarize


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    path = decode_trace().save(tmp_path_factory.mktemp("trace") / "decode.json.gz")
    return summarize(TraceFile(path))


def test_the_idle_gap_between_decode_steps_and_its_cause(decode: Summary) -> None:
    steps = decode.steps
    assert steps is not None and steps.cause is not None
    assert (steps.name, steps.count) == ("decode step", 3)  # nothing shows what follows the fourth
    # The gap: from the copy to the next step's first kernel.
    assert (steps.step_ms, steps.busy_ms, steps.idle_ms, steps.gap_ms) == pytest.approx((20.0, 8.01, 11.99, 11.98))
    assert (steps.kernels, steps.kernel_launches, steps.graph_launches, steps.copies) == (4, 4, 0, 1)
    assert sum(filler.self_ms for filler in steps.fillers) == pytest.approx(steps.idle_ms)
    assert decode.headline == (
        "The GPU is idle for 12.0 ms of 20.0 ms per decode step; 8.00 ms of that while the CPU runs"
        " prepare_inputs_for_generation"
    )


def test_gpu_time_over_overlapping_streams() -> None:
    trace = KinetoTrace()
    trace.launch(0, [("gemm", 100, 100)], stream=7)
    trace.launch(10, [("ncclDevKernel_AllReduce", 150, 100)], stream=20)
    trace.launch(20, [("Memcpy HtoD (Pinned -> Device)", 240, 40)], stream=24)
    trace.launch(300, [("gemm", 400, 10)], stream=7)  # launched after all had ended: host wait
    trace.launch(301, [("gemm", 430, 10)], stream=7)  # launched before the last had ended
    (gpu,) = summarize(trace.events).gpus
    assert [gpu.span_ms, gpu.busy_ms, gpu.idle_ms, gpu.host_wait_ms] == pytest.approx([0.34, 0.2, 0.14, 0.12])


def test_several_gpus_are_apart_and_idle_only_together() -> None:
    trace = KinetoTrace()
    trace.launch(0, [("a", 10, 100)], device=0)
    trace.launch(5, [("b", 110, 100)], device=1)
    summary = summarize(trace.events)
    assert [(gpu.device, gpu.idle_ms) for gpu in summary.gpus] == [("0", 0.0), ("1", 0.0)]
    assert summary.steps is not None and summary.steps.idle_ms == 0


def test_a_foreign_trace_has_steps_by_name(tmp_path: Path) -> None:
    trace = decode_trace(phases=False)
    summary = summarize(trace.events)  # Transformers' function is known
    assert summary.phases == () and summary.steps is not None
    assert (summary.steps.name, summary.steps.count, summary.steps.idle_ms) == ("decode step", 3, pytest.approx(11.99))
    assert any("no panscan.* ranges" in note for note in summary.notes)
    forward = summarize(trace.events, step="forward")
    assert forward.steps is not None and forward.steps.step_ms == pytest.approx(20.0)
    path = trace.save(tmp_path / "vllm.json")
    with pytest.raises(SettingError, match=r"--step: .* vllm\.json is named 'forwrad' \(did you mean 'forward'\?\)"):
        summarize(TraceFile(path), step="forwrad")
    with pytest.raises(SettingError, match=r"is named 'layer_kernel<2>'$"):  # kernels begin no step
        summarize(trace.events, step="layer_kernel<2>")


def test_a_step_has_no_gpu_time_of_the_prefill_and_other_threads_do_not_cut_it() -> None:
    trace = KinetoTrace()
    trace.cpu("user_annotation", "panscan.prefill", 0, 500)
    trace.launch(100, [("prefill_kernel", 200, 10_000)])
    for step in range(4):
        begin = 1000 if step == 0 else 11_000 + 1000 * step
        trace.cpu("user_annotation", "panscan.decode", begin, 400)
        trace.launch(begin + 50, [("decode_kernel", max(begin + 100, 10_200), 600)])
    trace.cpu("user_annotation", "panscan.preprocess", 12_500, 300, tid=HOST + 1)
    steps = summarize(trace.events).steps
    assert steps is not None and steps.count == 2  # not the first, which overlaps the prefill, nor the last
    assert (steps.step_ms, steps.busy_ms) == pytest.approx((1.0, 0.6))


def test_without_steps_the_whole_trace_is_one() -> None:
    trace = KinetoTrace(gpu=None)
    trace.launch(0, [("a", 10, 10)])
    trace.cpu("cpu_op", "aten::sort", 20, 60)
    trace.launch(80, [("b", 90, 10)])
    summary = summarize(trace.events)
    assert (summary.steps.name, summary.steps.step_ms, summary.steps.idle_ms) == ("trace", 0.09, 0.07)
    assert summary.headline.startswith("The GPU is idle for 70.0 us of 90.0 us from the first to the last activity")
    assert summary.headline.endswith("60.0 us of that while the CPU runs aten::sort")


def test_odd_values_neither_stop_nor_mislead() -> None:
    """Fields of the wrong type are skipped; what can be used still counts."""
    trace = decode_trace(steps=2)
    expected = summarize(trace.events)
    launch = {"ph": "X", "name": "cudaLaunchKernel", "cat": "cuda_runtime", "pid": HOST, "tid": HOST}
    odd = [
        {"ph": "X", "ts": float("nan"), "dur": 1},
        {"ph": "X", "ts": 10**400, "dur": 1},
        {"ph": "X"},
        {"ph": ["X"]},
        {"ph": "X", "ts": 1, "dur": -1},
        {"ph": "X", "ts": 1, "dur": None},
        {"ph": "X", "ts": 1, "dur": 0, "name": None, "cat": ["cpu_op"], "pid": [], "tid": {}, "args": []},
        {**launch, "ts": 1, "dur": 0, "args": {"correlation": 10**400}},
        {"ph": "X", "ts": 1000, "dur": 0, "name": "k", "cat": "kernel", "args": {"bytes": 10**400, "correlation": "x"}},
    ]
    summary = summarize([*odd, *trace.events])
    assert summary.steps.idle_ms == pytest.approx(expected.steps.idle_ms)
    assert summary.kernels[:3] == expected.kernels[:3]
    assert "5 events ignored: no usable time" in summary.notes[-1]


def test_a_trace_of_the_profiler_on_a_cpu(tmp_path: Path) -> None:
    """The real format: phases, operators and Python functions of a small model."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    def prepare_inputs(size: int) -> object:
        with record_function("prepare_inputs"):
            return torch.ones(size, size).clone()

    layer = torch.nn.Linear(64, 64)
    with (
        # Not with_stack: key_averages() of PyTorch 2.13 sometimes fails to decode the names of Python functions.
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        record_function("panscan.request"),
    ):
        for _ in range(3):
            with record_function("panscan.decode"):
                layer(prepare_inputs(64))
    path = tmp_path / "cpu.json.gz"
    profiler.export_chrome_trace(str(path))
    summary = summarize(TraceFile(path))
    assert summary.gpus == () and summary.headline.startswith("Without GPU events: the main thread is in operators")
    assert [(phase.name, phase.count) for phase in summary.phases] == [("request", 1), ("decode", 3)]
    assert summary.steps is not None and summary.steps.count == 2
    assert any("prepare_inputs" in filler.name for filler in summary.steps.fillers)
    assert {"aten::linear", "aten::addmm", "aten::clone"} <= {operator.name for operator in summary.kernels}
    measured = sum(event.self_cpu_time_total for event in profiler.key_averages() if event.key.startswith("aten::"))
    assert sum(operator.total_ms for operator in summary.kernels) == pytest.approx(measured / 1e3, rel=0.02)


def test_one_function_on_two_threads_is_one_row_with_the_time_of_both() -> None:
    """Each gap belongs to the thread that ends it; time on two stacks at once is not added up."""
    trace = KinetoTrace()
    for step in range(4):
        begin = 1000 * step
        trace.cpu("user_annotation", "panscan.decode", begin, 900)
        trace.cpu("python_function", "a.py(1): prepare", begin, 100)
        trace.launch(begin + 100, [("first", begin + 110, 90)])
        trace.cpu("python_function", "a.py(1): prepare", begin + 300, 200, tid=HOST + 1)
        trace.launch(begin + 500, [("second", begin + 510, 90)], tid=HOST + 1)
    steps = summarize(trace.events).steps
    assert steps is not None and steps.count == 3
    [prepare] = [filler for filler in steps.fillers if filler.name.endswith("prepare")]
    assert (prepare.self_ms, prepare.total_ms, prepare.stack_ms) == pytest.approx((0.3, 0.3, 0.2))
    assert prepare.depth == 0  # that of the thread with more time; inside panscan.decode on the other


# Summaries as text and as a page, comparisons, and ``panscan trace`` from the command line to its exit code.


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


# GPU times against HolisticTraceAnalysis on the same traces.


EXPECTED = json.loads(FIGURES.read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_busy_and_idle_agree_with_holistic_trace_analysis(name: str) -> None:
    (gpu,) = summarize(traces()[name].events).gpus
    expected = EXPECTED[name]
    assert gpu.span_ms == pytest.approx(expected["kernel_time(us)"] / 1e3)
    assert gpu.idle_ms == pytest.approx(expected["idle_time(us)"] / 1e3)
    assert gpu.busy_ms == pytest.approx((expected["compute_time(us)"] + expected["non_compute_time(us)"]) / 1e3)
    if len(expected["idle_by_stream"]) == 1:  # HTA splits the gaps of each stream
        [causes] = expected["idle_by_stream"].values()
        assert gpu.host_wait_ms == pytest.approx(causes["host_wait"] / 1e3)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_committed_figures_are_those_of_the_installed_version(name: str) -> None:
    pytest.importorskip("hta", reason="HolisticTraceAnalysis is not installed")
    assert hta_figures(traces()[name]) == EXPECTED[name]


# Trace files: every format that holds a trace, and one clear line for everything else.


EVENT = {"ph": "X", "name": 'é ünï \\ " {[', "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}


@pytest.fixture(scope="module")
def trace() -> KinetoTrace:
    return decode_trace()


def written(folder: Path, data: bytes | str, name: str = "t.json") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_every_format_gives_the_same_events(tmp_path: Path, trace: KinetoTrace) -> None:
    text = trace.text().encode()
    kinds = {
        "plain": text,
        "bom": b"\xef\xbb\xbf" + text,
        "indented": json.dumps(json.loads(text), indent=2).encode(),
        "gzip": gzip.compress(text),
    }
    for kind, data in kinds.items():
        assert list(TraceFile(written(tmp_path, data, "any.name"))) == trace.events, kind


@pytest.mark.parametrize("event", ["", json.dumps(EVENT)])
def test_devices_before_and_after_the_events_are_kept(tmp_path: Path, event: str) -> None:
    for text in (
        f'"deviceProperties": [1], "traceEvents": [{event}]',
        f'"traceEvents": [{event}], "deviceProperties": [1]',
    ):
        read = TraceFile(written(tmp_path, f'{{"other": {{"a": []}}, {text}, "with_stack": 1}}'))
        assert (list(read), read.devices) == ([EVENT] if event else [], [1])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_of_any_size_give_the_same_events(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, escapes, words and two-byte characters are cut at every position."""
    monkeypatch.setattr("panscan.inspect.trace.read._CHUNK", size)
    events = [dict(EVENT, n=n, flags=[True, False, None], e=-1.25e-7) for n in range(20)]
    text = json.dumps({"schemaVersion": 123, "traceEvents": events}, ensure_ascii=False)
    read = TraceFile(written(tmp_path, text))
    assert list(read) == events


GOOD = json.dumps({"traceEvents": [EVENT, EVENT]})

BAD = {
    "empty": (b"", "the file is empty"),
    "spaces": (b" \n\n ", "the file is empty"),
    "text": (b"hello", "not JSON"),
    "binary": (bytes(range(256)), "not JSON"),
    "a number": (b"12", "not JSON"),
    "other JSON": (b'{"loss": [1, 2], "epoch": 3}', "JSON, but not a trace: no traceEvents (it has loss, epoch)"),
    "empty object": (b"{}", "JSON, but not a trace: no traceEvents (it is an empty object)"),
    "an array": (b"[1, 2]", "JSON, but not a trace: an array"),
    "events that are lists": (b'{"traceEvents": [[]]}', "JSON, but not a trace: element 0 is not an event"),
    "events of another type": (b'{"traceEvents": {"a": 1}}', "JSON, but not a trace"),
    "no events": (b'{"traceEvents": []}', "the trace has no timed events"),
    "objects without times": (b'{"traceEvents": [{"a": 1}]}', "the trace has no timed events"),
    "cut in an event": (GOOD[:80].encode(), "truncated: the file ends inside"),
    "cut between events": (GOOD[: GOOD.index("}") + 1].encode(), "truncated: the file ends inside"),
    "cut before the end": (GOOD[:-1].encode(), "truncated: the file ends inside"),
    "cut metadata": (b'{"deviceProperties": [{"id"', "truncated: the file ends inside"),
    "not valid inside": (GOOD.replace("2}, ", "2}, oops ").encode() + b" " * 99, "not valid JSON after event 1"),
    "no commas": (b'{"traceEvents": [{} {}]}', "not valid JSON after event 1: expected ',' or ']', got '{'"),
    "name without quotes": (b"{traceEvents: []}" + b" " * 99, "not valid JSON at its start"),
    "brackets": (b'{"a": ' + b"[" * 200_000, "not valid JSON at its start"),
    "endless number": (b'{"a": ' + b"1" * 100_000 + b"}", "not valid JSON at its start"),
    "gzip that ends early": (gzip.compress(GOOD.encode())[:-12], "the compressed data is cut off or damaged"),
    "gzip with a wrong sum": (gzip.compress(GOOD.encode())[:-8] + b"12345678", "the compressed data is cut off or dam"),
    "gzip of nothing": (gzip.compress(b""), "the file is empty"),
    "zip": (b"PK\x03\x04...", "is a zip archive: unzip it"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_trace_is_one_line_with_the_file(tmp_path: Path, kind: str) -> None:
    data, expected = BAD[kind]
    path = written(tmp_path, data, "bad.json")
    with pytest.raises(InputError) as caught:
        summarize(TraceFile(path))
    assert str(caught.value).startswith((f"{path}: {expected}", f"{path} {expected}"))
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "fifo", "null\0"):
        with pytest.raises(InputError, match="No such file, or not a regular file: name a trace"):
            TraceFile(tmp_path / name)
    with pytest.raises(InputError, match="is a folder: name a trace in it"):
        TraceFile(tmp_path)


def test_one_huge_value_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [{"name": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
    with pytest.raises(InputError, match="an event is longer than 16 MiB"):
        summarize(TraceFile(path))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 32 MB with long arguments needs a few pieces of text."""
    event = {**EVENT, "args": {"Call stack": "x" * 8_000}}
    line = json.dumps(event).encode()
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.write(b'{"traceEvents": [\n')
        file.writelines(repeat(line + b",\n", 4_000))
        file.write(line + b"]}")
    tracemalloc.start()
    try:
        summary = summarize(TraceFile(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.events == 4_001
    assert peak < path.stat().st_size / 8


@pytest.mark.parametrize("category", ["kernel", "cpu_op"])
def test_a_trace_of_too_many_threads_or_gpus_is_refused(tmp_path: Path, category: str) -> None:
    event = {"ph": "X", "cat": category, "name": "a", "tid": 1, "dur": 1}
    events = [{**event, "pid": number, "ts": number} for number in range(4200)]
    with pytest.raises(InputError, match="more than 4,096 threads or GPUs"):
        summarize(TraceFile(written(tmp_path, json.dumps({"traceEvents": events}))))
