"""Open pages without risk to this process: cheap ones here, all others in child processes with limits.

PDF and TIFF files, and images of unusual size or structure, are opened by :mod:`panscan.images.decoder`. The kernel
limits a child's memory; the pool ends a child after :data:`PAGE_SECONDS` and replaces it. Such a page is one error, and
other pages are not affected. As PDFium allows one thread per process, several children are also faster.

Processes that read strangers' files call :func:`decode_in_children`: no decoder then runs in them at all.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image

from panscan.core import ImageError, recorded_wait
from panscan.core.child import ChildEndedError, JsonChild, Message, unnamed_file
from panscan.core.deadline import Deadline
from panscan.core.process import usable_cores
from panscan.core.request import MAX_PAGES
from panscan.images import decode
from panscan.images.decode import page_index
from panscan.images.decoder import SEALS
from panscan.images.headers import ImageHeader, Size, image_error, read_header

PAGE_SECONDS = 20.0
"""Longest time for opening a document or decoding one of its pages, seconds, once a child process is free."""

MEMORY_BYTES = 2_000_000_000
"""Memory that a child process may take for a document, in addition to its own: 178 megapixels of a JPEG fit."""

_HOST_SHARE = 8  # at most an eighth of the host's memory for each pool of a process
_REUSES = 1_000  # documents per child, so that what a decoder leaks stays bounded
_POLL_SECONDS = 0.1  # until an abandoned request is noticed
_REPLY_SECONDS = 2.0  # for the rest of a reply, which is short
_START_SECONDS = 60.0  # for a child to start: it imports libraries, perhaps on a busy machine
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "SYSTEMROOT")
_FEW_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "RAYON_NUM_THREADS": "4",
}


class PageLevels(NamedTuple):
    """A decoded page: (width, height), upright; BLAKE3 digest; uint8 ``[height, width, 4]``: red, green, blue and 0."""

    size: Size
    digest: bytes
    levels: NDArray[np.uint8]


def worker_count() -> int:
    """Return the most child processes of a pool: one per core, at least two so that one slow page blocks no other."""
    memory = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):  # of this container if it has less; "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return max(2, min(usable_cores(), memory // (_HOST_SHARE * MEMORY_BYTES), 8))


def decode_in_children() -> None:
    """Let child processes decode all images of this process, including cheap ones. Starts one child.

    For processes that hold a model or serve clients, and read files of strangers.
    """
    global _inline
    _inline = False
    with suppress(ImageError):  # each page will say so
        _CHEAP.start_one()


def is_cheap(stream: BinaryIO, name: str) -> bool:
    """Return whether a file is an image that decodes in little memory and time. The stream is left at its start."""
    try:
        header = _header_of(stream, name)
    except ImageError:  # refused when it is opened, without a decoder
        return True
    return header is not None and header.ordinary


def count_pages(stream: BinaryIO, name: str, max_pages: int = MAX_PAGES, deadline: Deadline | None = None) -> int:
    """See :func:`panscan.images.decode.count_pages`.

    Raises:
        ImageError: also if the file exceeds a limit of a child process.
        TimeoutError: the deadline has passed.
    """
    if _header_of(stream, name) is not None:
        return 1
    return _answer_of(int, "count", stream, name, deadline, max_pages=max_pages)


def page_size(stream: BinaryIO, page: int | None, name: str, deadline: Deadline | None = None) -> Size:
    """See :func:`panscan.images.decode.page_size`, and :func:`count_pages` for what else it raises."""
    if (header := _header_of(stream, name)) is not None:
        page_index(1, page, name)
        return header.width, header.height
    return _answer_of(tuple[int, int], "size", stream, name, deadline, page=page)


def page_sizes(stream: BinaryIO, name: str, max_pages: int = MAX_PAGES, deadline: Deadline | None = None) -> list[Size]:
    """See :func:`panscan.images.decode.page_sizes`, and :func:`count_pages` for what else it raises."""
    if (header := _header_of(stream, name)) is not None:
        return [(header.width, header.height)]
    return _answer_of(list[Size], "sizes", stream, name, deadline, max_pages=max_pages)


def read_page(
    stream: BinaryIO, page: int | None, name: str, *, copy: bool = True, deadline: Deadline | None = None
) -> Image.Image:
    """See :func:`panscan.images.decode.read_page`, and :func:`count_pages` for what else it raises."""
    pixels = read_pixels(stream, page, name, copy=copy, deadline=deadline)
    if isinstance(pixels, Image.Image):
        return pixels
    with decode.reading(name):
        return Image.frombytes("RGB", pixels.size, pixels.levels.data, "raw", "RGBX")


def read_pixels(
    stream: BinaryIO,
    page: int | None,
    name: str,
    *,
    copy: bool = False,
    alone: bool = False,
    deadline: Deadline | None = None,
) -> PageLevels | Image.Image:
    """Decode one page by the cheaper path: to levels that a child process copied, or to an image in this process.

    Args and raises: as :func:`panscan.images.decode.read_page` and :func:`count_pages`; ``alone`` as
    :func:`panscan.images.page_levels.copy_levels`.
    """
    header = _header_of(stream, name)
    ordinary = header is not None and header.ordinary
    expected = None if header is None else (header.width, header.height)
    if _inline and ordinary:
        return decode.read_page(stream, page, name, copy=copy, expected=expected)
    fields = {"operation": "levels", "page": page, "alone": alone, "expected": expected}
    reply = _ask(_CHEAP if ordinary else _DOCUMENTS, stream, deadline, name, **fields)
    with _well_formed(name):
        if reply.pixels is None:
            raise ValueError("no pixels")
        width, height = msgspec.convert(reply.fields["size"], Size)
        levels = reply.pixels.reshape(height, width, 4)
        return PageLevels((width, height), bytes.fromhex(reply.fields["digest"]), levels)


def _header_of(stream: BinaryIO, name: str) -> ImageHeader | None:
    """See :func:`panscan.images.headers.read_header`; a file that cannot be read is an ImageError too."""
    with decode.reading(name):
        return read_header(stream, name)


T = TypeVar("T")


def _answer_of(
    kind: type[T], operation: str, stream: BinaryIO, name: str, deadline: Deadline | None, **fields: Any
) -> T:
    """Return a child's answer of a type to a request about a document; raises as :func:`_ask`."""
    reply = _ask(_DOCUMENTS, stream, deadline, name, operation=operation, **fields)
    with _well_formed(name):
        return msgspec.convert(reply.fields["answer"], kind)


