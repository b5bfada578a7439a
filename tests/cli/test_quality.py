"""Quality from the command line: a public dataset measured, reported, recommended and compared."""

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.conftest import noise
from tests.report.report_page import page_of as page
from tests.report.report_page import rows_of, section

from panscan.cli.main import run
from panscan.records.quality import metric_of
from panscan.records.store import FILE_NAME, Run, read_run

pytestmark = pytest.mark.usefixtures("without_charts")

QUICK = ["--model", "tiny", "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", "2", "--no-verify"]


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four questions in DocVQA's layout; one picture is missing, and one question has no answers."""
    monkeypatch.setenv("PANSCAN_CACHE", str(folder / "cache"))
    (folder / "DocVQA" / "documents").mkdir(parents=True)
    for name, size in (("tall", (150, 400)), ("wide", (400, 150)), ("square", (150, 150))):
        noise(*size).save(folder / "DocVQA" / "documents" / f"{name}.png")
    questions = [("tall", ["form"], ["x"]), ("wide", ["form", "layout"], ["y"]), ("square", ["layout"], ["z"])]
    questions += [("gone", ["form"], ["x"]), ("square", ["form"], [])]
    rows = [
        {"questionId": number, "question": f"What is {number}?", "question_types": types, **row}
        for number, (types, row) in enumerate(
            (types, {"image": f"documents/{name}.png", "answers": answers}) for name, types, answers in questions
        )
    ]
    (folder / "DocVQA" / "val_v1.0_withQT.json").write_text(json.dumps({"data": rows}))
    return folder


def only_run(folder: Path) -> Run:
    [directory] = (folder / "runs").iterdir()
    return read_run(directory)


def test_a_public_dataset_from_bench_to_recommendation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench --repeats 1 --dataset DocVQA --pan-and-scan-max-num-crops 1,2 --min-crop-size 50"
    assert run([*line.split(), *QUICK]) == 0
    said = capsys.readouterr()
    counts = "docvqa, validation, 5 questions: 4 used, 1 without a readable image, 1 without answers (unscored)"
    assert f"dataset {counts}" in said.err
    assert f"Dataset {counts}." in " ".join(said.out.split())
    assert "ANLS" in said.out

    measured = only_run(folder)
    kept = measured.header.settings
    assert (metric_of(measured), kept.quality_metric, kept.dataset.used) == ("anls", "anls", 4)
    [first, *_] = measured.requests.values()
    metrics = {"exact_match", "anls", "relaxed_accuracy", "contains_answer"}
    assert [set(record.scores) for record in first] == [metrics, metrics, metrics, set()]
    assert first[1].tags == {"type": ["form", "layout"]}

    assert counts in section(page(measured), "cells").text
    answers = section(page(measured), "answers")
    tables = [rows_of(table) for table in answers.all("table")]
    assert {"accuracy (ANLS)", "accuracy (exact match)", "empty answers"} <= set(tables[0][0])
    assert [heading for heading in tables[1][0] if heading != "setting"] == ["form (2)", "layout (2)"]
    shapes = [heading for heading in tables[2][0] if heading != "setting"]
    assert shapes == ["tall 2–3 (1)", "square (1)", "wide 2–3 (1)"]

    with (measured.path.parent / "summary.csv").open(newline="") as file:
        [row, _] = csv.DictReader(file)
    assert (row["quality_metric"], row["empty_answers"]) == ("anls", "0")
    assert float(row["anls_low"]) <= float(row["anls"]) <= float(row["anls_high"])

    place = str(measured.path.parent)
    capsys.readouterr()
    assert run(["report", place, "--format", "md", "--quality-metric", "contains_answer"]) == 0
    text = capsys.readouterr().out
    assert "accuracy (contains answer), 95%" in text
    assert "Accuracy (contains answer) by question type" in text
    assert run(["recommend", place, "--min-quality", "1.0", "--quality-metric", "relaxed_accuracy"]) == 3
    assert "is shown to have accuracy (relaxed) >= 1: the nearest" in capsys.readouterr().err
    assert run(["recommend", place, "--min-quality", "0", "--json"]) == 0
    assert "accuracy (ANLS) 0" in json.loads(capsys.readouterr().out)["reason"]
    assert run(["compare", place, place, "--fail-on", "exact_match<-1%"]) == 0
    said_ = capsys.readouterr().out
    assert "anls" in said_
    assert "exact_match" in said_
    assert "contains_answer" not in said_


def test_another_metric_may_be_the_quality(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*shlex.split("bench --repeats 1 --dataset DocVQA --quality-metric exact_match --num-prompts 2"), *QUICK]
    assert run(line) == 0
    assert metric_of(only_run(folder)) == "exact_match"
    assert run(["report", str(only_run(folder).path.parent), "--quality-metric", "vqa_accuracy"]) == 2
    assert "--quality-metric vqa_accuracy: not in" in " ".join(capsys.readouterr().err.split())


def test_pictures_of_a_table_survive_a_resume(folder: Path) -> None:
    data = [(folder / "DocVQA" / "documents" / f"{name}.png").read_bytes() for name in ("tall", "wide", "square")]
    pictures = pa.array([{"bytes": each, "path": None} for each in data])
    columns: dict[str, Any] = {"image": pictures, "question": ["a", "b", "c"], "answers": [["x"], ["y"], None]}
    parquet.write_table(pa.table(columns), folder / "validation-00000-of-00001.parquet")
    name = "validation-00000-of-00001.parquet"
    assert run(["bench", "--dataset", name, "--repeats", "2", "--num-prompts", "2", *QUICK]) == 0
    before = only_run(folder)
    path = before.path.parent / FILE_NAME
    lines = path.read_text().splitlines()
    ends = [number for number, line in enumerate(lines) if json.loads(line)["type"] == "repeat"]
    path.write_text("\n".join(lines[: ends[0] + 1]) + "\n")  # as if it had been killed in the second repeat
    for kept in (folder / "cache" / "dataset-pictures").iterdir():
        kept.unlink()
    assert run(["bench", "--resume", str(path.parent)]) == 0
    after = only_run(folder)
    hashes = [[record.image_sha256 for record in run.requests[next(iter(run.cells)), 1]] for run in (before, after)]
    assert hashes[0] == hashes[1]


def test_a_split_without_answers_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads((folder / "DocVQA" / "val_v1.0_withQT.json").read_text())["data"]
    test = {"data": [{**row, "answers": None} for row in rows]}
    (folder / "DocVQA" / "test_v1.0.json").write_text(json.dumps(test))
    assert run(["bench", "--dataset", "DocVQA", "--dataset-split", "test", "--dry-run", *QUICK]) == 0
    said = capsys.readouterr().err
    assert "no question has a reference answer: quality is not measured" in said
    assert "(other splits: validation)" in said
