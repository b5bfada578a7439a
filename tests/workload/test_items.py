"""What a batch job asks: which documents and rows, in which order, and that nothing is opened before its turn."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import noise, refuse

from panscan.core import DatasetError, ImageError, SettingError
from panscan.images.files import find_pages
from panscan.workload.items import BatchWork, find_work
from panscan.workload.requests import Source, build_workload
from panscan.workload.rows import Row


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with pictures, a PDF of three pages and a file that is no picture."""
    for name in ("docs/p10.png", "docs/p2.png", "docs/sub/a.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        noise(30, 30).save(name)
    noise(20, 20, 1).save("docs/p3.pdf", save_all=True, append_images=[noise(20, 20, 2), noise(20, 20, 3)])
    Path("docs/p4.png").write_text("not a picture")
    return folder


def find(*sources: str, whole_files: bool = False, limit: int | None = None, **options: bool) -> BatchWork:
    return find_work(sources, whole_files=whole_files, limit=limit, on_problem=refuse, **options)


def test_documents_are_the_pages_that_bench_finds_and_a_bad_file_keeps_its_place(folder: Path) -> None:
    items = list(find("docs"))
    [bad] = [item for item in items if item.problem is not None]
    assert (bad.id, bad.images) == ("docs/p4.png", ("docs/p4.png",))
    assert "docs/p4.png" in str(bad.problem)
    pages = [page.name for page in find_pages(["docs"], on_problem=lambda _: None)]
    assert [item.id for item in items if item is not bad] == pages
    names = ["p2.png", "p3.pdf#page=1", "p3.pdf#page=2", "p3.pdf#page=3", "p4.png", "p10.png", "sub/a.jpg"]
    assert [item.id for item in items] == [f"docs/{name}" for name in names]
    assert all(item.images == item.named == (item.id,) and item.question is None for item in items)


def test_all_pages_of_a_file_can_be_one_item(folder: Path) -> None:
    items = {item.id: item.named for item in find("docs/p2.png", "docs/p3.pdf", whole_files=True)}
    pages = tuple(f"docs/p3.pdf#page={number}" for number in (1, 2, 3))
    assert items == {"docs/p2.png": ("docs/p2.png",), "docs/p3.pdf": pages}


@pytest.mark.parametrize(
    ("sources", "ids"),
    [
        (["docs/p3.pdf#page=2"], ["docs/p3.pdf#page=2"]),
        (["docs/p3.pdf#page=2", "docs/*.pdf"], [f"docs/p3.pdf#page={number}" for number in (1, 2, 3)]),
        (["docs/p2.png", "./docs/p2.png", "docs/*2.png", "docs/p2.png#page=1"], ["docs/p2.png"]),
        (["docs/p3.pdf#page=3", "docs/p3.pdf#page=1"], ["docs/p3.pdf#page=3", "docs/p3.pdf#page=1"]),
    ],
)
def test_every_document_is_asked_once(folder: Path, sources: list[str], ids: list[str]) -> None:
    assert [item.id for item in find(*sources)] == ids


def test_files_are_opened_when_their_turn_comes(folder: Path) -> None:
    work = find("docs/p2.png", "docs/p3.pdf", "docs/p10.png")
    assert work.expected == 3
    Path("docs/p10.png").unlink()
    items = iter(work)
    next(items), next(items)
    assert work.expected == 5  # the PDF has turned out to have three pages
    last = list(items)[-1]
    assert last.id == "docs/p10.png"
    assert last.problem is not None
    assert work.expected == 5


@pytest.mark.parametrize("limit", [1, 3, 4, 99])
def test_a_limit_takes_the_first_ones(folder: Path, limit: int) -> None:
    every = [item.id for item in find("docs")]
    work = find("docs", limit=limit)
    assert [item.id for item in work] == every[:limit]
    assert work.expected == min(limit, len(every))


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return str(path)


def test_a_dataset_is_read_as_bench_reads_it(folder: Path) -> None:
    rows = write_rows(
        folder / "docs" / "questions.jsonl",
        {"image": "p2.png", "question": "What?", "answers": ["x"], "kind": "receipt"},
        {"image": ["sub/a.jpg", "p3.pdf"], "question": "Which?\u2028Why?", "id": 7},
    )
    items = list(find(rows))
    measured = build_workload(Source(dataset=rows), on_problem=refuse)
    assert [(item.id, item.question) for item in items] == [(item.id, item.prompt) for item in measured]
    assert [item.named for item in items] == [("p2.png",), ("sub/a.jpg", "p3.pdf")]
    opened = [[page.name for page in find_pages(item.images, on_problem=refuse)] for item in items]
    assert opened == [[document.name for document in item.documents] for item in measured]


def test_urls_of_a_dataset_are_not_relative_and_its_files_need_not_be_there_yet(folder: Path) -> None:
    url = "https://example.org/a.png"
    rows = write_rows(folder / "docs" / "q.JSONL", {"image": [url, "gone.png"], "question": "What?"})
    wanted = Row("00000", (url, str(folder / "docs/gone.png")), "What?", named=(url, "gone.png"))
    assert list(find(rows, external_images=True)) == [wanted]


def test_what_cannot_be_asked_is_refused(folder: Path) -> None:
    row = {"image": "docs/p2.png", "question": "What?"}
    write_rows(folder / "q.jsonl", row)
    for others, whole, message in (
        (["docs"], False, "a dataset needs a separate job"),
        ([], True, "--whole-files: not supported for datasets"),
    ):
        with pytest.raises(SettingError, match=message):
            find("q.jsonl", *others, whole_files=whole)
    for rows, reason in (
        ([{**row, "id": "00001"}, row], "two questions have the id '00001'"),
        ([row, {"image": "a.png"}], r"^q\.jsonl, line 2: 'question' is missing"),
        ([row, {**row, "question": "  "}], "the question with the id '00001' is empty"),
        ([], "has no question"),
    ):
        write_rows(folder / "q.jsonl", *rows)
        with pytest.raises(DatasetError, match=reason):
            find("q.jsonl")
    with pytest.raises(DatasetError, match=r"^gone\.jsonl: No such file"):
        find("gone.jsonl")


def test_a_source_that_stands_for_nothing_is_refused_whatever_is_beside_it(folder: Path) -> None:
    (folder / "none").mkdir()
    Path("broken.png").symlink_to("gone.png")
    os.mkfifo("pipe.png")
    for source, reason in (
        ("none", "no image or PDF file in this directory"),
        ("doks", "no such file or directory"),
        ("docs/none*", "no image or PDF file matches"),
        ("gone.pdf#page=2", "no such file or directory"),
        ("broken.png", "broken link to gone.png"),
        ("pipe.png", "not a regular file"),
    ):
        name = source.partition("#")[0]
        for sources in ([source], ["docs", source]):
            with pytest.raises(ImageError, match=f"^{re.escape(f'{name}: {reason}')}$"):
                find(*sources)
    assert [item.id for item in find("docs/p4.png") if item.problem] == [
        "docs/p4.png"
    ]  # it is there: a line of its own


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_source_that_may_not_be_read_is_refused_but_not_a_part_of_one(folder: Path) -> None:
    said: list[ImageError] = []
    for place in ("docs/p2.png", "docs/sub"):
        Path(place).chmod(0)
        with pytest.raises(ImageError, match=f"^{place}: permission denied$"):
            find(place)
    work = find_work(["docs"], whole_files=False, limit=None, on_problem=said.append)
    assert [str(problem) for problem in said] == ["docs/sub: permission denied"]
    Path("docs/sub").chmod(0o700)
    assert [item.id for item in work if item.problem] == ["docs/p2.png", "docs/p4.png"]


def test_every_file_that_is_read_is_known_before(folder: Path) -> None:
    assert list(find("docs/sub", "docs/p2.png").files) == ["docs/sub/a.jpg", "docs/p2.png"]
    rows = write_rows(folder / "docs" / "q.jsonl", {"image": ["sub/a.jpg", "p2.png"], "question": "What?"})
    assert list(find(rows).files) == [rows, str(folder / "docs/sub/a.jpg"), str(folder / "docs/p2.png")]
