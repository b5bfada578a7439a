"""Workloads: which requests come out of pictures, prompts and datasets, and in which order."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import noise, refuse

from panscan.core import DatasetError, ImageError, InputError, PanAndScan
from panscan.core.activity import Activity
from panscan.images.files import Page, find_pages, open_image, page_digest
from panscan.images.views import plan_views
from panscan.settings import Settings
from panscan.workload.calibration import CalibrationSource, load_calibration, load_documents
from panscan.workload.items import BatchWork, find_work
from panscan.workload.requests import (
    DEFAULT_PROMPT,
    Item,
    Source,
    load_workload,
    plans_of,
    request_of,
    source_or_samples,
)
from panscan.workload.rows import Row
from panscan.workload.samples import sample_dataset

SIZES = {"a.png": (260, 800), "b.png": (700, 300), "c.jpg": (300, 300)}


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with three pictures and a PDF; in ``docs``, pictures, a PDF, and what is no picture."""
    (folder / "docs" / "sub").mkdir(parents=True)
    small = dict.fromkeys(("docs/p10.png", "docs/p2.png", "docs/sub/a.jpg"), (30, 30))
    for name, size in {**SIZES, **small}.items():
        noise(*size).save(folder / name)
    for name, pages in (("scan.pdf", 2), ("docs/p3.pdf", 3)):
        first, *others = (noise(150, 150, seed) for seed in range(1, pages + 1))
        first.save(folder / name, save_all=True, append_images=others)
    (folder / "docs" / "p4.png").write_text("not a picture")
    return folder


def build(**source: Any) -> list[Item]:
    return load_workload(Source(**source), on_problem=refuse).items


def names(items: Sequence[Item]) -> list[tuple[str, ...]]:
    return [tuple(document.name for document in item.documents) for item in items]


def dataset(folder: Path, *rows: Any, **source: Any) -> list[Item]:
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8")
    return build(dataset="q.jsonl", **source)


def test_every_document_gets_every_prompt_in_order(folder: Path) -> None:
    (folder / "prompts.txt").write_text(" What? \n\nWho?\r\nWhat?\n")
    items = build(images=("b.png", "*.*g"), prompts="prompts.txt")
    pairs = [((name,), prompt) for name in ("b.png", "a.png", "c.jpg") for prompt in ("What?", "Who?", "What?")]
    assert [item.id for item in items] == [f"{number:05d}" for number in range(9)]
    assert list(zip(names(items), [item.prompt for item in items], strict=True)) == pairs


def test_a_document_is_described_by_its_upright_size_and_hash(folder: Path) -> None:
    [item, *_] = build(images=("a.png", "c.jpg"))
    [document] = item.documents
    assert ((document.width, document.height), document.sha256) == (SIZES["a.png"], page_digest(Page("a.png")))
    assert item.prompt == DEFAULT_PROMPT
    for chosen in (PanAndScan(), PanAndScan(max_num_crops=2), PanAndScan(enabled=False)):
        cell = Settings(do_pan_and_scan=chosen.enabled, pan_and_scan_max_num_crops=chosen.max_num_crops)
        assert plans_of(item, cell) == [plan_views(*SIZES["a.png"], chosen)]


def test_a_request_holds_the_item_the_cell_and_the_source(folder: Path) -> None:
    source = Source(images=("scan.pdf",), prompt="Who?", system="Be brief.", template_kwargs={"polite": True})
    [_, second] = load_workload(source, on_problem=refuse).items
    cell = Settings(pan_and_scan_max_num_crops=2, max_new_tokens=7, temperature=0.5, top_k=3)
    request = request_of(second, cell, source)
    assert (request.id, request.prompt, request.system, request.raw) == ("00001", "Who?", "Be brief.", False)
    assert (list(request.images), request.template_kwargs) == (["scan.pdf#page=2"], {"polite": True})
    assert (request.pan_and_scan, request.sampling) == (cell.pan_and_scan, cell.sampling)


def test_pages_are_items_of_images_and_documents_of_a_datasets_row(folder: Path) -> None:
    pages = ("scan.pdf#page=1", "scan.pdf#page=2")
    assert names(build(images=("scan.pdf",))) == [(pages[0],), (pages[1],)]
    rows = [{"image": "scan.pdf", "question": "All?"}, {"image": ["scan.pdf#page=2", "a.png"], "question": "Two?"}]
    items = dataset(folder, *rows)
    assert names(items) == [pages, (pages[1], "a.png")]
    sizes = {(item.documents[0].width, item.documents[0].height) for item in items}
    assert sizes == {open_image(Page("scan.pdf", 1)).size}


