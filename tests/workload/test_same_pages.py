"""The same file has the same pages in every command, and rows of a dataset reach its own folder only."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from tests.conftest import noise, refuse
from tests.workload.test_datasets import workload

from panscan.core import DatasetError, ImageError, PanAndScan
from panscan.images.files import Page, expand_images, open_image, page_named
from panscan.load.content import RequestMix
from panscan.settings import Settings
from panscan.workload.calibration import CalibrationSource, load_calibration
from panscan.workload.items import find_work
from panscan.workload.probes import own_probes
from panscan.workload.profiled import profiled_requests
from panscan.workload.requests import Source, load_workload

FRAMES = [noise(40, 30, seed) for seed in range(3)]
PAGES = dict.fromkeys(("still.png", "moving.gif", "moving.webp", "moving.png", "takes.mpo"), 1)
PAGES |= dict.fromkeys(("scan.tif", "scan.pdf", "scan-of-another.name"), 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    FRAMES[0].save(folder / "still.png")
    for name in ("moving.gif", "moving.webp", "moving.png", "takes.mpo", "scan.tif", "scan.pdf"):
        first, *others = (frame.copy() for frame in FRAMES)  # Pillow keeps the options of a format in the image
        first.save(folder / name, save_all=True, append_images=others)
    (folder / "scan.pdf").with_name("scan-of-another.name").write_bytes((folder / "scan.pdf").read_bytes())
    (folder / "cut.png").write_bytes((folder / "still.png").read_bytes()[:-400])
    (folder / "text.gif").write_text("no image")
    (folder / "empty.tif").touch()
    return folder


def asked(path: str, most: int) -> Sequence[str]:
    pages = [page for page in expand_images([path], max_pages=most) if isinstance(page, Page)]
    assert all(open_image(page) for page in pages)
    return [page.name for page in pages]


def measured(path: str, most: int) -> Sequence[str]:
    items = load_workload(Source(images=(path,), max_pages=most), on_problem=refuse).items
    return [document.name for item in items for document in item.documents]


def loaded(path: str, most: int) -> Sequence[str]:
    mix = RequestMix(load_workload(Source(images=(path,), max_pages=most), on_problem=refuse).items)
    documents = [document for item in mix.items for document in item.documents]
    assert all(mix.open_image(document).count for document in documents)
    return [document.name for document in documents]


def calibrated(path: str, most: int) -> Sequence[str]:
    items, _, _ = load_calibration(CalibrationSource((path,), max_pages=most), refuse)
    return sorted(document.name for item in items for document in item.documents)


def batched(path: str, most: int) -> Sequence[str]:
    rows = list(find_work([path], whole_files=False, limit=None, on_problem=refuse, max_pages=most))
    for row in rows:
        if row.problem is not None:
            raise row.problem
        assert [open_image(page_named(name)) for name in row.named]
    return [name for row in rows for name in row.named]


def profiled(path: str, most: int) -> Sequence[str]:
    settings = Settings(model="tiny")
    [request] = profiled_requests(None, [path], settings, Path(), max_pages=most)
    assert all(open_image(image) for image in request.images)
    return [image.name for image in request.images]


def verified(path: str, _most: int) -> Sequence[str]:
    """The probes hold pixels: each must be those of a page."""
    images = [image for probe in own_probes([path], ["What?"], PanAndScan(), 99) for image in probe.images]
    pages = expand_images([path])
    for image, page in zip(images, pages, strict=True):
        assert (np.asarray(Image.open(BytesIO(image))) == np.asarray(open_image(page))).all()
    return [page.name for page in pages]


Command = Callable[[str, int], Sequence[str]]
COMMANDS = [asked, measured, loaded, calibrated, batched, profiled, verified]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", PAGES)
def test_a_file_has_the_same_pages_in_every_command(folder: Path, name: str, command: Command) -> None:
    path = str(folder / name)
    pages = [path] if PAGES[name] == 1 else [f"{path}#page={page + 1}" for page in range(PAGES[name])]
    assert list(command(path, 9)) == pages


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["cut.png", "text.gif", "empty.tif", "gone.png", "scan.tif#page=4"])
def test_a_file_is_refused_in_the_same_words_by_every_command(folder: Path, name: str, command: Command) -> None:
    with pytest.raises(ImageError) as expected:
        asked(str(folder / name), 9)
    with pytest.raises(ImageError) as refused:
        command(str(folder / name), 9)
    assert str(refused.value).endswith(str(expected.value))  # an option may come first


@pytest.mark.parametrize("command", [command for command in COMMANDS if command is not verified])
@pytest.mark.parametrize("name", ["scan.tif", "scan.pdf"])
def test_a_file_of_too_many_pages_is_refused_by_every_command(folder: Path, name: str, command: Command) -> None:
    with pytest.raises(ImageError, match="has more than 2 pages: raise --max-pages"):
        command(str(folder / name), 2)


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
def test_rows_of_a_dataset_and_of_a_batch_job_have_the_same_pages(folder: Path, stored: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PANSCAN_CACHE", str(folder / "cache"))
    path = str(folder / f"rows.{stored}")
    if stored == "jsonl":
        Path(path).write_text("".join(f'{{"image": "{name}", "question": "What?"}}\n' for name in PAGES))
    else:
        columns = {"image": [(folder / name).read_bytes() for name in PAGES], "question": ["What?"] * len(PAGES)}
        parquet.write_table(pa.table(columns), path)
    items = load_workload(Source(dataset=path), on_problem=refuse).items
    rows = list(find_work([path], whole_files=False, limit=None, on_problem=refuse))
    assert [len(item.documents) for item in items] == list(PAGES.values())
    for item, row in zip(items, rows, strict=True):
        pages = expand_images(row.images() if callable(row.images) else row.images)
        for document, page in zip(item.documents, pages, strict=True):
            assert (np.asarray(open_image(page_named(document.name))) == np.asarray(open_image(page))).all()


# Rows of a dataset reach its own folder only, unless the user allows more.


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
    rows = [{"image": path, "question": f"{path}?"} for path in ("images/a.png", image)]
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "q.jsonl"


def in_docvqa(folder: Path, image: str) -> Path:
    rows = [{"questionId": n, "question": "?", "image": path} for n, path in enumerate(["images/a.png", image])]
    (folder / "val_v1.0.json").write_text(json.dumps({"data": rows}))
    return folder


def in_table(folder: Path, image: str, *, structs: bool = False) -> Path:
    pictures = [{"bytes": None, "path": path} if structs else path for path in ("images/a.png", image)]
    parquet.write_table(pa.table({"image": pictures, "question": ["?", "!"]}), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("made", [in_jsonl, in_docvqa, in_table, partial(in_table, structs=True)])
@pytest.mark.parametrize("image", ["../../secret.png", "{secret}", "images/link.png", "linked/secret.png"])
def test_files_outside_the_folder_are_refused(data: Path, made: Callable[[Path, str], Path], image: str) -> None:
    image = image.format(secret=data.parents[1] / "secret.png")
    dataset = made(data, image)
    with pytest.raises(DatasetError, match=rf"row 2: the image .*{Path(image).name} is outside .*{OPTION}"):
        workload(dataset)
    assert len(workload(dataset, external_images=True).items) == 2


SPELLINGS = ["images/../images/a.png", "{data}/images/a.png", "images/same.png", "../data/images/a.png"]


@pytest.mark.parametrize("image", SPELLINGS)
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


def test_prompts_of_a_verification_have_numbers_even_if_they_are_equal(tmp_path: Path) -> None:
    page = tmp_path / "page.png"
    Image.new("RGB", (64, 64)).save(page)
    probes = own_probes([str(page)], ["What?", "What?"], PanAndScan(), 99)
    assert [probe.id for probe in probes] == [f"{page}, prompt 1", "text", f"{page}, prompt 2"]
