"""From what a user types (paths, directories, globs, URLs, ``file.pdf#page=2``) to pages, and from pages to images."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from panscan.core import ImageError
from panscan.core.request import MAX_PAGES
from panscan.images.decode import (
    count_pages,
    image_error,
    page_index,
    page_size,
    read_levels,
    read_page,
    upright_rgb,
)
from panscan.images.fetch import ConcealedUrl, fetch, named_url, rewritten
from panscan.images.storage import is_stored, list_objects, object_exists, read_object

__all__ = [
    "SUFFIXES",
    "Page",
    "PageBytes",
    "expand_images",
    "find_files",
    "find_pages",
    "image_size",
    "in_memory",
    "load_page",
    "open_image",
    "page_digest",
    "page_named",
    "split_page",
]

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pdf", ".png", ".tif", ".tiff", ".webp"},
)
"""What directories, and globs such as ``docs/*``, are searched for; in either case of letters."""

_URL = re.compile(r"https?://", re.IGNORECASE)
_FRAGMENT = re.compile(r"(.+)#page=([0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """One image to be: a file, or one page of it.

    Args:
        source: path or URL, as the user wrote it or the search found it; credentials of a URL are concealed.
        page: counted from 1; None for a file that has one page.
    """

    source: str
    page: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", named_url(self.source))

    @property
    def name(self) -> str:
        """``file.png`` or ``file.pdf#page=2``, for people and records."""
        return self.source if self.page is None else rewritten(self.source, lambda source: f"{source}#page={self.page}")


@dataclass(frozen=True, slots=True)
class PageBytes:
    """One page of a file that is in memory: the file's bytes, the page counted from 1, and what messages call it."""

    content: bytes
    page: int
    name: str


def find_pages(
    patterns: Sequence[str | Path], *, on_problem: Callable[[ImageError], None], max_pages: int = MAX_PAGES
) -> list[Page]:
    """Every page that the patterns stand for, in their order, each once.

    A pattern is a file, a directory (searched with its subdirectories for files with one of :data:`SUFFIXES`), a glob
    (``**`` crosses directories), an http(s) URL, or an object, prefix or glob (``*`` and ``?``) of an object store,
    with ``#page=N`` behind it for one page. Files of a directory or glob come in natural order (``p2`` before
    ``p10``). Hidden files are skipped and links to directories not followed.
    A glob that ends in nothing but stars (``docs/*``) takes only files with known suffixes; any other glob, and a
    file named outright, is tried by content. A path that exists is always itself, whatever ``*``, ``[`` or ``#page=``
    its name holds. Headers are read to count pages; pixels are not decoded.

    Args:
        patterns: what the user wrote.
        on_problem: called once for each pattern without a page and each file or directory that cannot be read.
        max_pages: a file with more pages is a problem, unless one of its first ``max_pages`` is named.
    """
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    pages: dict[tuple[str, int | None], Page] = {}
    reported: set[str] = set()

    def report(error: ImageError) -> None:
        if str(error) not in reported:
            reported.add(str(error))
            on_problem(error)

    for pattern in patterns:
        given, wanted = split_page(os.fspath(pattern))
        for source in _sources(given, report):
            file = _identity(source)
            if names.setdefault(source, file) != file:
                report(_twin(source))
                continue
            try:
                if file not in counts:
                    counts[file] = 0  # stays so for a file that cannot be read: it is reported under one name only
                    counts[file] = _count(source, max_pages)
                for page in _pages(source, wanted, counts[file], max_pages):
                    pages.setdefault((file, page.page), page)
            except ImageError as error:
                report(error)
    return list(pages.values())


def find_files(patterns: Sequence[str | Path], *, on_problem: Callable[[ImageError], None]) -> list[str]:
    """Every file that the patterns of :func:`find_pages` stand for, in the same order, each once; none is opened.

    A ``#page=N`` stays behind its file, unless the whole file is there too.
    """
    found: dict[tuple[str, int | None], str] = {}
    names: dict[str, str] = {}
    for pattern in patterns:
        given, wanted = split_page(os.fspath(pattern))
        for source in _sources(given, on_problem):
            file = _identity(source)
            if names.setdefault(source, file) != file:
                on_problem(_twin(source))
            else:
                found.setdefault((file, wanted), Page(source, wanted).name)
    return [name for (file, page), name in found.items() if page is None or (file, None) not in found]


def expand_images(images: Sequence[Any], *, max_pages: int = MAX_PAGES) -> list[Page | PageBytes | Image.Image]:
    """The images of one request, in their order and as often as given; a file of several pages becomes all of them.

    Paths are files, not directories or globs. PIL images and pages are passed through as they are; arrays and tensors
    become images (see :func:`open_image`). No pixel of a file is decoded.

    Args:
        images: of the request.
        max_pages: pages of one file at most.

    Raises:
        ImageError: for the first image that cannot be read, a file with too many pages, and anything that is no image.
            Images without a path are named by position: ``image 2 of 3``.
    """
    expanded: list[Page | PageBytes | Image.Image] = []
    for number, image in enumerate(images, start=1):
        name = f"image {number} of {len(images)}"
        if isinstance(image, str | Path):
            source, wanted = split_page(os.fspath(image))
            expanded += _pages(source, wanted, _count(source, max_pages), max_pages)
        elif isinstance(image, bytes):
            pages = _numbers(count_pages(BytesIO(image), name, max_pages), max_pages, name)
            expanded += [PageBytes(image, page, name) for page in pages]
        elif isinstance(image, Page | PageBytes | Image.Image):
            expanded.append(image)
        else:
            expanded.append(_array(image, name))
    return expanded


def page_named(name: str) -> Page:
    """The page that a :attr:`Page.name` names. Nothing is opened."""
    return Page(*split_page(name))


def load_page(page: Page, *, copy: bool = True) -> Image.Image:
    """The page's pixels: a decoded, upright RGB image (how modes and transparency map to RGB: ``decode.upright_rgb``).
    Without ``copy`` it may keep the file's metadata.

    Raises:
        ImageError: one line that names the file and says what is wrong with it.
    """
    with _open(page.source) as stream:
        return read_page(stream, page.page, page.name, copy=copy)


def image_size(image: Page | PageBytes | Image.Image) -> tuple[int, int]:
    """(width, height) of an image from :func:`expand_images`, perhaps not upright yet; no pixel is decoded.

    Raises:
        ImageError: see :func:`load_page`.
    """
    if isinstance(image, Page):
        with _open(image.source) as stream:
            return page_size(stream, image.page, image.name)
    if isinstance(image, PageBytes):
        return page_size(BytesIO(image.content), image.page, image.name)
    return image.size


def open_image(image: Any, *, copy: bool = True) -> Image.Image:
    """One image as :func:`load_page` gives it: from a page, path, URL, the bytes of a file, a PIL image or an array.

    Arrays are uint8 levels ``[height, width, 3]``, or ``[height, width]`` for grey: those of NumPy, tensors in the
    memory of the CPU, and whatever else has ``__array__``. Channels come last; ``[3, height, width]`` is refused.
    PIL images and arrays are not changed: the result is a new image without metadata, unless ``copy`` is off and the
    image is as it should be already.

    Raises:
        ImageError: see :func:`load_page`; also for a file of several pages without ``#page=``.
    """
    if isinstance(image, str | Path):
        image = page_named(os.fspath(image))
    if isinstance(image, Page):
        return load_page(image, copy=copy)
    if isinstance(image, PageBytes):
        return read_page(BytesIO(image.content), image.page, image.name, copy=copy)
    if isinstance(image, bytes):
        return read_page(BytesIO(image), None, "image bytes", copy=copy)
    if isinstance(image, Image.Image):
        return upright_rgb(image, str(getattr(image, "filename", "")) or "PIL image", copy=copy)
    return _array(image, "image")


def in_memory(page: Page | PageBytes, most: int) -> Page | PageBytes:
    """Return the page with its file's bytes if these are at most ``most``, otherwise the page unchanged.

    Raises:
        ImageError: the file cannot be read.
    """
    if isinstance(page, PageBytes):
        return page
    with _open(page.source) as stream:
        try:
            content = stream.read(most + 1)
        except OSError as error:
            raise image_error(page.source, _reason(error)) from error
    return page if len(content) > most else PageBytes(content, page.page or 1, page.name)


def page_digest(page: Page) -> str:
    """Return the SHA-256 of the file's bytes in hex, followed by ``#page=N`` for one page of several.

    Raises:
        ImageError: the file cannot be read.
    """
    with _open(page.source) as stream:
        try:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise image_error(page.source, _reason(error)) from error
    return Page(digest, page.page).name


def split_page(given: str) -> tuple[str, int | None]:
    """The file or URL of ``file.pdf#page=2``, and the page; None where there is none. A file may be named so itself."""
    given = named_url(given)
    if os.path.lexists(given) or not (match := _FRAGMENT.fullmatch(given)):
        return given, None
    return rewritten(given, lambda url: url[: -len(f"#page={match[2]}")]), int(match[2])


def _sources(given: str, report: Callable[[ImageError], None]) -> list[str]:
    if _URL.match(given):
        return [given]
    if is_stored(given):
        return _stored(given, report)
    if _is_directory(given):
        return _in_directory(given, report)
    if os.path.lexists(given) or not glob.has_magic(given):
        return [given]
    return _matching(given, report)


def _stored(url: str, report: Callable[[ImageError], None]) -> list[str]:
    """The objects of an object's URL, a prefix or a glob. A name with a known suffix is an object."""
    head, _, name = url.rpartition("/")
    magic = "*" in url or "?" in url
    if _known(name) and not magic:
        return [url]
    prefix = re.split(r"[*?]", url, maxsplit=1)[0].rpartition("/")[0] if magic else url
    wanted = None if prefix == url else re.compile(_glob_pattern(url), re.DOTALL)
    any_name = wanted is None or not name.strip("*.")
    found = [
        each
        for each in list_objects(prefix)
        if (wanted is None or wanted.fullmatch(each)) and (_known(each) or not any_name) and not _hidden(each, prefix)
    ]
    if not found and wanted is None and not url.endswith("/") and head.count("/") > 1 and object_exists(url):
        return [url]
    if not found:
        report(image_error(url, "no image or PDF file below this prefix" if wanted is None else "no object matches"))
    return sorted(found, key=_natural)


def _hidden(url: str, prefix: str) -> bool:
    return any(part.startswith(".") for part in url[len(prefix) :].split("/"))


def _glob_pattern(url: str) -> str:
    """A glob as a regular expression: ``**/`` crosses prefixes, ``*`` and ``?`` do not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", url))


