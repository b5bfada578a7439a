"""Objects on S3, Google Cloud Storage and Azure: read, listed and written through obstore, within a deadline.

Endpoints and credentials come from the environment variables of each provider (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ...), for S3 also from a profile of ``~/.aws/credentials``. obstore retries failed and
interrupted requests with exponential backoff until the deadline.
"""

from __future__ import annotations

import asyncio
import configparser
import io
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from panscan.core import ImageError, StorageError, UnsupportedError, now
from panscan.core.access import remote_access
from panscan.core.errors import one_line
from panscan.core.files import replace_file
from panscan.core.installation import install_command
from panscan.core.lru import LruCache
from panscan.core.option import shorten
from panscan.images.fetch import MAX_BYTES

if TYPE_CHECKING:
    from obstore.store import ObjectStore


MAX_OBJECTS = 20_000_000
"""Objects that one listing may hold."""

_DEFAULT_TIMEOUT_S = 60.0
_LISTING_S = 3600.0  # of waiting for one listing
_LONGEST_NAME = 4096  # characters; S3, Google Cloud Storage and Azure allow 1,024
_CONNECT_S = 5.0
_SILENCE_S = 15.0  # without data, before a request is retried
_STORED = re.compile(r"(s3|gs|az)://", re.IGNORECASE)
_BLOCK_BYTES = 8 * 2**20

_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_NO_BUCKET = "no such bucket"
_FIXES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true",
}


_CACHE: LruCache[tuple[object, ...], bytes] = LruCache(256 * 2**20, len)


def is_stored(source: str) -> bool:
    """Return whether a source is the URL of an object store (``s3://``, ``gs://`` or ``az://``)."""
    return _STORED.match(source) is not None


def local_path(source: str) -> str:
    """Return the path of a ``file://`` URL, and any other source unchanged.

    Raises:
        ImageError: the URL names another host.
    """
    if not source.lower().startswith("file://"):
        return source
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ImageError(f"{source}: file:// URLs must name local files: use file:///path")
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return unquote(parts.path) + fragment


def read_object(url: str) -> bytes:
    """Return an object's content, from memory if this process read it a short time ago.

    Raises:
        ImageError: the object does not exist, or exceeds 128 MiB.
        StorageError: the store refused, or did not send it before the deadline.
        UnsupportedError: obstore is missing.
    """
    received = bytearray()
    with _opened(url) as (obstore, store, path):
        if (content := _CACHE.get(key := (url, _environment()))) is not None:
            return content
        response = obstore.get(store, path)
        for block in response.stream(min_chunk_size=_BLOCK_BYTES):
            received += block
            if max(len(received), response.meta["size"]) > MAX_BYTES:  # it may send more than it says
                raise ImageError(f"{url}: more than {MAX_BYTES} bytes")
    content = bytes(received)
    _CACHE.put(key, content)
    return content


def list_objects(url: str) -> Iterator[str]:
    """Yield the URLs of the objects below a prefix, sorted as the store sorts them; requests 1,000 names at a time.

    The prefix ends at a slash: ``s3://bucket/scans`` lists ``scans/...``, not ``scans2/...``.

    Raises:
        StorageError: the next names did not come before the deadline, the listing took longer than an hour, repeats
            itself, has a name of more than 4,096 characters or more than :data:`MAX_OBJECTS` names.
        UnsupportedError: obstore is missing.
    """
    bucket = "/".join(url.split("/", 3)[:3])
    count, waited = 0, 0.0
    first_names: set[str] = set()
    with _opened(url) as (obstore, store, path):
        stream = obstore.list(store, path or None, chunk_size=1000)
        while True:
            began = now()
            names = _next_names(stream, min(2 * _timeout(), max(0.0, _LISTING_S - waited)))
            if not names:
                return
            waited += now() - began
            count += len(names)
            if names[0] in first_names:
                raise StorageError(f"{url}: the listing repeats itself at {shorten(names[0])}")
            if longest := next((name for name in names if len(name) > _LONGEST_NAME), None):
                raise StorageError(f"{url}: a name has {len(longest):,} characters, at most {_LONGEST_NAME:,}")
            if count > MAX_OBJECTS:
                raise StorageError(f"{url}: more than {MAX_OBJECTS} objects: split the job by prefix")
            first_names.add(names[0])
            yield from (f"{bucket}/{name}" for name in names)


def _next_names(stream: Any, seconds: float) -> list[str]:
    """Return the next names of a listing, none at its end.

    obstore's own deadline is that of a page, and it asks for page after page until it has enough names, however many
    pages are empty. Only its asynchronous form can be stopped; it runs in a thread, because the caller's may have an
    event loop.

    Raises:
        ValueError: they did not come in time; :func:`_errors` names the URL.
    """

    async def take() -> list[str]:
        async with asyncio.timeout(seconds):
            try:
                return [entry["path"] for entry in await stream.__anext__()]
            except StopAsyncIteration:
                return []

    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(asyncio.run, take()).result()
        except TimeoutError as error:
            raise ValueError(f"the listing did not go on within {seconds:g} s") from error


def object_exists(url: str) -> bool:
    """Return whether an object exists.

    Raises:
        StorageError: the store did not answer before the deadline, or refused.
        UnsupportedError: obstore is missing.
    """
    try:
        with _opened(url) as (obstore, store, path):
            obstore.head(store, path)
    except ImageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        # HEAD does not tell a missing object from a missing bucket; a listing does.
        next(list_objects(url), None)
        return False
    return True


