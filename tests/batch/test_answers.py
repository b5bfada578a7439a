"""The file of answers: whatever ends its writer, whole lines stay, and writing goes on as if nothing had happened."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.batch.answers import AnswerFile, Mode, refuse_sources
from panscan.batch.jsonl import AnswerRecord, JobHeader
from panscan.batch.ledger import ledger_path
from panscan.core import RecordsError

OPENS = (
    "import sys; from pathlib import Path; from panscan.batch.answers import AnswerFile, JobHeader\n"
    "AnswerFile(Path(sys.argv[1]), JobHeader(), 'force', lambda *_: None)"
)
HEADER = JobHeader(schema=1, prompt="What is the total?")


def same(begun: JobHeader, header: JobHeader) -> str | None:
    return None if begun == header else "was made in another way"


def opened(path: Path, mode: Mode = "new", header: JobHeader = HEADER) -> AnswerFile:
    return AnswerFile(path, header, mode, same)


def answer(number: int, text: str = "", error: str | None = None) -> AnswerRecord:
    return AnswerRecord(id=f"{number}", image=[f"{number}.png"], answer=text, error=error)


def write(path: Path, records: list[AnswerRecord], mode: Mode = "new") -> None:
    with opened(path, mode) as file:
        for record in records:
            file.write(record)
        file.finish()


@settings(max_examples=40)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=5), cut=st.floats(0, 1), zeros=st.integers(0, 3))
def test_a_file_cut_anywhere_resumes_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: float, zeros: int
) -> None:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    records = [answer(number, text) for number, text in enumerate(texts)]
    write(path, records)
    complete = path.read_bytes()
    lines = complete.split(b"\n")[:-1]
    assert [line + b"\n" for line in lines] == [record.line for record in records]
    prefix = complete[: round(cut * len(complete))]
    path.write_bytes(prefix + b"\0" * zeros)  # zeros: what a file system may leave of a write when the power fails
    with opened(path, "resume") as file:
        left = list(file.records())
        assert left == records[: prefix.count(b"\n")]
        for record in records[len(left) :]:
            file.write(record)
        file.finish()
    assert path.read_bytes() == complete
    torn = prefix[prefix.rfind(b"\n") + 1 :] + b"\0" * zeros
    kept_in = path.with_name("answers.jsonl.torn")
    assert (kept_in.read_bytes() if kept_in.exists() else b"") == (torn + b"\n" if torn else b"")


def test_names_that_are_not_unicode_survive_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = answer(0, "Größe \u2028 \\udce9 \n")
    record.image = ["r\udce9sum.png"]  # as os.fsdecode gives it
    write(path, [record])
    assert msgspec.convert(json.loads(path.read_bytes().decode("utf-8")), AnswerRecord) == record
    assert "Größe".encode() in path.read_bytes()
    with opened(path, "resume") as file:
        assert list(file.records()) == [record]


def test_answers_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    write(path, [answer(0)])
    with pytest.raises(RecordsError, match="already has answers: continue with --resume, or replace them with --force"):
        opened(path)
    assert len(path.read_bytes().splitlines()) == 1
    ledger_path(path).write_text("{}")
    for mode in ("force", "resume"):
        opened(path, mode).close()  # type: ignore[arg-type]  # a text, drawn
        assert path.read_bytes().count(b"\n") == 1  # nothing is thrown away before there is something else
    with opened(path, "force", JobHeader(schema=2)) as file:
        assert list(file.records()) == [] and ledger_path(path).exists()
        file.write(answer(1))
        assert list(file.records()) == [answer(1)] and not ledger_path(path).exists()
    assert json.loads(file.header_path.read_bytes())["schema"] == 2
    with opened(path, "force") as file:
        file.write(answer(2))
    with opened(path, "resume") as file:
        assert list(file.records()) == [answer(2)]


def test_an_output_without_answers_is_begun_anew_with_its_own_header(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for mode, prompt in (("resume", "a"), ("new", "b"), ("resume", "c")):
        with opened(path, mode, JobHeader(prompt=prompt)) as file:  # type: ignore[arg-type]  # a text, drawn
            assert file.original_header == JobHeader(prompt=prompt)
            file.write(answer(0))
            assert json.loads(file.header_path.read_bytes())["prompt"] == prompt
        path.write_bytes(b"")


@pytest.mark.parametrize("mode", ["new", "resume", "force"])
def test_a_job_that_never_begins_leaves_all_as_it_was(tmp_path: Path, mode: Mode) -> None:
    with opened(tmp_path / "deep" / "er" / "a.jsonl", mode) as file:
        assert not file.begun
        assert list(file.records()) == []
        file.finish()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.jsonl").write_bytes(b"mine\n")
    with pytest.raises(RecordsError) if mode != "force" else contextlib.nullcontext():
        opened(tmp_path / "kept" / "a.jsonl", mode).close()
    assert [place.name for place in (tmp_path / "kept").iterdir()] == ["a.jsonl"]


def test_a_job_of_another_kind_does_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0)])
    path.write_bytes(path.read_bytes() + b"torn")
    before = path.read_bytes()
    with pytest.raises(RecordsError, match="in another way: resume with the same options, or replace it with --force"):
        opened(path, "resume", JobHeader(schema=1, prompt="Who?"))
    assert path.read_bytes() == before
    header = path.with_name("a.jsonl.run.json")
    for text, reason in (
        ("{", "not the header of a job"),
        ("[]", "not the header of a job"),
        ('{"settings": []}', "not the header of a job"),
        (None, "cannot be resumed"),
    ):
        header.write_text(text) if text is not None else header.unlink()
        with pytest.raises(RecordsError, match=reason):
            opened(path, "resume")
    opened(path, "force").close()  # the refused ones have let go of the lock


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    with opened(path) as file:
        file.write(answer(0))
        for name in ("a.jsonl", "link.jsonl"):
            other = subprocess.run([sys.executable, "-c", OPENS, str(tmp_path / name)], capture_output=True, text=True)
            assert "is being written by another panscan process" in other.stderr
        file.write(answer(1))
    assert [record["id"] for record in map(json.loads, path.read_bytes().splitlines())] == ["0", "1"]


def test_files_of_the_first_version_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its lines and its header have fewer fields; its lines stay byte for byte, and its torn line is moved."""
    path = tmp_path / "a.jsonl"
    old = b'{"id": "0", "image": ["0.png"], "answer": "a", "error": null}\n'
    failed = b'{"id": "1", "image": ["1.png"], "question": "Who?", "answer": null, "error": "gone", "ttft_ms": null}\n'
    path.write_bytes(old + failed + b"{half")
    path.with_name("a.jsonl.run.json").write_text('{"schema": 1, "prompt": null, "settings": {"model": "mini"}}')
    with opened(path, "resume", JobHeader(schema=1, settings={"model": "mini"})) as file:
        assert [record.error for record in file.records()] == [None, "gone"]
        file.write(answer(2, "c"))
        file.finish()
    first, *rest = path.read_bytes().splitlines(keepends=True)
    assert first == old and f"moved its 5 bytes to {path}.torn" in caplog.text
    assert [json.loads(line)["answer"] for line in rest] == [None, "c"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "fake.png").write_text("")
    before = sorted(tmp_path.iterdir())
    regular = "use a separate regular file, so that the job can be resumed"
    for name in ("pipe", "."):
        with pytest.raises(RecordsError, match=regular):
            opened(tmp_path / name, "force")
    for name in ("-", "/dev/null"):
        with pytest.raises(RecordsError, match=f"^-o {name}: not a regular file: {regular}"):
            opened(Path(name), "force")
    for mode in ("new", "resume", "force"):
        with pytest.raises(RecordsError, match=r"^/proc/x\.jsonl could not be written: No such file or directory$"):
            opened(Path("/proc/x.jsonl"), mode)  # type: ignore[arg-type]  # a text
    for deeper in ("x.jsonl", "y/z/x.jsonl"):
        with pytest.raises(RecordsError, match=r"fake\.png is a file, not a directory$"):
            opened(tmp_path / "fake.png" / deeper)
    assert sorted(tmp_path.iterdir()) == before


