"""Files that survive a crash, logs of whole lines, locks that name their holder; JSON that strangers wrote."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import file_size_limit

from panscan.core import InputError, RecordsError, files, foreign
from panscan.core.files import JsonLog, WriteLock, complete_size, replace_file, write_file
from panscan.core.foreign import DEEPEST, MOST_COUNT, is_count, parse_json

HOLDER = """
import sys
from pathlib import Path
from panscan.core.files import WriteLock
lock = WriteLock(Path(sys.argv[1]), RuntimeError)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_file(path, "old \udce9")
    with file_size_limit(10), pytest.raises(InputError, match=r"page\.html could not be written: File too l") as caught:
        write_file(path, "x" * 20)
    assert type(caught.value) is InputError  # a page is no record
    with pytest.raises(RecordsError, match="No such file or directory"):
        write_file(tmp_path / "no" / "folder", b"", RecordsError)
    assert path.read_bytes() == b"old \\udce9"
    with pytest.raises(ZeroDivisionError), replace_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old \\udce9"
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("link", f".link.{os.getpid()}"):  # the target, and the temporary file
        (tmp_path / name).symlink_to("precious")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "link").is_symlink()


@given(lines=st.lists(st.binary(max_size=9), max_size=9), tail=st.integers(1, 4))
def test_the_torn_tail_is_found_from_the_end(lines: list[bytes], tail: int) -> None:
    data = b"\n".join(lines)
    pieces = list(io.BytesIO(data))
    last = pieces[-1] if pieces else b"\n"
    torn = not last.endswith(b"\n") or b"\0" in last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_TAIL_BYTES", tail)
        assert complete_size(io.BytesIO(data)) == len(b"".join(pieces[:-1] if torn else pieces))


def test_a_log_that_is_only_read_keeps_its_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"1\n2\n\0\0\n")
    log = JsonLog(path)
    assert list(log.lines()) == [(0, b"1\n"), (2, b"2\n")]
    log.close()
    assert path.read_bytes() == b"1\n2\n\0\0\n"
    log = JsonLog(path)
    assert log.append(b"3\n4\n") == 4
    assert [line for _, line in log.lines()] == [b"1\n", b"2\n", b"3\n", b"4\n"]
    assert ([*log.lines_at([6])], log.torn.read_bytes()) == ([b"4\n"], b"\0\0\n")
    log.rewrite([b"5\n"])
    assert log.append(b"6\n") == 2
    log.close()
    assert path.read_bytes() == b"5\n6\n"


INTERRUPTIONS = [
    (2, "write", OSError(28, "full"), b"1\n"),
    (2, "write", KeyboardInterrupt(), b"1\n"),
    (4, "fsync", OSError(5, "broken"), b"1\n"),
    (4, "fsync", KeyboardInterrupt(), b"1\n2\n3\n"),
]


@pytest.mark.parametrize(("written", "call", "error", "content"), INTERRUPTIONS)
def test_lines_are_in_a_log_whole_or_not_at_all(
    written: int, call: str, error: BaseException, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, plain = JsonLog(tmp_path / "log.jsonl"), os.write
    log.append(b"1\n")

    def fail(*_: object) -> None:
        raise error

    def write(file: int, data: bytes) -> int:
        if call == "write":
            monkeypatch.setattr(os, "write", fail)
        return plain(file, data[:written])

    monkeypatch.setattr(os, "write", write)
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordsError if isinstance(error, OSError) else KeyboardInterrupt):
        log.append(b"2\n3\n")
    monkeypatch.undo()
    log.close()
    assert log.path.read_bytes() == content


def test_a_refusal_names_the_holder_and_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        lock = WriteLock(path, RecordsError)
        for _ in range(2):  # the refused one has not erased the name
            with pytest.raises(RecordsError, match=rf"^another panscan process \({holder.pid} on "):
                lock.acquire()
        holder.kill()
        holder.wait()
    lock.acquire()
    assert path.read_text() == f"{os.getpid()}\n{socket.gethostname()}\n"
    path.write_text("")  # an older version writes no name
    with pytest.raises(RecordsError, match=r"^another panscan process$"):
        WriteLock(path, RecordsError).acquire()
    lock.release()


# JSON and counts that strangers wrote.


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_a_limit_far_below_python_s(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    deepest = opening * DEEPEST + "1" + closing * DEEPEST
    assert parse_json(deepest) == json.loads(deepest)
    for levels in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply: more than 100 levels"):
            parse_json(opening * levels + "1" + closing * levels)
    assert parse_json("[" + "[]," * 1000 + '"' + "[" * 1000 + '"]')  # many, and within a text: not deep


@pytest.mark.parametrize("text", ["[1,2,3,4,5]", '{"a":[{"b":[]}],"c":{}}'])
def test_values_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(foreign, "MOST_VALUES", 4)
    with pytest.raises(ValueError, match="more than 4 values"):
        parse_json(text)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"1" * 5000, "nul"])
def test_what_is_not_json_is_a_value_error(data: bytes | str) -> None:
    with pytest.raises(ValueError):
        parse_json(data)
    with pytest.raises(ValueError, match="longer than 2 bytes"):
        parse_json(b"123", most=2)


@pytest.mark.parametrize("value", [-1, MOST_COUNT + 1, True, 1.0, "1", None, 10**400, float("nan"), float("inf")])
def test_a_count_is_an_integer_within_bounds(value: Any) -> None:
    assert is_count(0) and is_count(MOST_COUNT)
    assert not is_count(value)
