"""Batch jobs over object stores and Parquet files: a real S3 server, connections that break, and kill -9."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.batch.object_store import ACCESS_KEY, S3Server
from tests.batch.shuffling import JOB, ShufflingEngine, opened, run_job
from tests.conftest import Panscan, noise, refuse

from panscan.cli.main import run
from panscan.core import DatasetError, ImageError, InputError, StorageError, UnsupportedError
from panscan.images.files import find_pages, open_image, page_named
from panscan.workload.items import TableColumns, find_work
from panscan.workload.rows import Row

pytest.importorskip("obstore", reason="needs the extra storage")

QUICK = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "4"]
QUESTION = ["-p", "What is the total?"]


def picture(seed: int) -> bytes:
    content = io.BytesIO()
    noise(60, 60, seed).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store with the buckets ``in`` and ``out``, which the environment leads to; listings have two keys a page."""
    monkeypatch.setenv("PANSCAN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PANSCAN_STORAGE_TIMEOUT", "1")
    for name, value in (("ACCESS_KEY_ID", ACCESS_KEY), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with S3Server("in", "out", page_size=2) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def find(*sources: str, columns: TableColumns | None = None, **options: Any) -> list[Row]:
    given = {"whole_files": False, "limit": None, "on_problem": refuse, **options}
    return list(find_work(sources, columns=columns, **given))


def lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def write_table(path: Path, **columns: list[Any]) -> str:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def test_a_prefix_stands_for_its_documents_in_natural_order_and_pages_are_counted(store: S3Server) -> None:
    pages = io.BytesIO()
    noise(20, 20).save(pages, "PDF", save_all=True, append_images=[noise(20, 20, 1)])
    names = ("p10.png", "p2.png", "odd [x]#%.png", "deep/a.pdf", "notes.txt", ".hidden/b.png")
    store.buckets["in"] = {f"scans/{name}": pages.getvalue() if ".pdf" in name else picture(1) for name in names}
    store.buckets["in"]["scans2/no.png"] = picture(1)
    expected = ["deep/a.pdf#page=1", "deep/a.pdf#page=2", "odd [x]#%.png", "p2.png", "p10.png"]
    assert [item.id for item in find("s3://in/scans")] == [f"s3://in/scans/{name}" for name in expected]
    asked = [target for method, target in store.requests if method == "GET" and "list-type" not in target]
    assert asked == ["/in/scans/deep/a.pdf"]  # only documents that may have several pages are opened
    assert [item.id for item in find("s3://in/**/p*.png")] == ["s3://in/scans/p2.png", "s3://in/scans/p10.png"]
    [page] = find_pages(["s3://in/scans/deep/a.pdf#page=2"], on_problem=refuse)
    assert open_image(page).size > (20, 20)


ENDLESS = [
    ([], "the listing did not go on within 0.4 s"),
    ([f"scans/{number:04d}.png" for number in range(1000)], "the listing repeats itself at 'scans/0000.png'"),
    ([f"scans/{number:0>5000}" for number in range(1000)], "a name has 5,006 characters, at most 4,096"),
]


@pytest.mark.parametrize(("keys", "reason"), ENDLESS)
def test_a_listing_must_end(store: S3Server, monkeypatch: pytest.MonkeyPatch, keys: list[str], reason: str) -> None:
    monkeypatch.setenv("PANSCAN_STORAGE_TIMEOUT", "10" if keys else "0.2")
    store.page_size = 1000
    store.buckets["in"] = dict.fromkeys(keys, b"")
    store.endless = True
    with pytest.raises(StorageError, match=reason):
        find("s3://in/scans")


ABSENT = [
    ("s3://in/none.png", "s3://in/none.png: no such object"),
    ("s3://in/none", "no image or PDF file below this prefix"),
    ("s3://in/none*.png", "no object matches"),
    ("s3://nowhere/a.png", "no such bucket"),
    ("s3://nowhere/scans", "no such bucket"),
    ("s3:///scans", "the bucket is missing"),
    ("s3://in/none.parquet", "s3://in/none.parquet: no such object"),
    ("file://elsewhere/a.png", "file:// URLs must name local files"),
]


@pytest.mark.parametrize(("source", "reason"), ABSENT)
def test_a_source_that_is_not_there_is_refused_in_one_line(store: S3Server, source: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        find(source)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_credentials_name_the_fix(store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.buckets["in"]["a.png"] = picture(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    with pytest.raises(StorageError, match=r"access denied.*AWS_ACCESS_KEY_ID"):
        find("s3://in/a.png")
    with pytest.raises(StorageError, match=r"access denied \(InvalidAccessKeyId\)"):
        find("s3://in/scans")
    profile = tmp_path / "credentials"
    profile.write_text(f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = secret\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    assert len(find("s3://in/a.png")) == 1


def test_broken_connections_are_retried_within_the_deadline(store: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store.buckets["in"] = {"a.png": picture(1), "b.png": picture(2)}
    store.broken = 2
    monkeypatch.setenv("PANSCAN_STORAGE_TIMEOUT", "20")
    assert open_image(page_named("s3://in/a.png")).size == (60, 60)
    assert [method for method, _ in store.requests].count("GET") == 3
    store.broken = float("inf")
    monkeypatch.setenv("PANSCAN_STORAGE_TIMEOUT", "0.5")
    with pytest.raises(StorageError, match=r"^s3://in/b\.png: the object store failed"):
        open_image(page_named("s3://in/b.png"))


def test_a_store_that_fails_in_the_middle_fails_pages_but_one_that_is_gone_ends_the_job(tmp_path: Path) -> None:
    broken = {"1.png", "3.png"}

    items = [
        Row(name, (name,), named=(name,), problem=StorageError(f"{name}: failed") if name in broken else None)
        for name in (f"{number}.png" for number in range(5))
    ]
    with opened(tmp_path / "some.jsonl") as file:
        run_job(file, items, ShufflingEngine())
        assert [line.error is not None for line in file.records()] == [False, True, False, True, False]
    gone = [Row(f"{n}", (), problem=StorageError("s3://in: gone")) for n in range(30)]
    with opened(tmp_path / "gone.jsonl") as file, pytest.raises(StorageError, match="8 documents failed in a row"):
        run_job(file, [*items[:1], *gone], ShufflingEngine())
    assert [line["id"] for line in lines((tmp_path / "gone.jsonl").read_bytes())] == ["0.png"]


def test_rows_of_parquet_files_are_requests(store: S3Server, tmp_path: Path) -> None:
    structs = [{"bytes": picture(1), "path": "x.png"}, {"bytes": picture(2), "path": None}, None]
    here = write_table(tmp_path / "a.parquet", image=structs, question=["Who?", " ", "Why?"], id=[7, 8, 9])
    store.buckets["in"]["b.parquet"] = Path(here).read_bytes()
    assert [item.id for item in find(f"file://{here}")] == ["7", "8", "9"]
    for source in (here, "s3://in/b.parquet"):
        items = find(source)
        assert [(item.id, item.question) for item in items] == [("7", "Who?"), ("8", " "), ("9", "Why?")]
        assert [item.named for item in items][:1] == [(f"{source}#row=1",)]
        assert str(items[1].problem) == f"{source}#row=2: the prompt is empty"
        assert JOB.request(items[0]).images == (picture(1),)
        with pytest.raises(DatasetError, match="#row=3: the row has no image"):
            JOB.request(items[2])
        assert JOB.request(items[0]).images == (picture(1),)  # an earlier row, after a later one
    assert [item.question for item in find(here, has_prompt=True)] == [None, None, None]
    columns = TableColumns(image="scan", id="page")
    named = write_table(tmp_path / "c.parquet", scan=[picture(3), picture(4), picture(5)], page=["x", "y", "z"])
    assert [item.id for item in find(named, columns=columns)] == ["x", "y", "z"]
    [only] = find(str(tmp_path / "c*.parquet"), columns=TableColumns(image="scan"), limit=1)
    assert only.id == f"{tmp_path}/c.parquet#row=1"


def test_tables_that_cannot_be_asked_about_are_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.parquet", image=[picture(1)] * 2, id=["x", "x"], n=[1, 2])
    for columns, reason in (
        (TableColumns(), "another row has the id 'x': choose another --id-column"),
        (TableColumns(image="scan"), "no column 'scan'; it has image, id, n: choose one with --image-column"),
        (TableColumns(prompt="text"), "no column 'text'"),
        (TableColumns(image="n", id="n"), "column 'n' is int64, not images"),
        (TableColumns(prompt="n", id="n"), "column 'n' is int64, not text"),
    ):
        with pytest.raises(DatasetError) as caught:
            find(table, columns=columns)
        assert reason in str(caught.value)
    (tmp_path / "bad.parquet").write_bytes(b"not a table")
    with pytest.raises(DatasetError, match=r"bad\.parquet: not a readable Parquet or Arrow file"):
        find(str(tmp_path / "bad.parquet"))
    outside = write_table(tmp_path / "o.parquet", image=["../secret.png", "https://example.org/a.png"])
    for item, reason in zip(find(outside), ("outside the dataset's folder", "is a URL"), strict=True):
        with pytest.raises(DatasetError, match=reason):
            JOB.request(item)


def test_answers_are_uploaded_and_resumed_from_the_store(store: S3Server, tmp_path: Path, panscan: Panscan) -> None:
    store.buckets["in"] = {f"{number}.png": picture(number) for number in range(3)}
    store.refused = {"1.png"}
    job = ["batch", *QUICK, "s3://in/", *QUESTION, "-o", "s3://out/a.parquet", "--cost-per-hour", "3.6"]
    assert "price per million pages: " in panscan(*job, "--num-prompts", "2", code=3).err
    first = lines(store.buckets["out"]["a.parquet.jsonl"])
    assert [line["error"] is None for line in first] == [True, False]
    (tmp_path / "cache").rename(tmp_path / "lost")
    assert "s3://out/a.parquet.jsonl already has answers: continue with --resume" in panscan(*job, code=3).err
    store.refused = set()
    assert run([*job, "--resume", "--retry-failed"]) == 0
    rows = parquet.read_table(pa.BufferReader(store.buckets["out"]["a.parquet"])).to_pylist()
    assert [(row["id"], row["error"]) for row in rows] == [(f"s3://in/{number}.png", None) for number in range(3)]
    assert rows[0]["answer"] == first[0]["answer"]
    ledger = json.loads(store.buckets["out"]["a.parquet.jsonl.ledger.json"])
    assert (ledger["pages"], ledger["successful_pages"], ledger["retries"], len(ledger["starts"])) == (3, 3, 1, 2)
    # The machine of the first start has fewer answers than the store now.
    (tmp_path / "cache").rename(tmp_path / "newer")
    (tmp_path / "lost").rename(tmp_path / "cache")
    assert "has 2 answers that" in panscan(*job, "--resume", code=3).err


def test_a_store_that_refuses_answers_ends_the_job_early_and_none_is_lost(store: S3Server, panscan: Panscan) -> None:
    store.buckets["in"] = {f"{number}.png": picture(number) for number in range(2)}
    job = ["batch", *QUICK, "s3://in/", *QUESTION, "-o", "s3://out/a.jsonl"]
    store.refuse_puts = True
    said = panscan(*job, code=3).err
    assert "s3://out/a.jsonl.run.json: access denied (AccessDenied)" in said
    assert "resume with: " in said
    store.refuse_puts = False
    assert run([*job, "--resume"]) == 0
    assert [line["id"] for line in lines(store.buckets["out"]["a.jsonl"])] == ["s3://in/0.png", "s3://in/1.png"]
    refused = panscan("batch s3://in/ -o s3://out/", *QUICK, *QUESTION, code=2).err
    assert "a bucket or prefix, not an object" in refused


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UnsupportedError, match=r"needs obstore: pip install .*\[storage\]"):
        find("s3://in/a.png")


def test_an_unreadable_object_is_a_document_that_failed(store: S3Server) -> None:
    store.buckets["in"]["big.tif"] = b"no picture"
    [item] = find("s3://in/big.tif")
    assert isinstance(item.problem, ImageError)
