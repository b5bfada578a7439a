"""A run directory's life around the sweep: its name, its header, and the plan that comes back out of it."""

import csv
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.observing import RecordingObserver
from tests.conftest import noise

import panscan
from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.run import new_directory, plan_of, resume, start
from panscan.cli.main import run as cli
from panscan.core import RecordsError
from panscan.records.schema import RecordedCell
from panscan.records.store import SCHEMA, Run, read_run
from panscan.workload.requests import Source, build_workload

pytestmark = pytest.mark.usefixtures("without_charts")

QUICK = {"model": ["tiny"], "dtype": ["fp32"], "device": ["cpu"]}
SKIPPED = {"attention": ["flash_attention_2"], "device": ["cpu"]}
"""Cells that no machine measures, so that a run takes no model."""


@pytest.fixture
def folder(folder: Path) -> Path:
    noise(260, 800).save(folder / "a.png")
    noise(300, 300).save(folder / "b.png")
    return folder


def plan(axes: dict[str, list[Any]], **fields: Any) -> SweepPlan:
    source = Source(images=("a.png", "b.png"), prompt="What?", system="Be brief.", num_samples=3, seed=5)
    return SweepPlan(
        cells=build_cells(axes), items=build_workload(source, on_problem=pytest.fail), source=source, **fields
    )


def edited(run: Run, edit: Any) -> Run:
    """The run after an edit of its header, as another version might have written it."""
    header, *lines = run.path.read_text().splitlines()
    changed = json.loads(header)
    edit(changed)
    run.path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    return read_run(run.path)


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("google/gemma-3-27b-it", "gemma-3-27b-it"),
        ("/data/My Model_v2/", "my-model-v2"),
        (".", "model"),
        ("模", "model"),
    ],
)
def test_a_new_directory_is_named_by_time_and_model(tmp_path: Path, model: str, slug: str) -> None:
    place = new_directory(tmp_path / "a" / "b", model)
    assert place.parent == tmp_path / "a" / "b"
    day, time, name = place.name.split("-", 2)
    assert (len(day), len(time), name) == (8, 6, slug)
    assert list(place.iterdir()) == []


def test_new_directories_never_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(new_directory, [tmp_path] * 20, ["tiny"] * 20))
    assert sorted(found) == sorted(tmp_path.iterdir())
    assert len(found) == 20


def test_a_run_starts_with_its_header_and_ends_with_its_summary(folder: Path) -> None:
    watch = RecordingObserver()
    chosen = plan({**QUICK, "batch_size": [2], "max_new_tokens": [2]}, repeats=2, warmup=0)
    measured = start(chosen, folder / "run", ["panscan", "bench", "--x", "a b"], watch)
    assert (watch.loads, watch.batches, watch.problems) == (["tiny"], 4, [])
    header = measured.header
    assert (header.schema, header.command) == (SCHEMA, ["panscan", "bench", "--x", "a b"])
    assert header.machine.panscan == panscan.__version__
    assert header.cells == [RecordedCell(cell.id, asdict(cell.settings)) for cell in chosen.cells]
    assert [len(requests) for requests in measured.requests.values()] == [3, 3]
    with (folder / "run" / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["outcome"], row["completed"], row["measured_repeats"]) == ("done", "6", "2")


def test_a_second_run_into_a_directory_is_refused(folder: Path) -> None:
    start(plan(SKIPPED), folder / "run", [], RecordingObserver())
    before = (folder / "run" / "records.jsonl").read_bytes()
    with pytest.raises(RecordsError, match="already holds a run"):
        start(plan(SKIPPED), folder / "run", [], RecordingObserver())
    assert (folder / "run" / "records.jsonl").read_bytes() == before


def test_nothing_is_not_resumed(folder: Path) -> None:
    with pytest.raises(RecordsError, match="there is no run"):
        resume(plan(SKIPPED), folder / "run", RecordingObserver())
    assert not (folder / "run" / "records.jsonl").exists()


def test_the_plan_comes_back_out_of_the_records(folder: Path) -> None:
    chosen = plan({**SKIPPED, "batch_size": [1, 2]}, repeats=3, warmup=2, seed=9, include_content=True)
    chosen = replace(chosen, source=replace(chosen.source, template_kwargs={"polite": True}))
    measured = start(chosen, folder / "run", [], RecordingObserver())
    assert plan_of(measured, on_problem=pytest.fail) == chosen
    assert list(plan_of(measured, on_problem=pytest.fail).order()) == list(chosen.order())


@pytest.mark.parametrize("change", ["pixels", "prompt", "fewer"])
def test_another_workload_is_not_resumed(folder: Path, change: str) -> None:
    measured = start(plan(SKIPPED), folder / "run", [], RecordingObserver())
    if change == "pixels":
        noise(300, 300, 1).save(folder / "b.png")
    elif change == "prompt":
        measured = edited(measured, lambda header: header["settings"]["source"].update(prompt="Who?"))
    else:
        measured = edited(measured, lambda header: header["settings"]["source"].update(num_samples=2))
    with pytest.raises(RecordsError, match="have changed since the run began"):
        plan_of(measured, on_problem=pytest.fail)


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header["settings"].pop("source"),
        lambda header: header["settings"].pop("warmup"),
        lambda header: header["settings"].pop("workload_sha256"),
        lambda header: header["settings"]["source"].update(tomorrow=1),
        lambda header: header["cells"][0]["settings"].update(tomorrow=1),
    ],
)
def test_a_header_of_another_version_is_said(folder: Path, edit: Any) -> None:
    measured = edited(start(plan(SKIPPED), folder / "run", [], RecordingObserver()), edit)
    with pytest.raises(RecordsError, match="another version") as caught:
        plan_of(measured, on_problem=pytest.fail)
    assert "\n" not in str(caught.value)


def test_a_run_is_not_resumed_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(shlex.split("bench a.png --repeats 1 --model tiny -p x --max-new-tokens 1 --device cpu")) == 0
    [records] = folder.glob("runs/*/records.jsonl")
    text = records.read_text("utf-8")
    for old, new, began in (
        ('"torch":"', '"torch":"0.', "the run began with torch 0."),
        ('"cpu":"', '"cpu":"Another ', "the run began with cpu Another"),
        ('"gpus":[', '"gpus":[{"name":"X"}', "the run began with gpus [{'name': 'X'"),
        ('"tiny":"', '"tiny":"0', "the weights of tiny have changed since the run began (weights 0"),
        ('"bundled":{"', '"bundled":{"another-', "since the run began (weights of an older version, now "),
    ):
        records.write_text(text.replace(old, new, 1), "utf-8")
        capsys.readouterr()
        assert cli(["bench", "--resume", str(records.parent)]) == 3
        words = " ".join(capsys.readouterr().err.split())
        assert began in words and words.endswith("start a new run")
