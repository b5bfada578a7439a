"""The same file has the same pages, or is refused in the same words, in every command."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from tests.conftest import noise, refuse

from panscan.core import ImageError, PanAndScan
from panscan.images.files import Page, expand_images, load_page, page_named
from panscan.load.content import RequestMix
from panscan.settings import Settings
from panscan.workload.calibration import CalibrationSource, load_calibration
from panscan.workload.items import find_work
from panscan.workload.probes import own_probes
from panscan.workload.profiled import profiled_requests
from panscan.workload.requests import Source, load_workload

FRAMES = [noise(40, 30, seed) for seed in range(3)]
PAGES = {
    "still.png": 1,
    "moving.gif": 1,
    "moving.webp": 1,
    "moving.png": 1,
    "takes.mpo": 1,
    "scan.tif": 3,
    "scan.pdf": 3,
    "scan-of-another.name": 3,
}


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
    assert all(load_page(page) for page in pages)
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
    kept, _, _ = load_calibration(CalibrationSource((path,), max_pages=most), refuse, lambda *_: None)
    return sorted(document.name for item in kept for document in item.documents)


def batched(path: str, most: int) -> Sequence[str]:
    rows = list(find_work([path], whole_files=False, limit=None, on_problem=refuse, max_pages=most))
    for row in rows:
        if row.problem is not None:
            raise row.problem
        assert [load_page(page_named(name)) for name in row.named]
    return [name for row in rows for name in row.named]


def profiled(path: str, most: int) -> Sequence[str]:
    settings = Settings(model="tiny")
    [request] = profiled_requests(None, [path], settings, Path(), max_pages=most)
    assert all(load_page(image) for image in request.images)
    return [image.name for image in request.images]


def verified(path: str, _most: int) -> Sequence[str]:
    """The probes hold pixels: each must be those of a page."""
    images = [image for probe in own_probes([path], ["What?"], PanAndScan(), 99) for image in probe.images]
    pages = expand_images([path])
    for image, page in zip(images, pages, strict=True):
        assert (np.asarray(Image.open(BytesIO(image))) == np.asarray(load_page(page))).all()
    return [page.name for page in pages]


COMMANDS = [asked, measured, loaded, calibrated, batched, profiled, verified]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", PAGES)
def test_a_file_has_the_same_pages_in_every_command(
    folder: Path, name: str, command: Callable[[str, int], Sequence[str]]
) -> None:
    path = str(folder / name)
    pages = [path] if PAGES[name] == 1 else [f"{path}#page={page + 1}" for page in range(PAGES[name])]
    assert list(command(path, 9)) == pages


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["cut.png", "text.gif", "empty.tif", "gone.png", "scan.tif#page=4"])
def test_a_file_is_refused_in_the_same_words_by_every_command(
    folder: Path, name: str, command: Callable[[str, int], Sequence[str]]
) -> None:
    with pytest.raises(ImageError) as expected:
        asked(str(folder / name), 9)
    with pytest.raises(ImageError) as refused:
        command(str(folder / name), 9)
    assert str(refused.value).endswith(str(expected.value))  # an option may come first


@pytest.mark.parametrize("command", [command for command in COMMANDS if command is not verified])
@pytest.mark.parametrize("name", ["scan.tif", "scan.pdf"])
def test_a_file_of_too_many_pages_is_refused_by_every_command(
    folder: Path, name: str, command: Callable[[str, int], Sequence[str]]
) -> None:
    with pytest.raises(ImageError, match="has more than 2 pages: raise --max-pages"):
        command(str(folder / name), 2)


@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
def test_rows_of_a_dataset_and_of_a_batch_job_have_the_same_pages(
    folder: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            assert (np.asarray(load_page(page_named(document.name))) == np.asarray(load_page(page))).all()
