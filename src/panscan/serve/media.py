"""Images and documents of requests: allowed sources and sizes. This module decodes no pixels."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from panscan.core import ImageError
from panscan.core.deadline import Deadline
from panscan.core.foreign import data_url_content
from panscan.images.fetch import fetch_from
from panscan.images.files import PageBytes
from panscan.images.headers import image_error
from panscan.images.pool import page_sizes
from panscan.serve.body import DataUrl
from panscan.serve.options import ServeOptions


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image, or a document of several pages.

    Args:
        pages: pages of the document, each with the bytes of the whole file.
        sizes: (width, height) of each page from its header, before any rotation.
        digest: BLAKE3 digest of the file.
    """

    pages: tuple[PageBytes, ...]
    sizes: tuple[tuple[int, int], ...]
    digest: bytes

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.pages[0].content) if self.pages else 0


def read_media(
    url: str,
    name: str,
    options: ServeOptions,
    uploads: Mapping[str, bytes],
    deadline: Deadline,
    *,
    one_view: bool = False,
) -> MediaFile:
    """Return the document behind a URL of a request, within the server's limits. Blocking: call it in a thread.

    Args:
        url: a ``data:``, ``http(s):``, ``file:`` or ``attachment:`` URL.
        name: name of the document in error messages, such as ``image 2``.
        options: server options with the allowed sources and the limits.
        uploads: files of a multipart body, by field name.
        deadline: when the work ends.
        one_view: whether its pages are read without crops.

    Raises:
        TimeoutError: the deadline has passed.
        ImageError: the source is not allowed, cannot be read, or exceeds a limit.
    """
    deadline.check()
    try:
        content = _content(url, options, uploads, deadline)
    except ImageError as error:
        raise image_error(name, str(error)) from error
    sizes = tuple(page_sizes(BytesIO(content), name, options.max_pages, deadline))
    for number, (width, height) in enumerate(sizes, start=1):
        if width * height > options.max_pixels:
            page = f"page {number}: " if len(sizes) > 1 else ""
            problem = f"{page}{width}x{height} pixels exceed this server's limit of {options.max_pixels}"
            raise image_error(name, problem)
    pages = tuple(PageBytes(content, number, name, size, one_view) for number, size in enumerate(sizes, start=1))
    return MediaFile(pages, sizes, blake3(content).digest())


def _content(url: str, options: ServeOptions, uploads: Mapping[str, bytes], deadline: Deadline) -> bytes:
    scheme, _, rest = url.partition(":")
    most = round(options.max_body_mb * 1e6)
    match scheme.lower():
        case "data":
            return url.content if isinstance(url, DataUrl) else data_url_content(url)
        case "attachment":
            if rest not in uploads:
                raise ImageError(f"the multipart body has no file field {rest!r}")
            return uploads[rest]
        case "http" | "https":
            if not options.allowed_media_domains:
                raise ImageError(
                    "remote images are disabled on this server (--allowed-media-domains); send a data: URL"
                )
            return fetch_from(url, frozenset(options.allowed_media_domains), max_bytes=most, deadline=deadline.until)
        case "file":
            return _local(url, options.allowed_local_media_path, most)
    raise ImageError("expected a data:, https:, file: or attachment: URL")


def _local(url: str, allowed: Path | None, most: int) -> bytes:
    """Return at most ``most`` bytes of a file below the allowed directory; symbolic links are resolved first."""
    if allowed is None:
        raise ImageError("local files are disabled on this server (--allowed-local-media-path); send a data: URL")
    root, parts = allowed.resolve(), urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ImageError("a file: URL must not name a host")
    refused = ImageError("not a readable file below --allowed-local-media-path")
    try:
        path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
        if not path.is_relative_to(root):
            raise refused
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise refused from error
    try:
        link = Path(f"/proc/self/fd/{descriptor}")
        if link.parent.is_dir() and not link.readlink().is_relative_to(root):
            raise refused  # a directory was replaced by a link
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refused
        if status.st_size > most:
            raise ImageError(f"more than {most} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)