def test_standard_output_is_no_output(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for name in ("/dev/stdout", str(path)):
        with path.open("w") as file:
            line = [sys.executable, "-c", OPENS, name]
            other = subprocess.run(line, stdout=file, stderr=subprocess.PIPE, text=True)
        assert f"-o {name}: standard output or standard error is redirected to it" in other.stderr
    piped = subprocess.run([sys.executable, "-c", OPENS, "/dev/stdout"], capture_output=True, text=True)
    assert "-o /dev/stdout: " in piped.stderr
    assert "use a separate regular file" in piped.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_that_is_a_source_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"a.jsonl{suffix}" for suffix in ("", ".run.json", ".torn", ".lock")]
    other = tmp_path / "b.png"
    for path in (*paths, other):
        path.write_bytes(b"mine")
    (tmp_path / "hard.png").hardlink_to(paths[0])
    (tmp_path / "soft.png").symlink_to(paths[2])
    (tmp_path / "soft.jsonl").symlink_to(paths[0])
    refuse_sources(paths[0], [str(other), "https://example.org/a.jsonl", "gone.png", "\0"])
    refuse_sources(tmp_path / "new.jsonl", [str(path) for path in paths])
    for source in (*paths, tmp_path / "hard.png", tmp_path / "soft.png"):
        for output in (paths[0], tmp_path / "soft.jsonl"):
            with pytest.raises(RecordsError, match=f"^-o {output} would overwrite {source}, a source of this job"):
                refuse_sources(output, [str(other), str(source)])


NO_ANSWERS = [
    "",
    "\xff",
    "{}",
    '{"id": "my note"}',
    '{"id": 1, "image": []}',
    '{"id": "0", "image": [{}], "error": null}',
    '{"id": "0", "image": [], "error": {}}',
    '{"id": "0", "image": [], "output_tokens": "many"}',
    '{"id": "0", "image": [], "prompt_tokens": ' + "9" * 400 + "}",
    '{"id": "0", "image": [], "ttft_ms": NaN}',
    '{"id": "0", "image": [], "answer": 5}',
    '{"id": "0", "image": [], "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
]


@pytest.mark.parametrize("line", NO_ANSWERS)
def test_a_line_that_is_no_answer_is_named_and_the_file_stays_as_it_was(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [answer(0), answer(1)])
    first, second = path.read_bytes().splitlines()
    damaged = b"\n".join((first, line.encode("latin-1"), second, b"{half"))
    path.write_bytes(damaged)
    message = r"a\.jsonl, line 2: not an answer of panscan batch"
    with opened(path, "resume") as file, pytest.raises(RecordsError, match=message):
        list(file.records())
    assert path.read_bytes() == damaged
    assert not path.with_name("a.jsonl.torn").exists()
