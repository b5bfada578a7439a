"""What is left of a job: nothing is asked twice, what failed keeps its line until it has another, and its place."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batch.shuffling import ShufflingEngine, items, opened, run_job

from panscan.batch.answers import AnswerFile
from panscan.batch.jsonl import AnswerRecord
from panscan.batch.pending import AnsweredItems, Task
from panscan.core import ImageError, RecordsError
from panscan.workload.rows import Row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


def begun_file(path: Path, asked: list[Row]) -> AnswerFile:
    """A file with the answers of these items, held open."""
    file = opened(path)
    run_job(file, asked)
    return file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_what_is_answered_is_not_asked_again(path: Path) -> None:
    every = items(6, bad=[1, 4])
    with begun_file(path, [every[number] for number in (0, 1, 3)]) as file:
        answered = AnsweredItems(file, retry_failed=False)
        assert list(answered.pending(every)) == [Task(every[number]) for number in (2, 4, 5)]
        assert answered.skipped == 3
        assert answered.any_succeeded
        before = path.read_bytes()
        again = AnsweredItems(file, retry_failed=True)
        unanswered = [Task(every[number]) for number in (2, 4, 5)]
        assert list(again.pending(every)) == [Task(every[1], retries=True), *unanswered]
        assert path.read_bytes() == before
    with begun_file(path.with_name("b.jsonl"), items(2, bad=[0, 1])) as file:
        assert not AnsweredItems(file, retry_failed=False).any_succeeded


def test_the_last_of_several_answers_to_one_document_counts(path: Path) -> None:
    every = items(3, bad=[1])
    begun_file(path, every).close()
    before = path.read_bytes() + AnswerRecord(id="1.png", image=["1.png"]).line
    path.write_bytes(before)
    with opened(path) as file:
        assert list(AnsweredItems(file, retry_failed=True).pending(every)) == []
    assert path.read_bytes() == before


@settings(max_examples=60)
@given(
    bad=st.sets(st.integers(0, 7), min_size=1),
    mended=st.sets(st.integers(0, 7)),
    seen=st.integers(1, 8),
    kill=st.integers(0, 8),
    choices=st.lists(st.integers(0, 9), max_size=8),
    retry=st.booleans(),
)
def test_a_retry_killed_anywhere_loses_no_line_and_doubles_none(
    tmp_path_factory: pytest.TempPathFactory,
    bad: set[int],
    mended: set[int],
    seen: int,
    kill: int,
    choices: list[int],
    retry: bool,
) -> None:
    path = tmp_path_factory.mktemp("answers") / "a.jsonl"
    begun_file(path, items(8, bad)).close()
    before = path.read_bytes()
    better = items(8, bad - mended)
    new: dict[str, str | None] = {}
    with opened(path) as file:
        turns: list[str] = []

        def on_answer(line: AnswerRecord) -> None:
            if len(turns) == kill:
                assert path.read_bytes().startswith(before)  # a failure keeps its line until it has another
                killed.append(shutil.copytree(path.parent, tmp_path_factory.mktemp("killed"), dirs_exist_ok=True))
            turns.append(line.id)
            if not killed:
                new[line.id] = line.error

        killed: list[Path] = []
        run_job(file, better[:seen], ShufflingEngine(choices, 3), retry_failed=True, on_answer=on_answer)
    assert set(turns) == {f"{number}.png" for number in bad if number < seen}
    if killed:
        path = Path(killed[0]) / "a.jsonl"
    with opened(path) as file:
        run_job(file, better, retry_failed=retry, on_answer=lambda line: new.update({line.id: line.error}))
    found = lines_of(path)
    assert [line["id"] for line in found] == [item.id for item in better]
    for line, item, old in zip(found, better, items(8, bad), strict=True):
        now_failed = item.problem is not None if retry or line["id"] in new else old.problem is not None
        assert (line["error"] is not None) == now_failed


def pages(count: int) -> list[Row]:
    names = [f"b.pdf#page={number}" for number in range(1, count + 1)]
    return [Row(name, (name,), named=(name,), document="b.pdf") for name in names]


BROKEN = Row("b.pdf", ("b.pdf",), named=("b.pdf",), problem=ImageError("b.pdf: damaged"), document="b.pdf")


FIRST, _, LAST = items(3)
AGAIN = AnswerRecord(id="b.pdf", image=["b.pdf"], error="damaged still")
PAGE = AnswerRecord(id="b.pdf#page=2", image=["b.pdf#page=2"], error="damaged")


@pytest.mark.parametrize(
    ("before", "last", "now", "retry"),
    [
        ([FIRST, BROKEN, LAST], None, [FIRST, *pages(11), LAST], False),
        ([FIRST, BROKEN, LAST], None, [FIRST, *pages(11), LAST], True),
        ([BROKEN, FIRST], AGAIN, [*pages(2), FIRST], True),  # failed again, then repaired
        ([BROKEN, FIRST], PAGE, [*pages(2), FIRST], True),  # a page failed in the place of its file
        ([BROKEN], None, pages(2), False),
    ],
)
def test_the_pages_of_a_mended_file_take_its_place_in_their_order(
    path: Path, before: list[Row], last: AnswerRecord | None, now: list[Row], retry: bool
) -> None:
    begun_file(path, before).close()
    with opened(path) as file:
        if last is not None:  # as a killed job leaves it
            file.write(last)
        run_job(file, now, ShufflingEngine([5, 4, 3, 9, 1], 8), retry_failed=retry)
    assert [(line["id"], line["error"]) for line in lines_of(path)] == [(item.id, None) for item in now]


def test_a_whole_file_that_failed_may_have_its_pages_now(path: Path) -> None:
    whole = replace(BROKEN, named=("b.pdf#page=1", "b.pdf#page=2"), problem=None)
    with begun_file(path, [BROKEN]) as file:
        assert list(AnsweredItems(file, retry_failed=False).pending([whole])) == []
        assert list(AnsweredItems(file, retry_failed=True).pending([whole])) == [Task(whole, retries=True)]


def test_answers_beyond_a_limit_keep_their_lines(path: Path) -> None:
    every = items(5)
    engine = ShufflingEngine()
    for asked in ([every[4], every[2]], every[:3]):
        with opened(path) as file:
            run_job(file, asked, engine)
    assert [line["id"] for line in lines_of(path)] == ["0.png", "1.png", "2.png", "4.png"]
    with opened(path) as file:
        run_job(file, every, engine)
    assert [line["id"] for line in lines_of(path)] == [item.id for item in every]
    assert [request.id for request in engine.seen] == ["4.png", "2.png", "0.png", "1.png", "3.png"]


@pytest.mark.parametrize("change", [{"named": ("b.png",)}, {"question": "Why?"}, {"question": None}])
def test_an_id_that_now_means_something_else_is_refused(path: Path, change: dict[str, Any]) -> None:
    row = Row("00000", ("docs/a.png",), "Who?", named=("a.png",))
    with begun_file(path, [row]) as file:
        answered = AnsweredItems(file, retry_failed=False)
        assert list(answered.pending([row])) == []
        with pytest.raises(RecordsError, match=r"'00000' had a different image or question when it was answered"):
            list(answered.pending([replace(row, **change)]))


def test_a_file_that_has_none_of_the_documents_is_another_job_s(path: Path) -> None:
    def renamed() -> Iterator[Row]:
        for item in items(4):
            yield replace(item, id=f"./{item.id}", document=f"./{item.id}")

    with begun_file(path, items(4)) as file:
        answered = AnsweredItems(file, retry_failed=False)
        reason = r"answers none of these documents \(it has '0.png', not './0.png'\): name them as before, or choose"
        with pytest.raises(RecordsError, match=reason):
            next(answered.pending(renamed()), None)
        later = [*renamed(), items(4)[3], *items(5)[4:]]
        assert [task.item for task in answered.pending(later)] == [*renamed(), items(5)[4]]
