"""Expand paths, directories, globs and URLs into pages (``file.pdf#page=2``), and open pages as images."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from panscan.core import ImageError, InputError
from panscan.core.deadline import Deadline
from panscan.core.errors import OnProblem
from panscan.core.option import shorten
from panscan.core.request import MAX_PAGES
from panscan.images.decode import array_image, page_index, upright_rgb
from panscan.images.fetch import ConcealedUrl, fetch, named_url, rewritten
from panscan.images.headers import Size, image_error
from panscan.images.pool import PageLevels, count_pages, is_cheap, page_size, read_page, read_pixels
from panscan.images.storage import is_stored, list_objects, object_exists, read_object

# Photos of phones and cameras must not be skipped silently.
_UNSUPPORTED_SUFFIXES = {".heic", ".heics", ".heif", ".hif", ".j2k", ".jp2", ".jpx", ".jxl"}
SUFFIXES = frozenset(
    {".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pdf", ".png", ".tif", ".tiff", ".webp"}
    | _UNSUPPORTED_SUFFIXES,
)
"""File suffixes that directories and globs such as ``docs/*`` are searched for; case-insensitive."""

ONE_PAGE_SUFFIXES = SUFFIXES - {".pdf", ".tif", ".tiff"}
"""Suffixes of images, which are one page each: of an animation, the first frame is read."""

_URL = re.compile(r"https?://", re.IGNORECASE)
_FRAGMENT = re.compile(r"(.+)#page=([0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """A reference to an image: a file, or one page of a file.

    Args:
        source: path or URL, as given by the user or found in a directory; credentials in a URL are concealed.
        page: page number, from 1; None for a file with a single page.
    """

    source: str
    page: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", named_url(self.source))

    @property
    def name(self) -> str:
        """The page's name in messages and records: ``file.png`` or ``file.pdf#page=2``."""
        return self.source if self.page is None else rewritten(self.source, lambda source: f"{source}#page={self.page}")


@dataclass(frozen=True, slots=True)
class PageBytes:
    """A page of a file that is in memory.

    Args:
        content: the file's bytes.
        page: page number, from 1.
        name: name in messages.
        size: (width, height) of the page if they are known from its header.
        one_view: whether it is read without crops, whatever the request's settings.
    """

    content: bytes
    page: int
    name: str
    size: Size | None = None
    one_view: bool = False


RequestImage = Page | PageBytes | Image.Image
"""An image of a request: a page to open, or one that is decoded."""


def find_pages(patterns: Sequence[str | Path], *, on_problem: OnProblem, max_pages: int = MAX_PAGES) -> list[Page]:
    """Return all pages that match the patterns, in order, without duplicates.

    A pattern is a file, a directory (searched recursively for files with one of :data:`SUFFIXES`), a glob (``**``
    crosses directories), an http(s) URL, or an object, prefix or glob (``*`` and ``?``) of an object store. A suffix
    ``#page=N`` selects one page. Files of a directory or glob are in natural order (``p2`` before ``p10``). Hidden
    files are skipped, and links to directories are not followed.
    A glob whose last part consists of stars only (``docs/*``) matches only files with known suffixes. Files that any
    other glob matches, and files given by name, may have any suffix: their type is detected from their content. An
    existing path is never interpreted as a glob or page reference, even if its name contains ``*``, ``[`` or
    ``#page=``. Headers are read to count pages; pixels are not decoded.

    Args:
        patterns: patterns as given by the user.
        on_problem: called once for each pattern that matches no page, and each file or directory that cannot be read.
        max_pages: a file with more pages is a problem, unless the pattern selects one of its first ``max_pages``.
    """
    counts: dict[str, int] = {}
    pages: dict[tuple[str, int | None], Page] = {}
    reported: set[str] = set()

    def report(error: InputError) -> None:
        if str(error) not in reported:
            reported.add(str(error))
            on_problem(error)

    for source, file, wanted in _matches(patterns, report):
        try:
            if file not in counts:
                counts[file] = 0  # stays so for a file that cannot be read: it is reported under one name only
                counts[file] = _pages_in(source, max_pages)
            for page in _pages(source, wanted, counts[file], max_pages):
                pages.setdefault((file, page.page), page)
        except ImageError as error:
            report(error)
    return list(pages.values())


def find_files(patterns: Sequence[str | Path], *, on_problem: OnProblem) -> list[str]:
    """Return the files that patterns of :func:`find_pages` match, in the same order, without opening them.

    A name keeps its ``#page=N``. It is omitted if the whole file is in the result too.
    """
    names: dict[tuple[str, int | None], str] = {}
    for source, file, wanted in _matches(patterns, on_problem):
        names.setdefault((file, wanted), Page(source, wanted).name)
    return [name for (file, page), name in names.items() if page is None or (file, None) not in names]


def expand_images(images: Sequence[Any], *, max_pages: int = MAX_PAGES) -> list[RequestImage]:
    """Expand the images of a request: each file into its pages, arrays and tensors into images (see
    :func:`open_image`). PIL images and pages are passed through.

    Order and duplicates are kept. Paths are files, not directories or globs. Files are not decoded.

    Args:
        images: images of the request.
        max_pages: maximum number of pages per file.

    Raises:
        ImageError: an image cannot be read, a file has too many pages, or a value is not an image. Images without a
            path are named by position: ``image 2 of 3``.
    """
    expanded: list[RequestImage] = []
    for number, image in enumerate(images, start=1):
        name = f"image {number} of {len(images)}"
        if isinstance(image, str | Path):
            source, wanted = split_page(os.fspath(image))
            expanded += _pages(source, wanted, _pages_in(source, max_pages), max_pages)
        elif isinstance(image, bytes | bytearray | memoryview):
            content = bytes(image)
            pages = _numbers(count_pages(BytesIO(content), name, max_pages), max_pages, name)
            expanded += [PageBytes(content, page, name) for page in pages]
        elif isinstance(image, Page | PageBytes | Image.Image):
            expanded.append(image)
        else:
            expanded.append(_array(image, name))
    return expanded


def page_named(name: str) -> Page:
    """Return the page with a :attr:`Page.name`. Does not open the file."""
    return Page(*split_page(name))


def image_size(image: RequestImage, deadline: Deadline | None = None) -> Size:
    """Return (width, height) of an image from :func:`expand_images` without decoding it; the orientation that its
    metadata demands may not be applied yet.

    Raises:
        ImageError: see :func:`open_image`.
    """
    if isinstance(image, Image.Image):
        return image.size
    if isinstance(image, PageBytes) and image.size is not None:
        return image.size
    with _opened(image) as stream:
        return page_size(stream, image.page, image.name, deadline)


def open_image(image: Any, *, copy: bool = True, deadline: Deadline | None = None) -> Image.Image:
    """Open a page, path, URL, the bytes of a file, a PIL image or an array as an upright RGB image (see
    :func:`panscan.images.decode.upright_rgb` for other modes and transparency).

    Arrays are uint8 levels ``[height, width, 3]``, or ``[height, width]`` for grey: NumPy arrays, CPU tensors, and
    other objects with ``__array__``. ``[3, height, width]`` is refused. PIL images and arrays are not modified. The
    result is a new image without metadata; without ``copy``, an upright RGB image is returned unchanged, and a page may
    keep the file's metadata.

    Raises:
        ImageError: the image cannot be read, or is a file of several pages without ``#page=``; the message is one line
            that names the file.
    """
    if isinstance(image, str | Path):
        image = page_named(os.fspath(image))
    if isinstance(image, Page | PageBytes):
        with _opened(image) as stream:
            return read_page(stream, image.page, image.name, copy=copy, deadline=deadline)
    if isinstance(image, bytes):
        return read_page(BytesIO(image), None, "image bytes", copy=copy, deadline=deadline)
    if isinstance(image, Image.Image):
        return upright_rgb(image, str(getattr(image, "filename", "")) or "PIL image", copy=copy)
    return _array(image, "image")


def open_pixels(
    image: RequestImage, *, alone: bool = False, deadline: Deadline | None = None
) -> PageLevels | Image.Image:
    """Decode an image from :func:`expand_images` without copying its pixels (see
    :func:`panscan.images.pool.read_pixels`).

    Raises:
        ImageError: see :func:`open_image`.
    """
    if isinstance(image, Image.Image):
        return open_image(image, copy=False)
    with _opened(image) as stream:
        return read_pixels(stream, image.page, image.name, alone=alone, deadline=deadline)


def opens_quickly(image: Any) -> bool:
    """Return whether an image takes little memory and time to open (see :func:`panscan.images.pool.is_cheap`).

    Images that are decoded already do; what cannot be read fails quickly. Nothing is downloaded: remote files count as
    quick, because only their content could tell.
    """
    try:
        if isinstance(image, bytes):
            return is_cheap(BytesIO(image), "image")
        if isinstance(image, str | Path):
            image = page_named(os.fspath(image))
        remote = isinstance(image, Page) and (_URL.match(image.source) or is_stored(image.source))
        if remote or not isinstance(image, Page | PageBytes):
            return True
        with _opened(image) as stream:
            return is_cheap(stream, image.name)
    except ImageError:
        return True


def in_memory(page: Page | PageBytes, most: int) -> Page | PageBytes:
    """Return the page with its file's bytes if these are at most ``most``, otherwise the page unchanged.

    Raises:
        ImageError: the file cannot be read.
    """
    if isinstance(page, PageBytes):
        return page
    with _opened(page) as stream:
        content = stream.read(most + 1)
    return page if len(content) > most else PageBytes(content, page.page or 1, page.name)


def page_digest(page: Page) -> str:
    """Return the SHA-256 of the file's bytes in hex, followed by ``#page=N`` for one page of several.

    Raises:
        ImageError: the file cannot be read.
    """
    with _opened(page) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Page(digest, page.page).name


def split_page(given: str) -> tuple[str, int | None]:
    """Split ``file.pdf#page=2`` into the path or URL and the page number; None without one, and for an existing file of
    that name."""
    given = named_url(given)
    if os.path.lexists(given) or not (match := _FRAGMENT.fullmatch(given)):
        return given, None
    return rewritten(given, lambda url: url[: -len(f"#page={match[2]}")]), int(match[2])


def _matches(patterns: Sequence[str | Path], report: OnProblem) -> Iterator[tuple[str, str, int | None]]:
    """Yield the files that patterns match: path or URL, :func:`_file_key`, and the selected page."""
    names: dict[str, str] = {}
    for pattern in patterns:
        given, wanted = split_page(os.fspath(pattern))
        for source in _sources(given, report):
            file = source.full if isinstance(source, ConcealedUrl) else source
            if not (_URL.match(source) or is_stored(source) or "\0" in source):
                file = os.path.realpath(source)
            if names.setdefault(source, file) == file:
                yield source, file, wanted
            else:
                problem = "differs from another URL in its login only, so both have one name: use separate runs"
                report(image_error(source, problem))


def _sources(given: str, report: OnProblem) -> list[str]:
    if _URL.match(given):
        return [given]
    if is_stored(given):
        return _stored(given, report)
    # Path.is_dir raises where a parent may not be entered; here that is found, and reported, on opening.
    if os.path.isdir(given):  # noqa: PTH112
        return _in_directory(given, report)
    if os.path.lexists(given) or not glob.has_magic(given):
        return [given]
    any_name = not Path(given).name.strip("*.")
    paths = [
        path
        for path in glob.iglob(given, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not os.path.isdir(path) and (_has_known_suffix(path) or not any_name)  # noqa: PTH112
    ]
    if not paths:
        report(image_error(given, "no image or PDF file matches"))
    return sorted(paths, key=_natural)


def _stored(url: str, report: OnProblem) -> list[str]:
    """Return the URLs that an object's URL, a prefix or a glob matches. A name with a known suffix is an object."""
    head, _, name = url.rpartition("/")
    magic = "*" in url or "?" in url
    if _has_known_suffix(name) and not magic:
        return [url]
    prefix, pattern = url, ".*"
    if magic:
        prefix = re.split(r"[*?]", url, maxsplit=1)[0].rpartition("/")[0]
        # As regular expressions: ``**/`` crosses prefixes, ``*`` and ``?`` do not.
        parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        pattern = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", url))
    wanted, any_name = re.compile(pattern, re.DOTALL), not magic or not name.strip("*.")
    urls = [
        object_url
        for object_url in list_objects(prefix)
        if wanted.fullmatch(object_url)
        and (_has_known_suffix(object_url) or not any_name)
        and not any(part.startswith(".") for part in object_url[len(prefix) :].split("/"))
    ]
    if not urls and not magic and not url.endswith("/") and head.count("/") > 1 and object_exists(url):
        return [url]
    if not urls:
        report(image_error(url, "no object matches" if magic else "no image or PDF file below this prefix"))
    return sorted(urls, key=_natural)