def check_object(url: str) -> None:
    """Check that an object can be read, without reading it.

    Raises:
        ImageError: it does not exist.
        StorageError: the store refused, or did not answer before the deadline.
        UnsupportedError: obstore is missing.
    """
    if not object_exists(url):
        raise ImageError(f"{url}: no such object")


def download(url: str, path: Path) -> None:
    """Write an object to a file that must not exist yet; an interrupted download leaves no file of that name.

    Raises:
        StorageError: the object could not be read before the deadline.
        OSError: the disk does not take it.
    """
    with open_object(url) as source, replace_file(path) as file:
        while block := source.read(_BLOCK_BYTES):
            file.write(block)


def upload(url: str, path: Path) -> None:
    """Replace an object by the content of a file. Readers of the store see the old object or the new one.

    Raises:
        StorageError: the store refused, or did not take it before the deadline.
    """
    with _opened(url, missing=StorageError) as (obstore, store, key):
        obstore.put(store, key, path)


def delete_object(url: str) -> None:
    """Delete an object, if it exists.

    Raises:
        StorageError: the store refused, or did not answer before the deadline.
    """
    if object_exists(url):
        with _opened(url, missing=StorageError) as (obstore, store, path):
            obstore.delete(store, path)


def open_object(url: str) -> io.RawIOBase:
    """Return an object as a seekable binary stream without a buffer: each read is one request.

    Raises:
        ImageError: the object does not exist.
        StorageError: the store refused, or did not answer before the deadline. Reading raises it, too.
    """
    with _opened(url) as (obstore, store, path):
        return _RangeReader(url, obstore.head(store, path)["size"])


class _RangeReader(io.RawIOBase):
    """An object of ``size`` bytes, read by ranges."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size = url, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        with _opened(self._url) as (obstore, store, path):
            buffer[:count] = bytes(obstore.get_range(store, path, start=self._at, length=count))
        self._at += count
        return count


def _timeout() -> float:
    chosen = remote_access().storage_timeout
    return _DEFAULT_TIMEOUT_S if chosen is None else chosen


@contextmanager
def _opened(url: str, missing: type[ImageError] = ImageError) -> Iterator[tuple[Any, ObjectStore, str]]:
    """Yield obstore, the store of a URL, and the path in it.

    Errors of obstore become one line that names the URL and the fix, of the type ``missing`` if the object does not
    exist.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    try:
        import obstore.exceptions
    except ImportError:
        needs = f"{url}: reading and writing object stores needs obstore: {install_command('storage')}"
        raise UnsupportedError(needs) from None
    if not bucket:
        raise StorageError(f"{url}: the bucket is missing: write {scheme}://bucket/path")
    try:
        with _LOCK:
            store = _store(scheme.lower(), bucket, _timeout(), _environment())
        yield obstore, store, path
    except (obstore.exceptions.BaseError, FileNotFoundError, ValueError) as error:
        reason = one_line(_storage_failure(url, error))
        kind = missing if isinstance(error, FileNotFoundError) and reason != _NO_BUCKET else StorageError
        raise kind(f"{url}: {reason}") from error


_LOCK = threading.Lock()


def _environment() -> tuple[tuple[str, str], ...]:
    """Return the environment variables that configure stores."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES)))


@lru_cache(maxsize=64)
def _store(scheme: str, bucket: str, timeout: float, environment: tuple[tuple[str, str], ...]) -> ObjectStore:
    """Return a bucket's store, which obstore configures from the same environment."""
    from obstore.store import from_url

    variables = dict(environment)

    deadline, backoff = timedelta(seconds=timeout), {"init_backoff": timedelta(milliseconds=100), "base": 2}
    return from_url(
        f"{scheme}://{bucket}",
        config=(_profile(variables) if scheme == "s3" else None) or None,
        client_options={
            "allow_http": any(variables.get(name, "").lower().startswith("http://") for name in _ENDPOINTS),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout)),
            "read_timeout": timedelta(seconds=min(_SILENCE_S, timeout)),
            "timeout": deadline,
        },
        retry_config={
            "max_retries": 1000,  # the deadline ends them
            "retry_timeout": deadline,
            "backoff": {**backoff, "max_backoff": timedelta(seconds=5)},
        },
    )


def _profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of ``~/.aws/credentials``, which obstore does not read, unless the environment has others."""
    if environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_SKIP_SIGNATURE"):
        return {}
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser())
        profile = dict(file[environment.get("AWS_PROFILE") or "default"])
    except (configparser.Error, KeyError, UnicodeDecodeError, RuntimeError):
        return {}
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return {name: profile[name] for name in names if name in profile}


def _storage_failure(url: str, error: Exception) -> str:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error).partition("\n")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    fix = _FIXES[url.partition("://")[0].lower()]
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text:
        return _NO_BUCKET
    if isinstance(error, FileNotFoundError):
        return "no such object"
    if "169.254" in text or "metadata.google" in text or "Account must be specified" in text:
        return f"no credentials found: {fix}"  # the cloud's metadata service is tried last
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or " 403 " in text or " 401 " in text:
        return f"access denied{f' ({code[1]})' if code else ''}: check the credentials ({fix})"
    last = text.rpartition(" - ")[2].removeprefix("Server returned non-2xx status code: ").partition(": <")[0]
    return f"the object store failed ({code[1] if code else last})"