def _ask(pool: DecodingPool, stream: BinaryIO, deadline: Deadline | None, name: str, **fields: Any) -> _Reply:
    """Return a child's reply to a request with these fields.

    Raises:
        ImageError: the file cannot be read, or exceeds a limit.
        TimeoutError: the deadline has passed.
    """
    reply = pool.ask({"name": str(name), **fields}, stream, name, deadline or Deadline())
    if (problem := reply.fields.get("error")) is not None:
        raise ImageError(str(problem))
    return reply


@contextmanager
def _well_formed(name: str) -> Iterator[None]:
    """Raise an ImageError for a reply that cannot be used: the child may have been taken over."""
    try:
        yield
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise image_error(name, f"the decoding process sent a malformed reply ({type(error).__name__})") from error


@contextmanager
def _descriptor(stream: BinaryIO, name: str) -> Iterator[int]:
    """Yield a file descriptor of a stream at its start; what is in memory is copied to a file without a name."""
    stream.seek(0)
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        try:
            file = os.fdopen(unnamed_file(), "w+b")
            file.write(stream.getbuffer() if isinstance(stream, io.BytesIO) else stream.read())
            file.flush()
        except OSError as error:
            problem = f"cannot be passed to a decoding process ({error.strerror or error})"
            raise image_error(name, problem) from error
        with file:
            yield file.fileno()
    else:
        yield descriptor


class DecodingPool:
    """Child processes that open documents, started as needed. Thread-safe.

    Args:
        most: maximum number of processes.
        seconds: see :data:`PAGE_SECONDS`.
        memory: see :data:`MEMORY_BYTES`.
        niceness: by how much the processes' scheduling priority is lowered.
        watch: whether this process watches a child's resident memory, because the kernel does not limit it.
    """

    def __init__(
        self,
        most: int,
        *,
        seconds: float = PAGE_SECONDS,
        memory: int = MEMORY_BYTES,
        niceness: int = 0,
        watch: bool = sys.platform != "linux",
    ) -> None:
        self._most = most
        self.seconds, self.memory, self.niceness, self.watch = seconds, memory, niceness, watch
        self.forget()

    def forget(self) -> None:
        """Start over in a forked copy of this process, which owns none of the children."""
        for child in getattr(self, "_children", ()):
            child.forget()
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._idle: list[_Decoder] = []
        self._children: set[JsonChild] = set()
        self._busy = 0
        self._closed = False

    def start_one(self) -> None:
        """Start a child if there is none, so that the first page need not wait for it."""
        with self._changed:
            if not self._children:
                self._idle.append(self._started())

    def ask(self, fields: dict[str, Any], stream: BinaryIO, name: str, deadline: Deadline) -> _Reply:
        """Return the reply of the next free child to a request about a file.

        Raises:
            ImageError: the child exceeded a limit, or crashed.
            TimeoutError: the deadline has passed.
        """
        worker = self._acquire(deadline)
        usable = False
        try:
            with _descriptor(stream, name) as file:
                reply = worker.ask(fields, file, name, deadline)
            usable = worker.uses < _REUSES and not reply.fields.get("memory")
            return reply
        finally:
            self._release(worker, usable=usable)

    def close(self) -> None:
        """End all children. A request in progress fails, and later ones are refused."""
        with self._changed:
            self._closed = True
            children, self._children = self._children, set()
            self._changed.notify_all()
        for child in children:
            child.kill()
        for child in children:
            child.close(grace=1.0)

    def _acquire(self, deadline: Deadline) -> _Decoder:
        """Return a child that no other thread uses, in order of arrival."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                if not self._free(turn):
                    with recorded_wait():
                        while not self._free(turn):
                            deadline.check()
                            self._changed.wait(min(deadline.remaining, _POLL_SECONDS))
                if self._closed:
                    raise ImageError("this process is shutting down")
                worker = self._idle_one() or self._started()
                self._busy += 1
                return worker
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _free(self, turn: object) -> bool:
        return self._closed or (self._waiting[0] is turn and self._busy < self._most)

    def _idle_one(self) -> _Decoder | None:
        """Return an idle child, None if there is none. One that was killed meanwhile is dropped."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self._children.discard(worker.child)
            worker.child.close()
        return None

    def _started(self) -> _Decoder:
        # No credentials, and few threads: each takes address space.
        environment = {variable: os.environ[variable] for variable in _KEPT_VARIABLES if variable in os.environ}
        try:
            child = JsonChild("panscan.images.decoder", environment=environment | _FEW_THREADS, keep_output=True)
        except OSError as error:
            raise ImageError(f"a decoding process cannot be started ({error.strerror or error})") from error
        self._children.add(child)
        return _Decoder(child, self)

    def _release(self, worker: _Decoder, *, usable: bool) -> None:
        with self._changed:
            self._busy -= 1
            if usable and not self._closed:
                self._idle.append(worker)
            else:
                self._children.discard(worker.child)
            self._changed.notify_all()
        if not usable:
            worker.child.close()


