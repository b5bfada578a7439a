"""The output of a batch job: a local JSON Lines file, converted to Parquet or uploaded to an object store if requested.

Objects cannot be appended to, and Parquet files are only readable when complete. The durable output is therefore always
a JSON Lines file on a local disk, the spool. It is uploaded as a whole, at intervals and when the job ends, and
converted to Parquet when the job ends.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from panscan.batch.answers import Mode, refuse_sources
from panscan.batch.jsonl import AnswerLog, AnswerRecord
from panscan.batch.ledger import ledger_path
from panscan.core import RecordsError, SettingError, StorageError, now
from panscan.core.files import cache_directory, replace_file, write_errors
from panscan.core.foreign import parse_json
from panscan.images.fetch import conceal
from panscan.images.storage import (
    delete_object,
    download,
    is_stored,
    local_path,
    object_exists,
    open_object,
    upload,
)
from panscan.workload.tables import OTHER_TABLES, is_table, require_pyarrow

_LOG = logging.getLogger(__name__)

_INTERVAL_SECONDS = 60.0  # minimum between two uploads
_SHARE = 20  # and this many times the duration of the last one: uploads take at most 5% of the time
_BLOCK_BYTES = 8 * 2**20
_PARQUET_ROWS = 250  # rows written at once


@dataclass(frozen=True, slots=True)
class Destination:
    """The output of a job.

    Args:
        name: value of ``-o``.
        path: durable JSON Lines file on this machine.
        table: Parquet file written when the job ends; None: no Parquet output.
        url: object that ``path`` is uploaded to; None: no upload.
        table_url: object that ``table`` is uploaded to.
    """

    name: str
    path: Path
    table: Path | None = None
    url: str | None = None
    table_url: str | None = None

    def refuse_sources(self, sources: Collection[str]) -> None:
        """Refuse an output that would overwrite a source.

        Args:
            sources: all files and objects that the job reads.

        Raises:
            RecordsError: a file or object of the output is one of them.
        """
        for path in (self.path, self.table):
            if path is not None:
                refuse_sources(path, sources)
        for url in {self.url, self.table_url} & set(sources) if self.url is not None else ():
            raise RecordsError(f"-o {self.name} would overwrite {url}, a source of this job")

    def finish(self) -> None:
        """Write the Parquet file, if requested, from the finished answers.

        Raises:
            RecordsError: the file cannot be written.
        """
        if self.table is None or not self.path.exists():
            return
        pa = require_pyarrow(str(self.table))
        from pyarrow import parquet

        kinds = {
            "list[str]": pa.list_(pa.string()),
            "str": pa.string(),
            "Count": pa.int32(),
            "Milliseconds": pa.float64(),
        }
        annotations = {name: kind.removesuffix(" | None") for name, kind in AnswerRecord.__annotations__.items()}
        schema = pa.schema([(name, kinds[kind]) for name, kind in annotations.items()])
        with (
            closing(AnswerLog(self.path)) as lines,
            write_errors(self.table, RecordsError),
            replace_file(self.table) as file,
            parquet.ParquetWriter(file, schema) as writer,
        ):
            rows = iter(lines)
            while batch := [_unicode(msgspec.structs.asdict(answer)) for _, answer in islice(rows, _PARQUET_ROWS)]:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))


def destination(output: str) -> Destination:
    """Return the destination that ``-o`` names. Creates no files.

    Raises:
        SettingError: the URL does not name an object, or its scheme or the format is not supported.
        UnsupportedError: a Parquet file is requested, but pyarrow is not installed.
    """
    location = local_path(output)
    if location.lower().endswith(OTHER_TABLES):  # an importer of CSV would make nonsense of JSON Lines
        raise SettingError(f"-o {output}: answers are written as Parquet (.parquet) or JSON Lines (.jsonl): rename it")
    table = is_table(location)
    if table:
        require_pyarrow(f"-o {output}")
    if is_stored(location):
        if location.count("/") < 3 or location.endswith("/"):
            raise SettingError(f"-o {output}: a bucket or prefix, not an object: add a name such as /answers.jsonl")
        spool = cache_directory() / "batch" / hashlib.sha256(location.encode()).hexdigest()[:16]
        path, url = spool / location.rpartition("/")[2], location
    elif "://" in location:
        raise SettingError(f"-o {conceal(output)}: unsupported URL: use s3://, gs://, az://, file:// or a path")
    else:
        path, url = Path(location), None
        if path.is_dir():
            raise SettingError(f"-o {output}: a directory: add a name such as {path / 'answers.jsonl'}")
    if not table:
        return Destination(output, path, url=url)
    return Destination(output, path.with_name(f"{path.name}.jsonl"), path, url and f"{url}.jsonl", url)


def fetch_previous(target: Destination, mode: Mode) -> None:
    """Check that the object store is reachable, and download the answers of an earlier start.

    Local answers take precedence: they are at least as complete, unless another machine continued the job, which is
    refused.

    Raises:
        RecordsError: the store has answers that a new job would replace, or that this machine lacks.
        StorageError: the store refused a request, or did not answer before the deadline.
    """
    url, path, table, stored = target.url, target.path, target.table, target.table_url
    exists = url is not None and object_exists(url)
    if mode == "force":
        return
    if url is None or not exists:
        has_table = table is not None and table.exists() if url is None else stored and object_exists(stored)
        if has_table and not path.exists():  # it cannot be resumed without its lines
            fix = "choose another -o, or replace it with --force"
            raise RecordsError(f"{target.name} exists but {url or path} does not: {fix}")
        return
    if path.exists() and path.stat().st_size:
        if mode == "resume":
            with path.open("rb") as file:
                local = {None, *map(_answered_id, file)}
            with io.BufferedReader(open_object(url), _BLOCK_BYTES) as stored_lines:
                missing = sum(answered not in local for answered in map(_answered_id, stored_lines))
            if missing:
                raise RecordsError(
                    f"{url} has {missing} answers that {path} lacks: another machine continued this job."
                    f" Delete {path.parent} to resume from the store"
                )
        return
    if mode == "new":
        raise RecordsError(f"{url} already has answers: continue with --resume, or replace them with --force")
    with write_errors(path, RecordsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".run.json", ".ledger.json", ""):  # the answers last: with them, the spool is complete
            if not suffix or object_exists(url + suffix):
                download(url + suffix, path.with_name(path.name + suffix))


def _answered_id(line: bytes) -> str | None:
    """Return the id of an answer's line; None for a failure or an incomplete line."""
    try:
        record = parse_json(line)
        return str(record["id"]) if record.get("error") is None else None
    except (ValueError, KeyError, AttributeError):
        return None


