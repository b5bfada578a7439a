"""What is left of a job: nothing is asked twice, what failed keeps its line until it has another, and its place."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Start:
    """One start of a job: which of eight documents it wants, which of them are broken now, and its end.

    ``killed``: the number of answers that it writes before it is killed; ``torn``: what it leaves of the next one.
    """

    wanted: set[int]
    broken: set[int]
    retries: bool
    choices: list[int]
    inflight: int
    killed: int | None
    torn: bytes


DOCUMENTS = st.sets(st.integers(0, 7))
TORN = st.sampled_from([b"", b'{"id": "0.png", "im', b"\0\0"])
CHOICES = st.lists(st.integers(0, 50), max_size=8)
STARTS = st.builds(
    Start, DOCUMENTS, DOCUMENTS, st.booleans(), CHOICES, st.integers(1, 9), st.none() | st.integers(0, 8), TORN
)
LAST = st.builds(Start, st.just({*range(8)}), DOCUMENTS, st.booleans(), CHOICES, st.integers(1, 9), st.none(), TORN)


@settings(max_examples=100)
@given(st.lists(STARTS, max_size=4), LAST)
def test_no_answer_is_lost_doubled_or_out_of_order_whatever_stopped_the_job(
    tmp_path_factory: pytest.TempPathFactory, starts: list[Start], last: Start
) -> None:
    """Every start asks what has no answer, or failed and is retried; a failure keeps its line until it has another."""
    place = tmp_path_factory.mktemp("answers")
    known: dict[str, bytes] = {}  # the last line of each document, in the order of the file
    for start in (*starts, last):
        place = check_start(start, place, known, tmp_path_factory)
    assert [line["id"] for line in lines_of(place / "a.jsonl")] == [item.id for item in items(8)]
    names = {path.name for path in place.iterdir() if path.suffix != ".torn"}
    assert names == {"a.jsonl", "a.jsonl.lock", "a.jsonl.run.json"}


def check_start(start: Start, place: Path, known: dict[str, bytes], folders: pytest.TempPathFactory) -> Path:
    """Run one start, and update what is known; return the folder with what it leaves."""
    path, engine, killed = place / "a.jsonl", ShufflingEngine(start.choices, start.inflight), list[Path]()
    wanted = [item for item in items(8, start.broken) if int(item.id[0]) in start.wanted]
    problems = {item.id: str(item.problem) for item in wanted if item.problem is not None}
    failed = {name for name, line in known.items() if json.loads(line)["error"]}
    due = [item for item in wanted if item.id not in known or (start.retries and item.id in failed)]
    before = path.read_bytes() if known else b""
    complete, turns = before[: before.rfind(b"\n") + 1], list[AnswerRecord]()

    def on_answer(answer: AnswerRecord) -> None:
        assert not known or path.read_bytes().startswith(complete)
        if len(turns) == start.killed:  # what a killed process leaves: this answer was in flight
            killed.append(Path(shutil.copytree(place, folders.mktemp("killed"), dirs_exist_ok=True)))
        turns.append(answer)

    with opened(path) as file:
        if known and not known.keys() & {item.id for item in wanted}:
            with pytest.raises(RecordsError, match="answers none of these documents"):
                run_job(file, wanted, engine, retry_failed=start.retries, on_answer=on_answer)
            return place
        run_job(file, wanted, engine, retry_failed=start.retries, on_answer=on_answer)
        written = [(record.id, record.line) for record in file.records()]
    assert [request.id for request in engine.seen] == [item.id for item in due if item.id not in problems]
    assert sorted(answer.id for answer in turns) == [item.id for item in due]
    for answer in turns:
        assert answer.error == problems.get(answer.id)
        assert answer.answer == (answer.id[::-1] if answer.error is None else None)
    known |= {answer.id: answer.line for answer in turns[: start.killed if killed else None]}
    if killed:
        [place] = killed
        if known:
            with (place / "a.jsonl").open("ab") as torn:
                torn.write(start.torn)
        return place
    ranks = [item.id for item in wanted]
    ordered = sorted(known, key=lambda name: ranks.index(name) if name in ranks else len(ranks))
    assert written == [(name, known[name]) for name in ordered]
    for name in ordered:
        known[name] = known.pop(name)
    return place


def pages(count: int) -> list[Row]:
    names = [f"b.pdf#page={number}" for number in range(1, count + 1)]
    return [Row(name, (name,), named=(name,), document="b.pdf") for name in names]


BROKEN = Row("b.pdf", ("b.pdf",), named=("b.pdf",), problem=ImageError("b.pdf: damaged"), document="b.pdf")


FIRST, _, THIRD = items(3)
AGAIN = AnswerRecord(id="b.pdf", image=["b.pdf"], error="damaged still")
PAGE = AnswerRecord(id="b.pdf#page=2", image=["b.pdf#page=2"], error="damaged")


REPAIRED = [
    ([FIRST, BROKEN, THIRD], None, [FIRST, *pages(11), THIRD], False),
    ([FIRST, BROKEN, THIRD], None, [FIRST, *pages(11), THIRD], True),
    ([BROKEN, FIRST], AGAIN, [*pages(2), FIRST], True),  # failed again, then repaired
    ([BROKEN, FIRST], PAGE, [*pages(2), FIRST], True),  # a page failed in the place of its file
    ([BROKEN], None, pages(2), False),
]


@pytest.mark.parametrize(("before", "last", "now", "retry"), REPAIRED)
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
    document = replace(BROKEN, named=("b.pdf#page=1", "b.pdf#page=2"), problem=None)
    with begun_file(path, [BROKEN]) as file:
        answered = AnsweredItems(file, retry_failed=False)
        assert list(answered.pending([document])) == []
        assert (answered.skipped, answered.any_succeeded) == (1, False)
        assert list(AnsweredItems(file, retry_failed=True).pending([document])) == [Task(document, retries=True)]


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