class _Reply(NamedTuple):
    """A child's reply: its fields, and the pixels of a page if they were asked for, uint8 ``[bytes]``."""

    fields: dict[str, Any]
    pixels: NDArray[np.uint8] | None


class _Decoder:
    """A child process of a pool, used by one thread at a time. Limits: see :class:`DecodingPool`."""

    def __init__(self, child: JsonChild, pool: DecodingPool) -> None:
        self.child, self._limits = child, pool
        self.uses = 0
        self._mapped: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()  # appended to by whichever thread drops an array last

    def has_ended(self) -> bool:
        """Return whether the child has ended since its last reply: it says nothing unasked, except that it started."""
        return self.uses > 0 and self.child.readable(0)

    def ask(self, fields: dict[str, Any], file: int, name: str, deadline: Deadline) -> _Reply:
        """Return the reply to a request (see :meth:`DecodingPool.ask`)."""
        self.uses += 1
        released = [self._released.popleft() for _ in range(len(self._released))]
        try:
            if self.uses == 1:  # it sets its limits and says that it has started: a page's time begins then
                memory = None if self._limits.watch else self._limits.memory
                self.child.send({"memory": memory, "niceness": self._limits.niceness})
                self._receive(_START_SECONDS, deadline)
            self.child.send({**fields, "released": released}, files=[file])
            message = self._receive(self._limits.seconds, deadline)
        except ChildEndedError as error:
            needed = f"{self._limits.memory / 1e9:g} GB of memory"
            raise image_error(name, f"the decoder crashed or needed more than {needed} (it {error})") from error
        except TimeoutError:
            deadline.check()
            raise image_error(name, f"opening it took longer than {self._limits.seconds:g} s") from None
        try:
            with _well_formed(name):
                pixels = self._pixels(message) if "file" in message.fields else None
                for number in message.fields.get("dropped", ()):
                    self._mapped.pop(number, None)
                return _Reply(message.fields, pixels)
        finally:
            for file in message.files:  # a mapping keeps a separate descriptor
                os.close(file)

    def _receive(self, seconds: float, deadline: Deadline) -> Message:
        """Return the child's next message.

        Raises:
            TimeoutError: it did not arrive within ``seconds``, or before the deadline.
            ChildEndedError: the child has ended.
        """
        limit = Deadline.after(seconds)
        while not self.child.readable(min(_POLL_SECONDS, limit.remaining)):
            deadline.check()
            limit.check()
            if self._limits.watch and self._resident() > self._limits.memory:
                self.child.kill()
        return self.child.receive(_REPLY_SECONDS)

    def _resident(self) -> int:
        """Return the resident memory of the child, bytes; 0 once it has ended."""
        try:
            return int(psutil.Process(self.child.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _pixels(self, message: Message) -> NDArray[np.uint8]:
        """Return the pixels in a child's file without copying them. Once the array is dropped, the file is released."""
        width, height = message.fields["size"]
        number, size = message.fields["file"], 4 * int(width) * int(height)
        if message.files:
            file = message.files[0]
            length = os.fstat(file).st_size
            sealed = not SEALS or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not sealed or not 0 < size <= length:
                raise ValueError("a file of another size")
            memory = mmap.mmap(file, length, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            if message.fields["kept"]:
                self._mapped[number] = memory
        else:
            memory = self._mapped[number]
        pixels = np.frombuffer(memory, np.uint8, size)
        if message.fields["kept"]:
            weakref.finalize(pixels, self._released.append, number).atexit = False
        return pixels


_inline = True
_CHEAP, _DOCUMENTS = DecodingPool(worker_count()), DecodingPool(worker_count(), niceness=10)
"""Pools for images that decode quickly, and for all other files: a slow document must not delay a picture."""


for _pool in (_CHEAP, _DOCUMENTS):
    atexit.register(_pool.close)
    os.register_at_fork(after_in_child=_pool.forget)