class Uploader:
    """Uploads a growing output file, its header and its ledger in a background thread.

    Args:
        target: destination with a URL.
        replace: whether to delete answers of an earlier job from the store before the first upload.
    """

    def __init__(self, target: Destination, *, replace: bool) -> None:
        assert target.url is not None
        self._target, self._url, self._replace = target, target.url, replace
        self._due = now()
        self._begun = False
        self._thread: threading.Thread | None = None
        self._worked = False
        self._error: StorageError | None = None

    def answered(self) -> None:
        """Start an upload if one is due. Call it before each answer is written.

        Raises:
            StorageError: the first upload failed, so later ones would probably fail too.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if (error := self._error) is not None:
            self._error = None
            if not self._worked:
                raise error
            _LOG.warning("%s; the answers are in %s, and the upload will be retried", error, self._target.path)
        # Until its first answer is written, the file may contain answers of a job that --force replaces.
        begun, self._begun = self._begun, True
        if begun and now() >= self._due and self._target.path.exists():
            self._thread = threading.Thread(target=self._try, name="panscan-upload", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Upload everything and wait until it is done.

        Raises:
            StorageError: the store refused an upload, or did not finish it before the deadline.
        """
        if self._thread is not None:
            self._thread.join()  # its transfers have a deadline
        if not self._target.path.exists():
            return
        self._upload()
        if self._target.table is not None and self._target.table_url is not None:
            upload(self._target.table_url, self._target.table)

    def _try(self) -> None:
        began = now()
        try:
            self._upload()
            self._worked = True
        except StorageError as error:
            self._error = error
        self._due = now() + max(_INTERVAL_SECONDS, _SHARE * (now() - began))

    def _upload(self) -> None:
        path = self._target.path
        if self._replace:  # in this order, so that answers never lie beside the header of another job
            delete_object(self._url)
            delete_object(f"{self._url}.ledger.json")
            self._replace = False
        upload(f"{self._url}.run.json", path.with_name(f"{path.name}.run.json"))
        upload(self._url, path)
        if (ledger := ledger_path(path)).exists():
            upload(f"{self._url}.ledger.json", ledger)


def _unicode(value: Any) -> Any:
    """Return a value with lone surrogates, from file names that are not Unicode, escaped: Arrow refuses them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_unicode(item) for item in value]
    return {key: _unicode(item) for key, item in value.items()} if isinstance(value, dict) else value