def _in_directory(directory: str, report: Callable[[ImageError], None]) -> list[str]:
    problems: list[OSError] = []
    found: list[str] = []
    for folder, folders, names in os.walk(directory, onerror=problems.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [str(Path(folder, name)) for name in names if not name.startswith(".") and _known(name)]
    for problem in problems:
        report(image_error(str(problem.filename), _reason(problem)))
    if not found and not problems:
        report(image_error(directory, "no image or PDF file in this directory"))
    return sorted(found, key=_natural)


def _matching(pattern: str, report: Callable[[ImageError], None]) -> list[str]:
    any_name = not Path(pattern).name.strip("*.")
    found = [
        path
        for path in glob.iglob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not _is_directory(path) and (_known(path) or not any_name)
    ]
    if not found:
        report(image_error(pattern, "no image or PDF file matches"))
    return sorted(found, key=_natural)


def _is_directory(path: str) -> bool:
    # Path.is_dir raises where a parent may not be entered; here that is found, and reported, on opening.
    return os.path.isdir(path)  # noqa: PTH112


def _known(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _natural(path: str) -> tuple[list[list[tuple[str, int]]], str]:
    parts = [re.findall(r"([^0-9]*)([0-9]*)", part) for part in Path(path).parts]
    return [[(text.casefold(), int(digits or 0)) for text, digits in part] for part in parts], path


def _identity(source: str) -> str:
    """The same for every spelling of a path. (A path with a null byte is no path, and fails when it is opened.)"""
    if _URL.match(source):
        return source.full if isinstance(source, ConcealedUrl) else source
    return source if "\0" in source or is_stored(source) else os.path.realpath(source)


def _twin(source: str) -> ImageError:
    return image_error(source, "differs from another URL in its login only, so both have one name: use separate runs")


def _count(source: str, max_pages: int) -> int:
    with _open(source) as stream:
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
    """The pages of a file of ``count``, counted from 1."""
    if count > max_pages:
        fix = f"raise --max-pages, or choose one with #page=1 to #page={max_pages}"
        raise image_error(name, f"has more than {max_pages} page{'' if max_pages == 1 else 's'}: {fix}")
    return range(1, count + 1)


def _open(source: str) -> BufferedReader | BytesIO:
    if _URL.match(source):
        return BytesIO(fetch(source))
    if is_stored(source):
        return BytesIO(read_object(source))
    if not source:
        raise image_error("''", "an empty path names no image")  # and pathlib takes it for the working directory
    path = Path(source)
    try:
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise image_error(source, "a directory" if path.is_dir() else "not a regular file")
        return path.open("rb")
    except FileNotFoundError as error:
        link = path.is_symlink()
        raise image_error(source, f"broken link to {path.readlink()}" if link else _reason(error)) from error
    except OSError as error:
        raise image_error(source, _reason(error)) from error
    except ValueError as error:
        raise image_error(source, f"not a path ({error})") from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _array(thing: Any, name: str) -> Image.Image:
    if not hasattr(thing, "__array__"):
        kinds = "path, URL, page, PIL image, bytes, array or tensor"
        raise image_error(name, f"not a {kinds} but {type(thing).__name__}")
    try:
        levels = np.asarray(thing)
    except (TypeError, RuntimeError, ValueError) as error:  # e.g. a tensor on a GPU
        raise image_error(name, f"no array can be made of it ({error})") from error
    return read_levels(levels, name)