def _in_directory(directory: str, report: OnProblem) -> list[str]:
    problems: list[OSError] = []
    paths: list[str] = []
    for folder, folders, names in os.walk(directory, onerror=problems.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [str(Path(folder, name)) for name in names if not name.startswith(".") and _has_known_suffix(name)]
    for problem in problems:
        report(image_error(str(problem.filename), _os_reason(problem)))
    if not paths and not problems:
        report(image_error(directory, "no image or PDF file in this directory"))
    return sorted(paths, key=_natural)


def _has_known_suffix(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _natural(path: str) -> tuple[list[list[tuple[str, int]]], str]:
    parts = [re.findall(r"([^0-9]*)([0-9]*)", part) for part in Path(path).parts]
    return [[(text.casefold(), int(digits or 0)) for text, digits in part] for part in parts], path


def _pages_in(source: str, max_pages: int) -> int:
    with _opened(Page(source)) as stream:
        return count_pages(stream, source, max_pages)


def _pages(source: str, wanted: int | None, count: int, max_pages: int) -> list[Page]:
    if count == 0:
        return []
    if wanted is None:
        return [Page(source, number if count > 1 else None) for number in _numbers(count, max_pages, source)]
    if wanted > max_pages and count > max_pages:
        raise image_error(source, f"page {wanted} is beyond the first {max_pages}: raise --max-pages")
    page_index(count, wanted, source)
    return [Page(source, wanted if count > 1 else None)]


def _numbers(count: int, max_pages: int, name: str) -> range:
    """Return the page numbers of a file with ``count`` pages."""
    if count > max_pages:
        fix = f"raise --max-pages, or choose one with #page=1 to #page={max_pages}"
        raise image_error(name, f"has more than {max_pages} page{'' if max_pages == 1 else 's'}: {fix}")
    return range(1, count + 1)


@contextmanager
def _opened(page: Page | PageBytes) -> Iterator[BufferedReader | BytesIO]:
    """Yield the stream of a page's file. Errors while it is read are raised as ImageError."""
    if isinstance(page, PageBytes):
        yield BytesIO(page.content)
        return
    with _open(page.source) as stream:
        try:
            yield stream
        except OSError as error:
            raise image_error(page.source, _os_reason(error)) from error


def _open(source: str) -> BufferedReader | BytesIO:
    if _URL.match(source):
        return BytesIO(fetch(source))
    if is_stored(source):
        return BytesIO(read_object(source))
    if not source:
        raise image_error("''", "an empty path names no image")  # pathlib would use the working directory
    if source.startswith("data:"):  # not as a name, which would be megabytes in the message
        raise image_error(shorten(source), "a data: URL is no path: decode it, and give its bytes")
    path = Path(source)
    try:
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise image_error(source, "a directory" if path.is_dir() else "not a regular file")
        return path.open("rb")
    except FileNotFoundError as error:
        link = path.is_symlink()
        raise image_error(source, f"broken link to {path.readlink()}" if link else _os_reason(error)) from error
    except OSError as error:
        raise image_error(source, _os_reason(error)) from error
    except ValueError as error:
        raise image_error(source, f"not a path ({error})") from error


def _os_reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _array(values: Any, name: str) -> Image.Image:
    if not hasattr(values, "__array__"):
        kinds = "path, URL, page, PIL image, bytes, array or tensor"
        raise image_error(name, f"not a {kinds} but {type(values).__name__}")
    try:
        levels = np.asarray(values)
    except (TypeError, RuntimeError, ValueError) as error:  # e.g. a tensor on a GPU
        raise image_error(name, f"no array can be made of it ({error})") from error
    return array_image(levels, name)
