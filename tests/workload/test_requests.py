"""Workloads: which requests come out of pictures, prompts and datasets, and in which order."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import noise, refuse

from panscan.core import DatasetError, InputError, PanAndScan
from panscan.images.files import Page, load_page, page_digest
from panscan.images.views import plan_views
from panscan.settings import Settings
from panscan.workload.requests import (
    DEFAULT_PROMPT,
    Item,
    Source,
    build_workload,
    plans_of,
    request_of,
    source_or_samples,
)
from panscan.workload.samples import sample_dataset

SIZES = {"a.png": (260, 800), "b.png": (700, 300), "c.jpg": (300, 300)}


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with three pictures and a PDF of two pages."""
    for name, size in SIZES.items():
        noise(*size).save(folder / name)
    noise(150, 150, 1).save(folder / "scan.pdf", save_all=True, append_images=[noise(150, 150, 2)])
    return folder


def build(**source: Any) -> list[Item]:
    return build_workload(Source(**source), on_problem=refuse)


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
    [_, second] = build_workload(source, on_problem=refuse)
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
    assert sizes == {load_page(Page("scan.pdf", 1)).size}


def test_rows_keep_their_answers_tags_and_ids(folder: Path) -> None:
    row = {"image": "a.png", "question": "Two\nlines\u2028and \x85 \x0c more?", "answers": ["x", "y"]}
    one, two = dataset(
        folder, {**row, "kind": "receipt", "type": "total", "id": 7}, {"image": "b.png", "question": "?"}
    )
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

    items = build_workload(Source(images=("*.png", "cut.png", "none.png")), on_problem=remember)
    assert names(items) == [("a.png",), ("b.png",)]
    assert [problem.split(":")[0] for problem in problems] == ["none.png", "cut.png"]
    problems.clear()
    rows = [{"image": image, "question": "?"} for image in ("cut.png", "a.png", "cut.png", ["a.png", "cut.png"])]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = build_workload(Source(dataset="q.jsonl"), on_problem=remember)
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
    rows = [{"image": "a.png", "question": str(number), "id": each} for number, each in enumerate(ids)]
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
    own = source_or_samples(on_default=remarks.append, dataset_format="jsonl", num_samples=3)
    assert own == Source(dataset=str(questions), dataset_format="jsonl", num_samples=3)
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
