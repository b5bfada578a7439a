"""Trace files: every format that holds a trace, and one clear line for everything else."""

import gzip
import json
import os
import tracemalloc
from itertools import repeat
from pathlib import Path

import pytest
from tests.inspect.trace.kineto import KinetoTrace, decode_trace

from panscan.core import InputError
from panscan.inspect.trace.read import TraceFile
from panscan.inspect.trace.summary import summarize

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
