"""Rows of a dataset reach its own folder only, unless the user allows more."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.conftest import noise, refuse

from panscan.core import DatasetError
from panscan.workload.items import find_work
from panscan.workload.requests import Source, Workload, load_workload

OPTION = "allow it with --allow-external-images"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for datasets, with a picture and, outside of it, a secret one."""
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "deep" / "data"
    (folder / "images").mkdir(parents=True)
    noise(60, 40).save(folder / "images" / "a.png")
    noise(60, 40, 1).save(tmp_path / "secret.png")
    (folder / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "images" / "same.png").symlink_to("a.png")
    (folder / "linked").symlink_to(tmp_path)
    return folder


def in_jsonl(folder: Path, image: str) -> Path:
    rows = [{"image": each, "question": f"{each}?"} for each in ("images/a.png", image)]
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "q.jsonl"


def in_docvqa(folder: Path, image: str) -> Path:
    rows = [{"questionId": n, "question": "?", "image": each} for n, each in enumerate(["images/a.png", image])]
    (folder / "val_v1.0.json").write_text(json.dumps({"data": rows}))
    return folder


def in_table(folder: Path, image: str, *, structs: bool = False) -> Path:
    pictures = [{"bytes": None, "path": path} if structs else path for path in ("images/a.png", image)]
    parquet.write_table(pa.table({"image": pictures, "question": ["?", "!"]}), folder / "rows.parquet")
    return folder / "rows.parquet"


def workload(dataset: Path, problems: list[str] | None = None, **options: Any) -> Workload:
    told = [] if problems is None else problems
    return load_workload(Source(dataset=str(dataset), **options), on_problem=lambda error: told.append(str(error)))


@pytest.mark.parametrize("made", [in_jsonl, in_docvqa, in_table, partial(in_table, structs=True)])
@pytest.mark.parametrize("image", ["../../secret.png", "{secret}", "images/link.png", "linked/secret.png"])
def test_files_outside_the_folder_are_refused(data: Path, made: Callable[[Path, str], Path], image: str) -> None:
    image = image.format(secret=data.parents[1] / "secret.png")
    dataset = made(data, image)
    with pytest.raises(DatasetError, match=rf"row 2: the image .*{Path(image).name} is outside .*{OPTION}"):
        workload(dataset)
    assert len(workload(dataset, external_images=True).items) == 2


@pytest.mark.parametrize(
    "image", ["images/../images/a.png", "{data}/images/a.png", "images/same.png", "../data/images/a.png"]
)
def test_any_spelling_of_a_file_in_the_folder_is_taken(data: Path, image: str) -> None:
    assert len(workload(in_jsonl(data, image.format(data=data))).items) == 2


@pytest.mark.parametrize("image", ["https://ann:pass@example.test/x.png", "file:///etc/passwd", "HTTP://x/y.png"])
def test_urls_are_refused(data: Path, image: str) -> None:
    for read in (workload, batch):
        with pytest.raises(DatasetError, match=rf"row 2: the image .* is a URL: {OPTION}") as caught:
            read(in_jsonl(data, image))
        assert "ann:pass" not in str(caught.value)
    assert len(workload(in_jsonl(data, image), [], external_images=True).items) == 1  # it cannot be fetched here


def batch(dataset: Path, *, external: bool = False) -> list[tuple[str, ...]]:
    work = find_work([str(dataset)], whole_files=False, limit=None, on_problem=refuse, external_images=external)
    return [item.images for item in work]


@pytest.mark.parametrize("image", ["../../secret.png", "images/link.png", "images/link.png#page=1"])
def test_batch_has_the_same_boundary(data: Path, image: str) -> None:
    with pytest.raises(DatasetError, match=rf"q.jsonl, row 2: the image .* is outside the dataset's folder: {OPTION}"):
        batch(in_jsonl(data, image))
    assert len(batch(in_jsonl(data, image), external=True)) == 2
    assert len(batch(in_jsonl(data, "images/same.png"))) == 2


@pytest.mark.parametrize("image", ["images", "link*/secret.png", "images/*.png"])
def test_folders_and_patterns_are_no_images_of_a_row(data: Path, image: str) -> None:
    problems: list[str] = []
    assert len(workload(in_jsonl(data, image), problems).items) == 1
    assert len(problems) == 1


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(data: Path) -> None:
    repository = data / "datasets--x--y"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    noise(60, 40).save(repository / "blobs" / "1234", "PNG")
    (snapshot / "a.png").symlink_to("../../blobs/1234")
    (snapshot / "q.jsonl").write_text(json.dumps({"image": "a.png", "question": "?"}))
    assert len(workload(snapshot / "q.jsonl").items) == 1
    (repository / "blobs").rename(repository / "elsewhere")
    (repository / "blobs").symlink_to("elsewhere")
    with pytest.raises(DatasetError, match=OPTION):
        workload(snapshot / "q.jsonl")
