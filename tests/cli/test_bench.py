"""``panscan bench`` from the command line to the records: the launcher's line, and every way to say what to measure."""

import csv
import json
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from skimage import data
from tests.conftest import Panscan, documented, noise, only_run
from tests.report.report_page import page_of as page
from tests.report.report_page import rows_of, section

from panscan.cli.main import run
from panscan.images.views import plan_views
from panscan.records.metrics import LAUNCHER as LAUNCHER_COLUMNS
from panscan.records.quality import metric_of
from panscan.records.store import FILE_NAME, Run, read_run
from panscan.settings import Settings
from panscan.verdict.judgement import token_lines, verdict_of

pytestmark = pytest.mark.usefixtures("without_charts")

LAUNCHER = shlex.split(
    "bench --model_id google/gemma-3-27b-it --precision bf16 --attn_impl flash_attention_2 --device_map auto"
    ' --images "docs/*.png" --prompts prompts.txt --num_samples 40 --batch_size 2 --max_new_tokens 256'
    " --grid_min_ratio 2.0,2.5 --grid_max_crops 4,6 --grid_min_crop_size 448 --output_dir runs"
)
VERIFIED = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "2", "--warmup", "0"]
QUICK = [*VERIFIED, "--no-verify"]


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with three pictures (tall, wide, square) and a file of two prompts."""
    (folder / "docs").mkdir()
    for name, size in {"a.png": (260, 800), "b.png": (700, 300), "c.png": (300, 300)}.items():
        noise(*size).save(folder / "docs" / name)
    (folder / "prompts.txt").write_text("What is it?\n\nWhat is the total?\n")
    return folder


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every try to reach the network; it fails."""
    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        tried.append(address)
        raise OSError("this test has no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def changed(line: list[str], **values: str) -> list[str]:
    """A command line with other values."""
    line = list(line)
    for name, value in values.items():
        line[line.index(f"--{name}") + 1] = value
    return line


def summary_rows(measured: Run) -> list[dict[str, str]]:
    with (measured.path.parent / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def asked(measured: Run) -> dict[str, list[tuple[str, str]]]:
    """(id, pictures) of every request, by cell."""
    return {
        cell: [(record.request, " ".join(record.image)) for record in requests]
        for (cell, _), requests in measured.requests.items()
    }


def test_the_launchers_line_is_skipped_without_a_gpu(folder: Path, panscan: Panscan, connections: list[Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may be able to")
    noise(460, 2760).save(folder / "docs" / "strip.png")  # four crops or six
    noise(460, 1012).save(folder / "docs" / "tall.png")  # crops from a ratio of 2.0 on, none from 2.5 on
    said = panscan(*LAUNCHER, code=4)
    measured = only_run(folder)
    names = ("pan_and_scan_min_ratio_to_activate", "pan_and_scan_max_num_crops")
    grid = [tuple(cell.settings[name] for name in names) for cell in measured.cells.values()]
    assert sorted(grid) == [(2.0, 4), (2.0, 6), (2.5, 4), (2.5, 6)]
    for cell in measured.cells.values():
        fixed = ("model", "dtype", "attention", "device_map", "batch_size", "max_new_tokens")
        values = ["google/gemma-3-27b-it", "bf16", "flash_attention_2", "auto", 2, 256]
        assert [cell.settings[name] for name in fixed] == values
        assert cell.settings["pan_and_scan_min_crop_size"] == 448
    reason = "flash_attention_2 makes Gemma 3's image tokens causal (sdpa does not), and needs an NVIDIA GPU"
    outcomes = [(record.outcome, record.reason) for record in measured.outcomes.values()]
    assert outcomes == [("skipped", reason)] * 4
    assert (measured.requests, measured.header.settings.requests) == ({}, 40)
    assert measured.header.command == ["panscan", *LAUNCHER]
    assert said.err.count(reason) == 1, "each reason appears once"
    assert f"4 settings skipped: {reason}" in " ".join(said.out.split())
    rows = summary_rows(measured)
    assert [row["outcome"] for row in rows] == ["skipped"] * 4
    assert {row[column] for row in rows for column in LAUNCHER_COLUMNS} == {""}
    assert connections == []


@pytest.fixture
def pictures(folder: Path) -> Path:
    """Instead of the three pictures: sample documents, photographs, a page in grey, and a long strip."""
    for old in (folder / "docs").iterdir():
        old.unlink()
    assert run(["samples", "docs", "--count", "2"]) == 0
    for name, size in {"astronaut.png": (512, 512), "coffee.jpg": (1120, 500), "page.png": (384, 191)}.items():
        Image.fromarray(getattr(data, Path(name).stem)()).resize(size).save(folder / "docs" / name)
    noise(460, 2760).save(folder / "docs" / "strip.png")
    return folder


def test_the_launchers_line_measures_the_tiny_model(pictures: Path, connections: list[Any]) -> None:
    (pictures / "prompts.txt").write_text("What is it?\n")
    small = {"images": "docs/*", "num_samples": "6", "max_new_tokens": "2"}
    line = changed(LAUNCHER, model_id="tiny", precision="fp32", attn_impl="sdpa", **small)
    place = line.index("--device_map")
    line[place : place + 2] = ["--device", "cpu"]
    assert run([*line, "--warmup", "0", "--repeats", "1", "--no-verify"]) == 0
    measured = only_run(pictures)
    assert [record.outcome for record in measured.outcomes.values()] == ["done"] * 4
    assert len({tuple(requests) for requests in asked(measured).values()}) == 1
    crops = {}
    for (cell, _), requests in measured.requests.items():
        settings = Settings(**measured.cells[cell].settings)
        assert len(requests) == 6
        for record in requests:
            with Image.open(pictures / record.image[0]) as image:
                plan = plan_views(*image.size, settings.pan_and_scan)
            assert (record.crops, record.views) == (plan.crops, len(plan.views))
            assert record.image_tokens == 64 * record.views
            assert 1 <= record.output_tokens <= 2
        limits = (settings.pan_and_scan_min_ratio_to_activate, settings.pan_and_scan_max_num_crops)
        crops[limits] = sum(record.crops for record in requests)
    assert crops[2.0, 4] > crops[2.5, 4] > 0
    assert crops[2.5, 6] > crops[2.5, 4]
    rows = summary_rows(measured)
    assert [row["cell"] for row in rows] == list(measured.cells)
    assert all(float(row[column]) > 0 for row in rows for column in LAUNCHER_COLUMNS)
    assert connections == []


def test_a_dry_run_shows_cells_and_runs_nothing(folder: Path, panscan: Panscan) -> None:
    names = ["docs/a.png", "docs/b.png", "docs/c.png"]  # a pattern that the shell has expanded
    sweep = "--num-prompts 7 --no-pan-and-scan --batch-size 3,4 --attn_impl sdpa,flash_attention_2"
    line = ["bench", "--repeats", "1", "--images", *names, "-p", "x", *sweep.split(), *QUICK]
    said = panscan(*line, "--dry-run").out
    assert "4 cells, 7 requests each, 1 repeat" in said
    assert "skipped: flash_attention_2 makes Gemma 3's image tokens causal" in said
    refused = panscan("bench docs -p x --runner generate_batch --dry-run", *QUICK).out
    assert "skipped: runner generate_batch: images are not supported" in refused
    document = documented("bench", panscan(*line, "--dry-run", "--json").out)
    assert (document["requests"], document["repeats"], len(document["cells"])) == (7, 1, 4)
    assert not (folder / "runs").exists()
    assert run(line) == 4
    measured = only_run(folder)
    for cell, recorded in measured.cells.items():
        assert cell in said, "cells keep their ids, whole, between a dry run and the run"
        due = "done" if recorded.settings["attention"] == "sdpa" else "skipped"
        assert measured.outcomes[cell].outcome == due
    one, two = asked(measured).values()
    assert one == two and len({request for request, _ in one}) == 7
    assert [picture for _, picture in one] == [*names, *names, names[0]]


def test_presets_are_cells(folder: Path) -> None:
    line = shlex.split("bench --repeats 1 docs/a.png -p x --preset baseline,balanced --min-crop-size 50")
    assert run([*line, *VERIFIED]) == 0
    measured = only_run(folder)
    assert [cell.settings["do_pan_and_scan"] for cell in measured.cells.values()] == [False, True]
    assert [cell.settings["max_new_tokens"] for cell in measured.cells.values()] == [2, 2], "a flag wins over a preset"
    assert set(measured.finished()) == {(cell, visit) for cell in measured.cells for visit in (0, None)}
    assert [cell.preset for cell in measured.cells.values()] == ["baseline", "balanced"]


def test_text_only_checkpoints_answer_prompts_alone(folder: Path, text_checkpoint: Path) -> None:
    model = changed(QUICK, **{"model": str(text_checkpoint), "max-new-tokens": "8"})
    line = "bench --no-images --prompts prompts.txt --batch-size 2 --runner generate,generate_batch --include-content"
    assert run([*line.split(), "--repeats", "1", *model]) == 0
    measured = only_run(folder)
    assert [cell.settings["runner"] for cell in measured.cells.values()] == ["generate", "generate_batch"]
    first, second = measured.requests.values()
    for record in (*first, *second):
        assert (record.image, record.views, record.image_tokens) == ([], 0, 0)
        assert record.output_tokens > 0
    assert [record.content for record in first] == [record.content for record in second]
    assert [record.content.prompt for record in first] == ["What is it?", "What is the total?"]


def test_without_any_argument_it_says_what_it_uses(folder: Path, panscan: Panscan) -> None:
    said = panscan("bench --repeats 1 --max-new-tokens 2 --num-prompts 3 --no-verify")
    [model, runner, documents, *_] = said.err.splitlines()
    assert model.startswith("no --model given: using the bundled mini Gemma 3")
    assert runner == "runner: engine (the default; it supports all your options)"
    assert documents.startswith("no --images given: using the bundled sample documents")
    measured = only_run(folder)
    [requests] = measured.requests.values()
    assert len(requests) == 3
    assert all(Path(record.image[0]).parent.name in documents for record in requests)
    for name in ("records.jsonl", "summary.csv"):
        assert str(Path("runs", measured.path.parent.name, name)) in said.out
    assert "Unverified: --no-verify" in said.out and not (measured.path.parent / "truth").exists()
    assert "--no-verify" in (measured.path.parent / "report.html").read_text()


def test_the_verdict_stands_in_every_output(folder: Path, panscan: Panscan) -> None:
    line = "bench --repeats 1 docs/a.png -p x --prefill-chunk-size none,100 --runner generate --dtype fp32"
    said = panscan(line, *VERIFIED).out
    directory = only_run(folder).path.parent
    verdicts = [record.verdict for record in read_run(directory).verdicts.values()]
    assert sorted(verdicts) == ["different", "exact"]
    assert "1 exact, 1 different" in " ".join(said.split())
    assert "Computing the reference took" in said
    for name in ("summary.csv", "report.html"):
        text = (directory / name).read_text()
        assert "different" in text, name
        assert "exact" in text, name
    assert len(list((directory / "truth").iterdir())) == 1


@pytest.mark.parametrize("left", ["nothing", "the first line"])
def test_a_verdict_that_is_missing_is_made_on_resume(folder: Path, left: str) -> None:
    """Also one that was stopped before measured tokens were checked beyond the reference: they are answered again."""
    assert run(["bench", "--repeats", "1", "docs/a.png", "-p", "x", *VERIFIED, "--verify-tokens", "1"]) == 0
    measured = only_run(folder)
    lines = measured.path.read_text().splitlines(keepends=True)
    verdicts = [line for line in lines if '"type":"verdict"' in line]
    assert [json.loads(line)["concluded"] for line in verdicts] == [False, True]
    remaining = verdicts[: left == "the first line"]
    measured.path.write_text("".join([*(line for line in lines if line not in verdicts), *remaining]))
    if remaining:
        assert "--resume" in " ".join(token_lines([verdict_of(only_run(folder), cell) for cell in measured.cells]))
    before = measured.path.read_text()
    assert run(["bench", "--resume", str(measured.path.parent)]) == 0
    added = measured.path.read_text().removeprefix(before)
    assert list(dict.fromkeys(json.loads(line)["type"] for line in added.splitlines())) == ["load", "verdict"]
    for cell in measured.cells:
        verdict = verdict_of(only_run(folder), cell)
        assert (verdict.word, verdict.beyond.departed if verdict.beyond else None) == ("exact", 0)


def test_a_reference_must_fit(folder: Path, panscan: Panscan) -> None:
    assert run(["bench", "--repeats", "1", "docs/a.png", "-p", "x", "--dtype", "fp32", *VERIFIED]) == 0
    first = only_run(folder).path.parent
    elsewhere = ["--dtype", "fp32", "--output-dir", "elsewhere", "--reference", str(first)]
    assert run(["bench", "--repeats", "1", "docs/a.png", "-p", "x", "--attention", "eager", *elsewhere, *VERIFIED]) == 0
    measured = only_run(folder, "elsewhere")
    assert [truth.source for truth in measured.truths.values()] == ["reference"]
    assert [record.verdict for record in measured.verdicts.values()] == ["exact"]
    for reference, why in ((str(first), "other views"), ("nowhere", "no such file")):
        rest = ["-p", "another", "--output-dir", "none", "--reference", reference, *VERIFIED]
        said = panscan("bench --repeats 1 docs/a.png --dtype fp32", *rest, code=3).err
        [line] = [line for line in said.splitlines() if line.startswith("panscan:")]
        assert "--reference" in line and why in line
        assert "--resume" not in said
    assert not (folder / "none").exists()


def test_a_resumed_run_makes_only_the_references_that_it_still_needs(folder: Path) -> None:
    arguments = ["bench", "--repeats", "1", "docs", "-p", "x", "--do-pan-and-scan", "true,false", "--num-prompts", "2"]
    assert run([*arguments, *VERIFIED]) == 0
    measured = only_run(folder)
    directory = measured.path.parent
    assert len(list((directory / "truth").iterdir())) == 2
    shutil.rmtree(directory / "truth")
    left = list(measured.cells)[1]
    lines = measured.path.read_text().splitlines(keepends=True)
    measured.path.write_text("".join(line for line in lines if json.loads(line).get("cell") != left))
    assert run(["bench", "--resume", str(directory)]) == 0
    assert only_run(folder).verdicts[left].verdict == "exact"
    assert len(list((directory / "truth").iterdir())) == 1


# Quality from the command line: a public dataset measured, reported, recommended and compared.


SHORT = ["--model", "tiny", "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", "2", "--no-verify"]


@pytest.fixture
def questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four questions in DocVQA's layout; one picture is missing, and one question has no answers."""
    monkeypatch.setenv("PANSCAN_CACHE", str(folder / "cache"))
    (folder / "DocVQA" / "documents").mkdir(parents=True)
    for name, size in (("tall", (150, 400)), ("wide", (400, 150)), ("square", (150, 150))):
        noise(*size).save(folder / "DocVQA" / "documents" / f"{name}.png")
    asked_rows = [("tall", ["form"], ["x"]), ("wide", ["form", "layout"], ["y"]), ("square", ["layout"], ["z"])]
    asked_rows += [("gone", ["form"], ["x"]), ("square", ["form"], [])]
    rows = [
        {"questionId": number, "question": f"What is {number}?", "question_types": types, **row}
        for number, (types, row) in enumerate(
            (types, {"image": f"documents/{name}.png", "answers": answers}) for name, types, answers in asked_rows
        )
    ]
    (folder / "DocVQA" / "val_v1.0_withQT.json").write_text(json.dumps({"data": rows}))
    return folder


def test_a_public_dataset_from_bench_to_recommendation(questions: Path, panscan: Panscan) -> None:
    line = "bench --repeats 1 --dataset DocVQA --pan-and-scan-max-num-crops 1,2 --min-crop-size 50"
    said = panscan(line, *SHORT)
    counts = "docvqa, validation, 5 questions: 4 used, 1 without a readable image, 1 without answers (unscored)"
    assert f"dataset {counts}" in said.err
    assert f"Dataset {counts}." in " ".join(said.out.split())
    assert "ANLS" in said.out

    measured = only_run(questions)
    settings = measured.header.settings
    assert (metric_of(measured), settings.quality_metric, settings.dataset.used) == ("anls", "anls", 4)
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

    [row, _] = summary_rows(measured)
    assert (row["quality_metric"], row["empty_answers"]) == ("anls", "0")
    assert float(row["anls_low"]) <= float(row["anls"]) <= float(row["anls_high"])

    place = str(measured.path.parent)
    text = panscan("report", place, "--format", "md", "--quality-metric", "contains_answer").out
    assert "accuracy (contains answer), 95%" in text
    assert "Accuracy (contains answer) by question type" in text
    refused = panscan("recommend --min-quality 1.0 --quality-metric relaxed_accuracy", place, code=3).err
    assert "is shown to have accuracy (relaxed) >= 1: the nearest" in refused
    assert "accuracy (ANLS) 0" in json.loads(panscan("recommend", place, "--min-quality", "0", "--json").out)["reason"]
    said_ = panscan("compare", place, place, "--fail-on", "exact_match<-1%").out
    assert "anls" in said_
    assert "exact_match" in said_
    assert "contains_answer" not in said_


def test_another_metric_may_be_the_quality(questions: Path, panscan: Panscan) -> None:
    panscan("bench --repeats 1 --dataset DocVQA --quality-metric exact_match --num-prompts 2", *SHORT)
    measured = only_run(questions)
    assert metric_of(measured) == "exact_match"
    said = panscan("report --quality-metric vqa_accuracy", str(measured.path.parent), code=2).err
    assert "--quality-metric vqa_accuracy: not in" in " ".join(said.split())


def test_pictures_of_a_table_survive_a_resume(questions: Path) -> None:
    data = [(questions / "DocVQA" / "documents" / f"{name}.png").read_bytes() for name in ("tall", "wide", "square")]
    pictures = pa.array([{"bytes": content, "path": None} for content in data])
    columns: dict[str, Any] = {"image": pictures, "question": ["a", "b", "c"], "answers": [["x"], ["y"], None]}
    parquet.write_table(pa.table(columns), questions / "validation-00000-of-00001.parquet")
    name = "validation-00000-of-00001.parquet"
    assert run(["bench", "--dataset", name, "--repeats", "2", "--num-prompts", "2", *SHORT]) == 0
    before = only_run(questions)
    path = before.path.parent / FILE_NAME
    lines = path.read_text().splitlines()
    ends = [number for number, line in enumerate(lines) if json.loads(line)["type"] == "repeat"]
    path.write_text("\n".join(lines[: ends[0] + 1]) + "\n")  # as if it had been killed in the second repeat
    for file in (questions / "cache" / "dataset-pictures").iterdir():
        file.unlink()
    assert run(["bench", "--resume", str(path.parent)]) == 0
    after = only_run(questions)
    hashes = [[record.image_sha256 for record in run.requests[next(iter(run.cells)), 1]] for run in (before, after)]
    assert hashes[0] == hashes[1]


def test_a_split_without_answers_is_said(questions: Path, panscan: Panscan) -> None:
    rows = json.loads((questions / "DocVQA" / "val_v1.0_withQT.json").read_text())["data"]
    test = {"data": [{**row, "answers": None} for row in rows]}
    (questions / "DocVQA" / "test_v1.0.json").write_text(json.dumps(test))
    said = panscan("bench --dataset DocVQA --dataset-split test --dry-run", *SHORT).err
    assert "no question has a reference answer: quality is not measured" in said
    assert "(other splits: validation)" in said
