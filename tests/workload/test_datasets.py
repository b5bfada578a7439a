"""Datasets as they lie on people's disks: small made-up files in every public layout, with every kind of bad row."""

import json
import sys
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.conftest import noise
from tests.images.encoding import encode

from panscan.core import DatasetError, InputError, SettingError, UnsupportedError
from panscan.core.activity import Activity
from panscan.records.schema import DatasetFacts
from panscan.records.scores import scores_of
from panscan.workload import datasets, tables
from panscan.workload import rows as dataset_lines
from panscan.workload.datasets import FORMATS, load_dataset
from panscan.workload.requests import Source, Workload, load_workload
from panscan.workload.rows import Boundary, LoadedDataset, answer_texts
from panscan.workload.tables import TableFile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(path: Path, width: int = 60, height: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(width, height).save(path)
    return path


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return path


def workload(place: Path, problems: list[str] | None = None, **source: Any) -> Workload:
    def remember(problem: InputError) -> None:
        assert problems is not None, problem
        problems.append(str(problem))

    return load_workload(Source(dataset=str(place), **source), on_problem=remember)


def docvqa(folder: Path) -> Path:
    for name in ("ffbf0023_4", "xnbl0037_1"):
        picture(folder / "documents" / f"{name}.png")
    (folder / "documents" / "cut.png").write_bytes((folder / "documents/ffbf0023_4.png").read_bytes()[:300])
    first = {"questionId": 337, "question": "What is the date?", "answers": ["1/8/93", "1/8/1993"]}
    tags = {"question_types": ["handwritten", "form"], "docId": 279, "data_split": "val"}
    rows: list[dict[str, Any]] = [
        {**first, **tags, "image": "documents/xnbl0037_1.png"},
        {"questionId": 338, "question": "Who?", "image": "documents/ffbf0023_4.png", "answers": ["P. Carter"]},
        {"questionId": 338, "question": "Who else?", "image": "documents/ffbf0023_4.png", "answers": ["nobody"]},
        {"questionId": 339, "question": "Gone?", "image": "documents/gone.png", "answers": ["x"]},
        {"questionId": 340, "question": "Nothing?", "answers": ["x"]},
        {"questionId": 341, "question": "Cut?", "image": "documents/cut.png", "answers": ["x"]},
        {"questionId": 342, "question": "Unknown?", "image": "documents/ffbf0023_4.png", "answers": []},
        {"questionId": 343, "question": "Blank?", "image": "documents/ffbf0023_4.png", "answers": [" "]},
        {"questionId": 344, "question": "How many?", "image": "documents/ffbf0023_4.png", "answers": [12.25, ["13"]]},
        {"questionId": 345, "question": None, "image": "documents/ffbf0023_4.png", "answers": ["x"]},
        {"questionId": 346, "question": 7, "image": 3, "answers": {"right": "x"}},
    ]
    write(folder / "val_v1.0_withQT.json", {"dataset_name": "docvqa", "data": rows})
    write(folder / "val_v1.0.json", {"data": []})  # the one with question types is taken
    test = [{"questionId": 1, "question": "Which?", "image": "documents/xnbl0037_1.png", "data_split": "test"}]
    write(folder / "test_v1.0.json", {"dataset_name": "docvqa", "data": test})
    return folder


def test_docvqa_with_every_kind_of_bad_row(tmp_path: Path) -> None:
    problems: list[str] = []
    loaded = workload(docvqa(tmp_path / "DocVQA"), problems)
    assert loaded.metric == "anls"
    by_id = {item.id: item for item in loaded.items}
    assert list(by_id) == ["337", "338", "338#2", "342", "343", "344"]
    assert by_id["337"].answers == ("1/8/93", "1/8/1993")
    assert by_id["337"].tag_values == {"type": ["handwritten", "form"]}
    assert by_id["337"].documents[0].name == str(tmp_path / "DocVQA/documents/xnbl0037_1.png")
    assert by_id["344"].answers == ("12.25", "13")
    assert [by_id[row_id].answers for row_id in ("342", "343")] == [(), ()]
    [problem] = problems
    assert "cut.png" in problem
    dataset = loaded.dataset
    assert (dataset.layout, dataset.split, dataset.other_splits) == ("docvqa", "validation", "test")
    assert dataset.text == (
        "docvqa, validation, 11 questions: 6 used, 4 without a readable image, 1 without a question,"
        " 2 without answers (unscored), 1 with an id seen before (renamed),"
        " 1 with answers that are no list of texts (read as texts)"
    )


def test_a_test_split_has_no_answers_and_no_quality(tmp_path: Path) -> None:
    loaded = workload(docvqa(tmp_path), dataset_split="test")
    assert (loaded.dataset.used, loaded.dataset.unscored, loaded.dataset.split) == (1, 1, "test")
    assert loaded.quality_metric(None) is None
    with pytest.raises(SettingError, match="--quality-metric anls: no question has accepted answers"):
        loaded.quality_metric("anls")


def test_a_file_of_docvqa_is_enough_and_pictures_may_lie_elsewhere(tmp_path: Path) -> None:
    """As downloaded today: annotations and pictures in folders of their own."""
    docvqa(tmp_path)
    (tmp_path / "documents").rename(tmp_path / "spdocvqa_images")
    (tmp_path / "spdocvqa_qas").mkdir()
    for file in tmp_path.glob("*.json"):
        file.rename(tmp_path / "spdocvqa_qas" / file.name)
    for place in ("", "spdocvqa_qas", "spdocvqa_qas/val_v1.0_withQT.json"):
        assert workload(tmp_path / place, []).dataset.used == 6


def test_infographicvqa(tmp_path: Path) -> None:
    picture(tmp_path / "infographicsvqa_images" / "30039.jpeg", 40, 200)
    row = {"questionId": 98313, "question": "How many?", "image_local_name": "30039.jpeg", "answers": ["2"]}
    row |= {"answer_type": ["single span"], "evidence": ["text"], "operation/reasoning": [], "ocr": "30039.json"}
    write(tmp_path / "infographicsVQA_val_v1.0_withQT.json", {"data": [row, {**row, "image_local_name": "x.jpeg"}]})
    write(tmp_path / "infographicsVQA_test_v1.0.json", {"data": [row]})
    loaded = workload(tmp_path)
    [item] = loaded.items
    assert (item.id, item.tag_values, loaded.metric) == ("98313", {"type": ["single span"]}, "anls")
    assert (loaded.dataset.layout, loaded.dataset.without_image) == ("infographicvqa", 1)


def test_chartqa(tmp_path: Path) -> None:
    folder = tmp_path / "ChartQA Dataset"
    for split in ("test", "val"):
        picture(folder / split / "png" / "41699051005347.png")
        picture(folder / split / "tables" / "41699051005347.png")
        human = [
            {"imgname": "41699051005347.png", "query": "How many bars?", "label": "14"},
            {"imgname": "41699051005347.png", "query": "Sum?", "label": 0.57},
            {"imgname": "gone.png", "query": "Sum?", "label": "1"},
        ]
        write(folder / split / f"{split}_human.json", human)
        write(folder / split / f"{split}_augmented.json", [{**human[0], "label": ["Yes", "yes"]}])
    loaded = workload(folder)
    assert [(item.id, item.answers, item.tag_values["type"]) for item in loaded.items] == [
        ("augmented-00000", ("Yes", "yes"), ["augmented"]),
        ("human-00000", ("14",), ["human"]),
        ("human-00001", ("0.57",), ["human"]),
    ]
    dataset = loaded.dataset
    assert (loaded.metric, dataset.split, dataset.other_splits) == ("relaxed_accuracy", "test", "validation")
    assert (dataset.questions, dataset.without_image, dataset.converted_answers) == (4, 1, 0)
    assert workload(folder / "val", dataset_split="val").dataset.split == "validation"
    assert workload(folder / "test" / "test_human.json").dataset.used == 2


def test_textvqa_has_ten_answers(tmp_path: Path) -> None:
    picture(tmp_path / "train_images" / "003a8ae2ef43b901.jpg")
    answers = ["nokia"] * 9 + ["toshiba"]
    row = {"question": "what brand?", "image_id": "003a8ae2ef43b901", "question_id": 34602, "answers": answers}
    questions = {"dataset_type": "val", "data": [row, {**row, "image_id": "0"}]}
    write(tmp_path / "TextVQA_0.5.1_val.json", questions)
    loaded = workload(tmp_path)
    [item] = loaded.items
    assert (item.id, item.answers) == ("34602", tuple(answers))
    assert loaded.quality_metric(None) == "vqa_accuracy"
    silent = [*answers[:9], " "]
    write(tmp_path / "TextVQA_0.5.1_val.json", {"data": [{**row, "answers": texts} for texts in (silent, [""] * 10)]})
    loaded = workload(tmp_path)
    assert [item.answers for item in loaded.items] == [tuple(silent), ()], "one who said nothing is one of the ten"
    assert scores_of("nokia", loaded.items[0].answers)["vqa_accuracy"] == 1.0
    for columns, expected in (({"image_id": ["a"], "image_classes": [["c"]]}, silent), ({}, silent[:9])):
        content = {"question": ["?"], "answers": [silent], "image": [{"bytes": PNG, "path": None}], **columns}
        as_parquet(table(content), tmp_path / "rows.parquet")
        assert workload(tmp_path / "rows.parquet").items[0].answers == tuple(expected)
    assert loaded.dataset.unscored == 1
    elsewhere = write(tmp_path / "any" / "name.json", questions)
    picture(elsewhere.parent / "open images" / "003a8ae2ef43b901.jpg")
    assert workload(elsewhere).dataset == DatasetFacts("textvqa", questions=2, used=1, without_image=1)


PNG, JPEG = encode(noise(60, 40), "PNG"), encode(noise(30, 90), "JPEG")
LIKE_DOCVQA = {
    "questionId": ["1", "2", "3", "3"],
    "question": ["What?", "Which?", "Gone?", "Broken?"],
    "question_types": [["form"], ["table/list", "layout"], None, []],
    "image": [{"bytes": content, "path": "a.png" if content is PNG else None} for content in (PNG, JPEG, None, b"bad")],
    "docId": [1, 2, 3, 4],
    "answers": [["x"], ["y", "z"], ["x"], None],
}
ASKED: dict[str, list[Any]] = {"question": ["?"], "answers": [["14"]]}
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(columns: dict[str, list[Any]]) -> pa.Table:
    return pa.table({name: pa.array(values, IMAGE if name == "image" else None) for name, values in columns.items()})


def as_parquet(content: pa.Table, path: Path) -> None:
    parquet.write_table(content, path, row_group_size=2)


def as_arrow(content: pa.Table, path: Path, opened: Callable[..., Any] = pa.ipc.new_file) -> None:
    with opened(path, content.schema) as writer:
        writer.write_table(content, max_chunksize=3)


as_stream = partial(as_arrow, opened=pa.ipc.new_stream)


STORED_TABLES = [
    (as_parquet, ["DocVQA/validation-00000-of-00001.parquet", "DocVQA/test-00000-of-00001.parquet"]),
    (as_stream, ["validation/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"]),  # save_to_disk
    (as_stream, ["d/0.0.0/abc/doc_vqa-validation.arrow", "d/0.0.0/abc/doc_vqa-test.arrow"]),  # the cache
    (as_arrow, ["validation.arrow", "test.arrow"]),
]


@pytest.mark.parametrize(("store", "names"), STORED_TABLES)
def test_tables_of_hugging_face(tmp_path: Path, cache: Path, store: Callable[..., None], names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        store(table(LIKE_DOCVQA), tmp_path / name)
    (tmp_path / names[0]).with_name("cache-1234.arrow").write_bytes(b"of a map function")
    problems: list[str] = []
    loaded = workload(tmp_path, problems)
    one, two = loaded.items
    assert (loaded.metric, loaded.dataset.split, loaded.dataset.other_splits) == ("anls", "validation", "test")
    assert (one.id, one.answers, one.tag_values) == ("1", ("x",), {"type": ["form"]})
    assert (two.answers, two.tag_values) == (("y", "z"), {"type": ["table/list", "layout"]})
    [first], [second] = one.documents, two.documents
    assert [(document.width, document.height) for document in (first, second)] == [(60, 40), (30, 90)]
    paths = [Path(document.name) for document in (first, second)]
    assert [path.read_bytes() for path in paths] == [PNG, JPEG], "not encoded again"
    assert {path.parent for path in paths} == {cache / "dataset-pictures"}
    assert [path.suffix for path in paths] == [".png", ".jpg"]
    assert (loaded.dataset.questions, loaded.dataset.without_image, loaded.dataset.repeated_ids) == (4, 2, 1)
    [problem] = problems  # the row without bytes names no file
    assert f", id 3#2: {cache}/" in problem
    again = workload(tmp_path, [])
    assert again.items == loaded.items, "as a resumed run finds them"
    assert len(list((cache / "dataset-pictures").iterdir())) == 3


def test_table_files_that_belong_to_no_split_are_counted(tmp_path: Path) -> None:
    for name in ("train-0", "validation-0", "latest"):
        (tmp_path / "data").mkdir(exist_ok=True)
        columns = {"image": [{"bytes": PNG, "path": None}], "question": [f"{name}?"]}
        as_parquet(table(columns), tmp_path / "data" / f"{name}.parquet")
    loaded = workload(tmp_path)
    assert [item.prompt for item in loaded.items] == ["validation-0?"]
    assert (loaded.dataset.other_splits, loaded.dataset.files_without_split) == ("train", 1)
    assert loaded.dataset.text.endswith("1 file of no split not read")
    for name in ("train-0", "validation-0"):
        (tmp_path / "data" / f"{name}.parquet").unlink()
    assert workload(tmp_path).dataset.files_without_split == 0, "all files are of no split, and all are read"


def test_names_that_are_too_long_are_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"--dataset .*n: File name too long") as caught:
        load_dataset(tmp_path / ("n" * 300))
    assert "\n" not in str(caught.value)
    picture(tmp_path / "png" / "a.png")
    write(tmp_path / "test_human.json", [{"imgname": "n" * 300, "query": "?", "label": "x"}])
    as_parquet(pa.table({"image": ["n" * 300, "png/a.png"], "question": ["?", "!"]}), tmp_path / "rows.parquet")
    assert load_dataset(tmp_path / "test_human.json").facts.without_image == 1
    assert workload(tmp_path / "rows.parquet").dataset.without_image == 1


def test_only_what_is_drawn_is_written(tmp_path: Path, cache: Path) -> None:
    pictures = [{"bytes": encode(noise(20 + number, 20), "PNG"), "path": None} for number in range(40)]
    columns = {"image": pictures, "question": [str(number) for number in range(40)], "answer": list(range(40))}
    as_parquet(table(columns), tmp_path / "rows.parquet")
    loaded = workload(tmp_path / "rows.parquet", num_samples=5)
    assert [item.answers for item in loaded.items] == [(item.prompt,) for item in loaded.items]
    widths = [document.width for item in loaded.items for document in item.documents]
    assert widths == [20 + int(item.prompt) for item in loaded.items]
    assert len(list((cache / "dataset-pictures").iterdir())) == 5
    assert loaded.dataset.text == "table, 40 questions: 5 used, 35 not drawn"


def test_tables_are_read_forward_and_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more files than a process may open, and going back in one reads it again."""
    for number in range(4):
        pictures = [{"bytes": PNG if row % 2 else b"?", "path": None} for row in range(25)]
        content = table({"image": pictures, "question": [f"{number}-{row}" for row in range(25)]})
        parquet.write_table(content, tmp_path / f"test-{number}-of-4.parquet")
    readings, opened = [], []
    records = TableFile.records
    monkeypatch.setattr(TableFile, "records", lambda *given: readings.append(given) or records(*given))

    def count_open(_: Activity) -> None:
        opened.append(sum(Path(path).parent == tmp_path for path, *_ in psutil.Process().open_files()))

    monkeypatch.setattr(Activity, "advance", count_open)
    loaded = load_workload(Source(dataset=str(tmp_path), num_samples=40), on_problem=lambda _: None)
    assert len(loaded.items) == len(opened) == 40
    assert max(opened) == 1
    rounds = 6  # of 40 drawn rows about half are broken, of as many others half again
    assert len(readings) <= 4 * (1 + rounds), "questions once, and images once per round"


def test_a_bad_picture_that_was_drawn_is_replaced(tmp_path: Path) -> None:
    """All but six of forty pictures are broken; whatever is drawn first, six are found."""
    good = [number * 7 % 40 for number in range(6)]
    pictures = [{"bytes": PNG if number in good else b"?%d" % number, "path": None} for number in range(40)]
    columns = {"image": pictures, "question": [str(number) for number in range(40)]}
    as_parquet(table(columns), tmp_path / "rows.parquet")
    for seed in range(5):
        problems: list[str] = []
        loaded = workload(tmp_path, problems, num_samples=6, seed=seed)
        assert [int(item.prompt) for item in loaded.items] == sorted(good), "in the order of the dataset"
        broken = loaded.dataset.without_image
        assert 0 < broken <= 34
        assert len(problems) == min(broken, 9)
        assert broken <= 8 or problems[-1].endswith(f": {broken - 8} more file{'s' if broken > 9 else ''}")


COLUMNS_OF = [
    ({"query": ["?"], "label": [["14"]], "human_or_machine": [0]}, "relaxed_accuracy", ["human"]),
    ({"query": ["?"], "label": [["14"]], "human_or_machine": [1]}, "relaxed_accuracy", ["machine"]),
    ({"question": ["?"], "answer": ["14"], "type": ["human_test"]}, "relaxed_accuracy", ["human_test"]),
    ({**ASKED, "image_id": ["a"], "flickr_300k_url": ["u"]}, "vqa_accuracy", []),
    ({**ASKED, "answer_type": [["list"]], "operation/reasoning": [[]]}, "anls", ["list"]),
    ({"question": ["?"], "answer": [14]}, "exact_match", []),
]


@pytest.mark.parametrize(("columns", "metric", "types"), COLUMNS_OF)
def test_the_columns_tell_which_dataset_it_is(tmp_path: Path, columns: Any, metric: str, types: list[str]) -> None:
    as_parquet(table({**columns, "image": [{"bytes": PNG, "path": None}]}), tmp_path / "test-00000-of-00001.parquet")
    loaded = workload(tmp_path)
    [item] = loaded.items
    assert (loaded.metric, item.answers, item.tag_values.get("type", [])) == (metric, ("14",), types)


COLUMN_TYPES = [
    (["?"], pa.array([Decimal("12.50")]), ("12.50",)),
    (pa.array(["?"]).dictionary_encode(), pa.array(["x"]).dictionary_encode(), ("x",)),
    (["?"], pa.array([{"text": ["x"], "answer_start": [3]}]), ("x",)),
    (["?"], pa.array([None]), ()),
    (["?"], [b"x"], "column 'answer' is binary, not text"),
    (["?"], [[{"text": b"x"}]], "column 'answer' is binary, not text"),
    (["?"], pa.array([3], pa.duration("s")), r"column 'answer' is duration\[s\], not text"),
    ([7], ["x"], "column 'question' is int64, not text"),
    ([["?"]], ["x"], "column 'question' is list<.*>, not text"),
]


@pytest.mark.parametrize(("questions", "answers", "said"), COLUMN_TYPES)
def test_types_of_columns_that_are_text_and_others(tmp_path: Path, questions: Any, answers: Any, said: Any) -> None:
    pictures = pa.array([{"bytes": PNG, "path": None}], IMAGE)
    as_arrow(pa.table({"image": pictures, "question": questions, "answer": answers}), tmp_path / "rows.arrow")
    if isinstance(said, str):
        with pytest.raises(DatasetError, match=f"rows.arrow: {said}"):
            workload(tmp_path)
    else:
        assert workload(tmp_path).items[0].answers == said


def test_pictures_of_a_table_may_be_bare_bytes_lists_or_paths(tmp_path: Path) -> None:
    picture(tmp_path / "sub" / "a.png")
    kinds = {
        "bytes": pa.array([PNG, None], pa.binary()),
        "lists": pa.array([[{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": None}], []], pa.list_(IMAGE)),
        "paths": pa.array(["sub/a.png", "sub/gone.png"]),
        "named": pa.array([{"bytes": None, "path": "sub/a.png"}, {"bytes": None, "path": "sub/gone.png"}], IMAGE),
    }
    for kind, pictures in kinds.items():
        name = "images" if kind == "lists" else "image"
        as_parquet(pa.table({name: pictures, "question": ["?", "!"]}), tmp_path / f"{kind}.parquet")
        [item] = workload(tmp_path / f"{kind}.parquet").items
        assert len(item.documents) == (2 if kind == "lists" else 1), kind


def test_a_repository_of_the_hubs_cache_is_its_current_snapshot(tmp_path: Path) -> None:
    write(tmp_path / "refs" / "main", "bbb").write_text("bbb")
    for revision in ("aaa", "bbb"):
        place = picture(tmp_path / "snapshots" / revision / "a.png").with_name("test-00000-of-00001.parquet")
        as_parquet(pa.table({"image": ["a.png"], "question": [revision]}), place)
    assert [item.prompt for item in workload(tmp_path).items] == ["bbb"]


def test_several_datasets_in_one_folder_are_told_apart_by_the_user(tmp_path: Path) -> None:
    for name in ("DocVQA", "InfographicVQA"):
        (tmp_path / name).mkdir()
        as_parquet(table(LIKE_DOCVQA), tmp_path / name / "validation-00000-of-00001.parquet")
    with pytest.raises(DatasetError, match=r"several datasets .* name one of the folders .*DocVQA, .*InfographicVQA"):
        load_dataset(tmp_path)
    docvqa(tmp_path / "InfographicVQA")
    with pytest.raises(DatasetError, match=r"the folder has docvqa and table: choose with --dataset-format"):
        load_dataset(tmp_path / "InfographicVQA")
    assert load_dataset(tmp_path / "InfographicVQA", layout="docvqa").facts.layout == "docvqa"


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_parquet(table(LIKE_DOCVQA), tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow: pip install .*\[datasets\]"):
        load_dataset(tmp_path)


NESTED, DEEPER = (b"[" * depth + b"]" * depth for depth in (500, 100_000))
NO_DATASETS = [
    ("q.jsonl", "a\nGröße".encode("latin-1"), r"not UTF-8 text \(byte 0xf6 in line 2\): save it as UTF-8"),
    ("q.jsonl", "Größe".encode("cp1252"), "not UTF-8 text"),
    ("q.jsonl", "abc".encode("utf-16-le"), "perhaps UTF-16 without a byte order mark"),
    ("q.jsonl", b"\xff\xfea", "not the utf-16 text that its byte order mark promises"),
    ("q.jsonl", b'{"image": "a.png", "question": "?", "answers": %b}' % DEEPER, "nested too deeply.{,200}$"),
    ("rows.json", b'[{"imgname": "a.png", "query": "?", "label": %b}]' % NESTED, "nested too deeply.{,200}$"),
    ("val_v1.0.json", b"{", r"val_v1.0.json, line 1: not JSON"),
    ("val_v1.0.json", b"[]", "expected an object with a list 'data'"),
    ("val_v1.0.json", b'{"data": [1]}', "expected an object with a list 'data'"),
    ("test_human.json", b'{"data": []}', "expected a list of questions"),
    ("rows.parquet", b"PAR1 or not", "rows.parquet: not a readable Parquet or Arrow file"),
    ("rows.arrow", b"", "rows.arrow: not a readable Parquet or Arrow file"),
    ("other.json", b'{"data": [{"q": 1}]}', r"not a known layout \(jsonl, docvqa"),
    ("val_v1.0.json", b'{"data": []}', r"no usable question is left \(docvqa, validation, 0 questions: 0 used\)"),
]


@pytest.mark.parametrize(("name", "content", "message"), NO_DATASETS)
def test_what_is_no_dataset_is_said(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        workload(tmp_path / name)


def test_folders_and_columns_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    names = pa.array(["a.png"]), pa.array(["What?"]), pa.array(["Who?"])
    parquet.write_table(pa.Table.from_arrays(names, names=["image", "question", "question"]), tmp_path / "two.parquet")
    as_parquet(pa.table({"question": ["?"], "text": ["x"]}), tmp_path / "rows.parquet")
    for name, message in (
        ("none", r"no known layout \(jsonl, .*\) in this folder; see docs/quality\.md"),
        ("rows.parquet", r"rows.parquet: no column 'image' or 'images'; it has question, text"),
        ("two.parquet", "several columns are named 'question': rename all but one"),
    ):
        with pytest.raises(DatasetError, match=message):
            load_dataset(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings_that_say_what_they_are(tmp_path: Path, encoding: str) -> None:
    picture(tmp_path / "a.png")
    row = {"image": "a.png", "question": "Größe?\u2028中", "answers": ["12 €"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding)
    [item] = workload(tmp_path / "q.jsonl").items
    assert (item.prompt, item.answers) == ("Größe?\u2028中", ("12 €",))


ANSWERS = [
    (None, (), True),
    (["a", "b", "a"], ("a", "b", "a"), True),
    ([], (), True),
    (["", " "], (), True),
    ("a", ("a",), False),
    (12, ("12",), False),
    (12.0, ("12",), False),
    (0.1, ("0.1",), False),
    (float("nan"), (), False),
    (True, ("true",), False),
    (Decimal("12.50"), ("12.50",), False),
    ([date(2024, 1, 2), time(3, 4)], ("2024-01-02", "03:04:00"), False),
    ([datetime(2024, 1, 2, 3, 4)], ("2024-01-02 03:04:00",), False),
    ([1, ["a", [2.5]]], ("1", "a", "2.5"), False),
    ({"text": ["a"], "answer_start": [3]}, ("a",), False),
    ([{"answer": "a", "answer_id": 1}, {"answer": "b"}], ("a", "b"), False),
    ({"right": "a"}, (), False),
]


@pytest.mark.parametrize(("value", "texts", "flat"), ANSWERS)
def test_answers_of_any_kind(value: Any, texts: tuple[str, ...], flat: bool) -> None:
    assert answer_texts(value) == (texts, flat)


def test_numbers_of_json_lines_are_answers_as_they_are_written(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    rows = ['"answers": 12.50', '"answers": [1e3, "x"]', '"answers": "x"', '"answers": null', '"id": 1.0']
    lines = [f'{{"image": "a.png", "question": "?", {rest}}}' for rest in rows]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    loaded = workload(tmp_path / "q.jsonl")
    assert [item.answers for item in loaded.items] == [("12.50",), ("1e3", "x"), ("x",), (), ()]
    assert loaded.items[-1].id == "1.0"
    assert (loaded.dataset.converted_answers, loaded.dataset.unscored) == (3, 2)
    assert loaded.quality_metric(None) == "exact_match"
    assert loaded.quality_metric("anls") == "anls"
    for wrong, message in (("anl", "did you mean 'anls'"), ("vqa_accuracy", "requires questions with 10 answers each")):
        with pytest.raises(SettingError, match=message):
            loaded.quality_metric(wrong)


ids = st.sampled_from([None, "a", "a#2", "a#3", "00001", "b"])
questions = st.sampled_from(["?", None, "\ud83d", "", "  \n"])
rows = st.tuples(ids, st.booleans(), questions, st.sampled_from([["x"], [], "x", [1]]))


def test_half_a_surrogate_pair_is_counted_and_asked_nowhere(tmp_path: Path) -> None:
    picture(tmp_path / "png" / "a.png")
    good = {"imgname": "a.png", "query": "Sum?", "label": ["1", "\ud83d"]}
    broken = [{**good, "query": "bad \ud83d?"}, {**good, "imgname": "\udfff.png"}]
    (tmp_path / "test_human.json").write_text(json.dumps([good, *broken, {**good, "label": "\udfff"}]))
    result = workload(tmp_path)
    assert [(item.prompt, item.answers) for item in result.items] == [("Sum?", ("1",)), ("Sum?", ())]
    assert result.dataset.text == (
        "chartqa, test, 4 questions: 2 used, 1 without a readable image,"
        " 1 with half a surrogate pair, which is no text, 1 without answers (unscored)"
    )
    loaded = LoadedDataset(DatasetFacts("docvqa"), "anls", "--dataset x", Boundary([], external=True))
    loaded.add("\ud83d", ["a.png"], "?", [], [("type", ["x", "\ud83d"])])
    assert [(row.id, row.tags) for row in loaded.rows] == [("00000", (("type", "x"),))]


@given(st.lists(rows, max_size=12))
def test_every_row_is_counted_once_and_ids_are_unique(given_rows: list[tuple[Any, bool, Any, Any]]) -> None:
    loaded = LoadedDataset(DatasetFacts("jsonl"), "exact_match", "--dataset x", Boundary([], external=True))
    for row_id, has_image, question, answers in given_rows:
        loaded.add(row_id, ["a.png"] if has_image else [], question, answers)
    facts = loaded.facts
    assert facts.questions == len(given_rows)
    assert len(loaded.rows) + facts.without_image + facts.without_question + facts.broken_text == facts.questions
    assert len({row.id for row in loaded.rows}) == len(loaded.rows)
    assert [row.question for row in loaded.rows] == ["?"] * sum(image and q == "?" for _, image, q, _ in given_rows)


def test_every_layout_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quality.md").read_text("utf-8")
    for name in FORMATS:
        assert f"`{name}`" in text, name


LIMITS = [
    ("MOST_ROWS", "q.jsonl", '{"image": "a.png", "question": "?"}\n' * 4, "more than 2 lines"),
    ("MOST_ROWS", "test_human.json", json.dumps([{"imgname": "a.png", "query": "?"}] * 4), "more than 2 questions"),
    ("_MOST_BYTES", "q.jsonl", "{}\n", r"larger than \d+ bytes: split it"),
]


@pytest.mark.parametrize(("limit", "name", "content", "message"), LIMITS)
def test_a_dataset_beyond_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    for module in (dataset_lines, datasets):
        monkeypatch.setattr(module, limit, 2, raising=False)
    with pytest.raises(DatasetError, match=message):
        load_dataset(tmp_path / name)


def test_a_table_of_too_many_rows_or_of_huge_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    large = pa.table({"image": [b"x" * 3 * 2**20] * 3, "question": ["a", "b", "c"]})
    parquet.write_table(large, path, use_dictionary=False)
    table = TableFile(str(path), Boundary([], external=True))
    table.check_sizes(["image", "question"], 3)
    with pytest.raises(DatasetError, match=r"t.parquet: 3 rows, at most 2"):
        table.check_sizes(["question"], 2)
    monkeypatch.setattr(tables, "_LARGEST_VALUE", 1000)
    table.check_sizes(["question"], 3)
    with pytest.raises(DatasetError, match=r"t.parquet: column 'image' has .* bytes in 3 values: too large"):
        table.check_sizes(["image", "question"], 3)
