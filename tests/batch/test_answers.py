"""The file of answers: whatever ends its writer, whole lines stay, and writing goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.batch.answers import AnswerFile, Mode
from panscan.core import RecordsError

HEADER = {"schema": 1, "prompt": "What is the total?"}


def same(begun: Mapping[str, Any], header: Mapping[str, Any]) -> str | None:
    return None if begun == header else "was made in another way"


def opened(path: Path, mode: Mode = "new", header: Mapping[str, Any] = HEADER) -> AnswerFile:
    return AnswerFile(path, header, mode, same)


def answer(number: int, text: str = "", error: str | None = None) -> dict[str, Any]:
    return {"id": f"{number}", "image": [f"{number}.png"], "answer": text, "error": error}


def write(path: Path, records: list[dict[str, Any]], mode: Mode = "new") -> None:
    with opened(path, mode) as file:
        for record in records:
            file.write(record)


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=5), cut=st.floats(0, 1), zeros=st.integers(0, 3))
def test_a_file_cut_anywhere_resumes_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: float, zeros: int
) -> None:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    records = [answer(number, text) for number, text in enumerate(texts)]
    write(path, records)
    whole = path.read_bytes()
    lines = whole.split(b"\n")[:-1]
    assert [json.loads(line) for line in lines] == records
    kept = whole[: round(cut * len(whole))]
    path.write_bytes(kept + b"\0" * zeros)  # zeros: what a file system may leave of a write when the power fails
    with opened(path, "resume") as file:
        left = list(file.records())
        assert left == records[: kept.count(b"\n")]
        for record in records[len(left) :]:
            file.write(record)
    assert path.read_bytes() == whole


def test_a_line_of_zeros_is_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0)])
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0\0\n")
    write(path, [], "resume")
    assert path.read_bytes() == whole


def test_names_that_are_not_unicode_survive_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = answer(0, "Größe \u2028 \\udce9 \n") | {"image": ["r\udce9sum.png"]}  # as os.fsdecode gives it
    write(path, [record])
    assert json.loads(path.read_bytes().decode("utf-8")) == record
    assert "Größe".encode() in path.read_bytes()
    with opened(path, "resume") as file:
        assert list(file.records()) == [record]


def test_answers_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    write(path, [answer(0)])
    with pytest.raises(RecordsError, match="has answers already: go on with --resume, or start anew with --force"):
        opened(path)
    assert len(path.read_bytes().splitlines()) == 1
    with opened(path, "force", {"schema": 2}) as file:
        assert list(file.records()) == []
    assert json.loads(file.header_path.read_bytes()) == {"schema": 2}


def test_an_output_without_answers_is_begun_anew_with_its_own_header(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for mode, prompt in (("resume", "a"), ("new", "b"), ("resume", "c")):
        with opened(path, mode, {"prompt": prompt}) as file:  # type: ignore[arg-type]
            assert file.begun_with == {"prompt": prompt}
            assert json.loads(file.header_path.read_bytes()) == {"prompt": prompt}


def test_a_job_of_another_kind_does_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0)])
    path.write_bytes(path.read_bytes() + b"torn")
    before = path.read_bytes()
    with pytest.raises(RecordsError, match="was made in another way: resume with the same, or start anew with --force"):
        opened(path, "resume", {"schema": 1, "prompt": "Who?"})
    assert path.read_bytes() == before
    header = path.with_name("a.jsonl.run.json")
    for text, reason in (("{", "garbled"), ("[]", "garbled"), (None, "is missing, so nobody knows")):
        header.write_text(text) if text is not None else header.unlink()
        with pytest.raises(RecordsError, match=reason):
            opened(path, "resume")
    opened(path, "force").close()  # the refused ones have let go of the lock


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    code = (
        "import sys; from pathlib import Path; from panscan.batch.answers import AnswerFile\n"
        "AnswerFile(Path(sys.argv[1]), {}, 'force', lambda *_: None)"
    )
    with opened(path) as file:
        file.write(answer(0))
        for name in ("a.jsonl", "link.jsonl"):
            other = subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True)
            assert "is being written by another panscan" in other.stderr
        file.write(answer(1))
    assert [record["id"] for record in map(json.loads, path.read_bytes().splitlines())] == ["0", "1"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as file:
        file.write(answer(0))
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))  # room for a part of a line
        try:
            with pytest.raises(RecordsError, match=r"a\.jsonl could not be written: File too large"):
                file.write(answer(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        file.write(answer(1))
        assert list(file.records()) == [answer(0), answer(1)]


def test_answers_can_be_taken_out_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0, "a"), answer(1, error="gone"), answer(2, "c")])
    lines = path.read_bytes().splitlines(keepends=True)
    with opened(path, "resume") as file:
        file.keep(lambda record: record["error"] is None)
        assert path.read_bytes() == lines[0] + lines[2]
        file.write(answer(1, "b"))
        assert [record["id"] for record in file.records()] == ["0", "2", "1"]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.lock", "a.jsonl.run.json"]


@pytest.mark.parametrize("line", [b"{}", b'{"id": 1, "image": []}', b"[1]", b"\xff", b""])
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0), answer(1)])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join((first, line, second, b"")))
    with opened(path, "resume") as file, pytest.raises(RecordsError, match=r"a\.jsonl, line 2: not an answer"):
        list(file.records())


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(RecordsError, match="not a regular file"):
            opened(tmp_path / name, "force")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="could not be written"):
        opened(tmp_path / "file" / "a.jsonl")
