"""Requests through the engine: answers in order at the end, whatever finishes first; what ends a job."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.batch.shuffling import JOB, ShufflingEngine, backwards, items, opened, run_job, tasks

from panscan.batch.answers import AnswerFile
from panscan.batch.dispatch import answer
from panscan.batch.jsonl import AnswerRecord
from panscan.core import EngineError, FinishReason, ImageError, PanscanError, Request, Result, SettingError
from panscan.workload.rows import Row


@pytest.fixture
def file(tmp_path: Path) -> Iterator[AnswerFile]:
    with opened(tmp_path / "a.jsonl") as file:
        yield file


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def failing(error: PanscanError, *but: str) -> Any:
    """What answers only the ids in ``but``."""

    def result_of(request: Request) -> Result:
        result = backwards(request)
        return result if request.id in but else replace(result, finish_reason="error", error=error)

    return result_of


@settings(max_examples=100)
@given(
    count=st.integers(0, 14),
    bad=st.sets(st.integers(0, 13)),
    choices=st.lists(st.integers(0, 50), max_size=14),
    most=st.integers(1, 9),
    kills=st.lists(st.integers(0, 12), max_size=3),
    torn=st.sampled_from([b"", b'{"id": "0.png", "im', b"\0\0"]),
)
def test_every_item_is_answered_once_and_in_order_wherever_the_job_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    bad: set[int],
    choices: list[int],
    most: int,
    kills: list[int],
    torn: bytes,
) -> None:
    asked = items(count, bad)
    finished: list[str] = []
    place = tmp_path_factory.mktemp("answers")
    for kill in (*kills, None):
        after: list[Path] = []
        turns = 0

        def on_answer(
            line: AnswerRecord, kill: int | None = kill, after: list[Path] = after, place: Path = place
        ) -> None:
            nonlocal turns
            if turns == kill:  # what a killed process leaves: this answer was in flight
                after.append(Path(shutil.copytree(place, tmp_path_factory.mktemp("killed"), dirs_exist_ok=True)))
            elif not after:
                finished.append(line.id)
            turns += 1

        engine, left = ShufflingEngine(choices, most), [item for item in asked if item.id not in finished]
        with opened(place / "a.jsonl") as file:
            run_job(file, asked, engine, on_answer=on_answer)
            lines = list(file.records())
        assert [request.id for request in engine.seen] == [item.id for item in left if item.problem is None]
        if after:
            [place] = after
            if (place / "a.jsonl").exists():
                (place / "a.jsonl").write_bytes((place / "a.jsonl").read_bytes() + torn)
    assert sorted(finished) == sorted(item.id for item in asked)
    assert [line.id for line in lines] == ids(place / "a.jsonl") == [item.id for item in asked]
    for line, item in zip(lines, asked, strict=True):
        assert line.answer == (line.id[::-1] if item.problem is None else None)
        assert line.error == (None if item.problem is None else str(item.problem))
    if asked:
        names = [path.name for path in place.iterdir() if path.suffix != ".torn"]
        assert sorted(names) == ["a.jsonl", "a.jsonl.lock", "a.jsonl.run.json"]


def test_the_users_bound_on_requests_in_flight_reaches_the_engine(file: AnswerFile) -> None:
    job = structs.replace(JOB, settings=replace(JOB.settings, max_concurrency=2))
    begun: list[int] = []
    engine = ShufflingEngine([], most=9)
    answer(engine, job, tasks(items(5)), file, proven=True, on_answer=lambda _: begun.append(len(engine.seen)))
    assert begun == [2, 3, 4, 5, 5]


def test_a_line_has_what_was_asked_first_and_what_depends_on_the_run_last(file: AnswerFile) -> None:
    row = Row("7", ("docs/a.pdf",), "Who?", named=("a.pdf",))
    wrong = replace(items(1)[0], problem=ImageError("0.png: broken"))
    run_job(file, [row, wrong])
    lines = [json.loads(line.line) for line in file.records()]
    assert list(lines[0].items()) == [
        ("id", "7"),
        ("image", ["a.pdf"]),
        ("question", "Who?"),
        ("model", "mini"),
        ("answer", "7"),
        ("finish_reason", "stop"),
        ("pixels", []),
        ("views", 3),
        ("crops", 2),
        ("image_tokens", 12),
        ("prompt_tokens", 20),
        ("output_tokens", 2),
        ("error", None),
        ("cached_tokens", 4),
        ("ttft_ms", 500.0),
        ("e2el_ms", 1250.0),
        ("retries", 0),
    ]
    assert list(lines[1]) == [name for name in lines[0] if name != "question"]
    assert (lines[1]["finish_reason"], lines[1]["error"], lines[1]["ttft_ms"]) == ("error", "0.png: broken", None)


@pytest.mark.parametrize(
    ("reason", "error"), [("error", EngineError("the engine stopped: a bug")), ("cancelled", None)]
)
def test_what_an_engine_leaves_when_it_ends_is_no_document_s_failure(
    file: AnswerFile, reason: FinishReason, error: EngineError | None
) -> None:
    def result_of(request: Request) -> Result:
        result = backwards(request)
        return replace(result, finish_reason=reason, error=error) if request.id == "2.png" else result

    with pytest.raises(EngineError, match=r"the engine (stopped: a bug|was closed)"):
        run_job(file, items(5), ShufflingEngine([], 3, result_of))
    assert ids(file.path) == ["0.png", "1.png"]
    engine = ShufflingEngine()
    run_job(file, items(5), engine)
    assert [request.id for request in engine.seen] == ["2.png", "3.png", "4.png"]


SETTING = SettingError("--vision-cache-gb 1e-06 does not hold one encoded view")


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_a_setting_that_fails_every_document_ends_the_job_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    engine = ShufflingEngine([], 1, failing(SETTING))
    with opened(tmp_path / "a.jsonl") as file, pytest.raises(SettingError, match="vision-cache-gb"):
        run_job(file, items(count), engine)
    assert len(engine.seen) <= 3
    assert list(tmp_path.iterdir()) == []


def test_documents_that_fail_by_themselves_are_lines(file: AnswerFile) -> None:
    # One that is answered, or an answer of before: the setting is not at fault.
    run_job(file, items(6), ShufflingEngine([], 1, failing(SETTING, "2.png")))
    assert [line.error is None for line in file.records()] == [False, False, True, False, False, False]
    run_job(file, items(8), ShufflingEngine([], 1, failing(SETTING)))
    assert ids(file.path) == [item.id for item in items(8)]


@pytest.mark.parametrize(
    ("bad", "error"),
    [((), lambda name: SettingError(f"{name}: too long")), ((0, 1), lambda _: SETTING)],
    ids=["other settings errors", "unreadable documents"],
)
def test_settings_errors_beside_other_errors_are_the_documents_own(
    file: AnswerFile, bad: tuple[int, ...], error: Callable[[str], SettingError]
) -> None:
    engine = ShufflingEngine([], 1, lambda request: failing(error(request.id))(request))
    run_job(file, items(3, bad), engine)
    errors = [str(item.problem or error(item.id)) for item in items(3, bad)]
    assert [(line.id, line.error) for line in file.records()] == [(f"{n}.png", errors[n]) for n in range(3)]


def test_what_needs_no_engine_is_written_without_one(file: AnswerFile) -> None:
    answer(None, JOB, tasks(items(3, bad=[0, 1, 2])), file, proven=False, on_answer=lambda _: None)
    assert ids(file.path) == ["0.png", "1.png", "2.png"]