def test_rows_keep_their_answers_tags_and_ids(folder: Path) -> None:
    row = {"image": "a.png", "question": "Two\nlines\u2028and \x85 \x0c more?", "answers": ["x", "y"]}
    tagged = {**row, "kind": "receipt", "type": "total", "id": 7}
    one, two = dataset(folder, tagged, {"image": "b.png", "question": "?"})
    assert (one.id, one.prompt, one.answers) == ("7", row["question"], ("x", "y"))
    assert dict(one.tags) == {"kind": "receipt", "type": "total"}
    assert (two.id, two.prompt, two.answers, two.tags) == ("00001", "?", (), ())


def test_a_datasets_pictures_lie_beside_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(folder, {"image": "a.png", "question": "?"}, {"image": str(tmp_path / "b.png"), "question": "?"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert names(build(dataset="../q.jsonl")) == [("../a.png",), (str(tmp_path / "b.png"),)]


def test_what_cannot_be_read_is_reported_once_and_the_rest_is_used(folder: Path) -> None:
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:3000])
    problems: list[str] = []

    def remember(problem: InputError) -> None:
        problems.append(str(problem))

    items = load_workload(Source(images=("*.png", "cut.png", "none.png")), on_problem=remember).items
    assert names(items) == [("a.png",), ("b.png",)]
    assert [problem.split(":")[0] for problem in problems] == ["none.png", "cut.png"]
    problems.clear()
    rows = [{"image": image, "question": "?"} for image in ("cut.png", "a.png", "cut.png", ["a.png", "cut.png"])]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = load_workload(Source(dataset="q.jsonl"), on_problem=remember).items
    assert [(item.id, *item.documents[0].name.split()) for item in items] == [("00001", "a.png")]
    assert [problem.split(":")[0] for problem in problems] == ["cut.png"]


def test_prompts_alone_have_no_documents(folder: Path) -> None:
    [item] = build(no_images=True, prompt="Who?")
    assert (item.documents, item.prompt) == ((), "Who?")


def test_raw_prompts_stay_as_they_are(folder: Path) -> None:
    (folder / "prompts.txt").write_text("\ufeff <start_of_image> Total: \n\n", "utf-8")
    [raw] = build(images=("a.png",), prompts="prompts.txt", raw_prompt=True)
    assert raw.prompt == " <start_of_image> Total: "
    assert build(images=("a.png",), prompts="prompts.txt")[0].prompt == raw.prompt.strip()


PAIRS = 3 * 2


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 4 * PAIRS), seed=st.integers(0, 2**32))
def test_a_sample_is_seeded_in_order_and_balanced(folder: Path, count: int, seed: int) -> None:
    (folder / "prompts.txt").write_text("What?\nWho?\n")
    source = {"images": tuple(SIZES), "prompts": "prompts.txt"}
    everything = [(item.documents, item.prompt) for item in build(**source)]
    items = build(**source, num_samples=count, seed=seed)
    assert items == build(**source, num_samples=count, seed=seed)
    assert len({item.id for item in items}) == len(items) == count
    chosen = [everything.index((item.documents, item.prompt)) for item in items]
    if count <= PAIRS:
        assert chosen == sorted(set(chosen)), "a draw without repeats, in the order of the whole"
    else:
        assert chosen == [number % PAIRS for number in range(count)]
    assert max(Counter(chosen).values()) == -(-count // PAIRS)


def test_another_seed_is_another_draw(folder: Path) -> None:
    assert len({tuple(names(build(images=tuple(SIZES), num_samples=1, seed=seed))) for seed in range(20)}) == 3


@pytest.mark.parametrize("ids", [("x", "x"), ("x", "x+1"), (1, "1"), (None, "None")])
def test_requests_of_one_id_are_kept_apart(folder: Path, ids: tuple[Any, Any]) -> None:
    rows = [{"image": "a.png", "question": str(number), "id": row_id} for number, row_id in enumerate(ids)]
    items = dataset(folder, *rows, num_samples=4)
    assert len({item.id for item in items}) == 4
    assert [item.prompt for item in items] == ["0", "1", "0", "1"]
    assert items[0].id == ("00000" if ids[0] is None else str(ids[0]))


@pytest.mark.parametrize("image", ["", [], [""], ["a.png", ""], None, {"a": 1}, "a\ud800.png"])
def test_an_image_must_be_named(folder: Path, image: Any) -> None:
    """An empty name would stand for the dataset's whole directory."""
    (folder / "q.jsonl").write_text(json.dumps({"image": image, "question": "?"}))
    with pytest.raises(DatasetError, match=r"q\.jsonl, line 1: ('image' must|half of a surrogate)"):
        build(dataset="q.jsonl")


def test_a_source_without_documents_gets_the_samples() -> None:
    remarks: list[str] = []
    questions = sample_dataset()
    source = source_or_samples(on_default=remarks.append, dataset_format="jsonl", num_samples=3)
    assert source == Source(dataset=str(questions), dataset_format="jsonl", num_samples=3)
    asked = source_or_samples(on_default=remarks.append, prompt="Who?")
    assert asked == Source(images=(str(questions.parent),), prompt="Who?")
    samples = f"no --images given: using the bundled sample documents ({questions.parent})"
    assert remarks == [samples, samples]


def test_a_source_with_documents_is_kept() -> None:
    said: list[str] = []
    prompts, alone = {"images": ("a.png",), "prompts": "prompts.txt"}, {"no_images": True, "prompt": "Who?"}
    for fields in ({"images": ("a.png",)}, prompts, {"dataset": "q.jsonl"}, alone):
        assert source_or_samples(on_default=said.append, **fields) == Source(**fields)
    assert said == [f"no -p given: asking {DEFAULT_PROMPT!r}"]


# What a batch job asks: which documents and rows, in which order, and that nothing is opened before its turn.


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


ASKED_ONCE = [
    (["docs/p3.pdf#page=2"], ["docs/p3.pdf#page=2"]),
    (["docs/p3.pdf#page=2", "docs/*.pdf"], [f"docs/p3.pdf#page={number}" for number in (1, 2, 3)]),
    (["docs/p2.png", "./docs/p2.png", "docs/*2.png", "docs/p2.png#page=1"], ["docs/p2.png"]),
    (["docs/p3.pdf#page=3", "docs/p3.pdf#page=1"], ["docs/p3.pdf#page=3", "docs/p3.pdf#page=1"]),
]


@pytest.mark.parametrize(("sources", "ids"), ASKED_ONCE)
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
    measured = load_workload(Source(dataset=rows), on_problem=refuse).items
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
    for rows, reason in (
        ([{**row, "id": "00001"}, row], "two questions have the id '00001'"),
        ([row, {"image": "a.png"}], r"^q\.jsonl, line 2: 'question' is missing"),
        ([row, {**row, "question": "  "}], "the question with the id '00001' is empty"),
        ([], "has no question"),
    ):
        write_rows(folder / "q.jsonl", *rows)
        with pytest.raises(DatasetError, match=reason):
            find("q.jsonl")


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
    assert [item.id for item in find("docs/p4.png") if item.problem] == ["docs/p4.png"], "it is there"


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
    assert list(find(rows).files) == [rows, *(str(folder / "docs" / name) for name in ("sub/a.jpg", "p2.png"))]


# Documents of a calibration: what a sample opens, and what is held out.


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions about thirty documents; the first eleven are copies of one file."""
    folder = tmp_path_factory.mktemp("dataset")
    rows = []
    for number in range(40):
        name = f"{number % 30}.png"
        if 0 < number < 11:
            shutil.copyfile(folder / "0.png", folder / name)
        elif number < 30:
            noise(32, 32, number).save(folder / name)
        rows.append({"image": name, "question": f"Question {number}?", "answers": ["12"]})
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "questions.jsonl"


def test_only_the_sample_of_a_dataset_is_opened(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, float, float | None]] = []

    def advance(step: Activity) -> None:
        step.done += 1
        steps.append((step.text, step.done, step.total))

    monkeypatch.setattr(Activity, "advance", advance)
    calibration, held_out, _ = load_calibration(CalibrationSource((str(copies),), num_samples=4), pytest.fail)
    assert len(calibration) == 4 and steps[-1] == ("reading documents", 12, 12)
    assert held_out
    measured, _ = load_documents(str(copies), 3, 0, pytest.fail)
    assert len(measured.items) == 3
    complete, _ = load_documents(str(copies), 100, 0, pytest.fail)
    assert len({item.id for item in complete.items}) == len(complete.items) == 40


@pytest.mark.parametrize("seed", range(4))
def test_no_file_is_both_calibrated_and_measured_on(copies: Path, seed: int) -> None:
    wanted = CalibrationSource((str(copies),), seed=seed)
    calibration, held_out, _ = load_calibration(wanted, pytest.fail)
    assert len(calibration) + len(held_out) == 40 and held_out
    contents = [{document.sha256 for item in side for document in item.documents} for side in (calibration, held_out)]
    assert contents[0].isdisjoint(contents[1])
