"""Files that survive a crash: replaced in one step, appended to as JSON lines, locked; and where the cache is."""

from __future__ import annotations

import codecs
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import platformdirs

from panscan.core.errors import InputError, PanscanError, RecordsError, SettingError
from panscan.core.process import now

LONGEST_LINE = 64 * 2**20
"""Bytes of a line of a log. A longer one is read in pieces, which are not JSON."""

_TAIL_BYTES = 2**16


_MARKS = (  # the longer first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)


def read_bytes(
    path: Path, most: int, called: str, error: Callable[[str], Exception], *, fix: str = "", pipe: bool = False
) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.
        most: its largest size in bytes.
        called: start of error messages: the path, and the option that named it.
        error: type of the exceptions.
        fix: what the user can do about a file that is too large.
        pipe: whether it may be a pipe. Otherwise only regular files are read.

    Raises:
        Exception: of type ``error``; the file is none of these, larger, or cannot be read.
    """
    wait = 0 if pipe else getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | wait)) as file:
            accepted = pipe or stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(most + 1) if accepted else b""
    except (OSError, ValueError) as cause:  # ValueError: a null character in the name
        raise error(f"{called}: cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    if not accepted:
        raise error(f"{called}: not a regular file")
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 2**20 else f"{most:,} bytes"
        raise error(f"{called}: larger than {size}{fix and f': {fix}'}")
    return data


def read_text(
    path: Path, most: int, called: str, error: Callable[[str], Exception], *, fix: str = "", pipe: bool = False
) -> str:
    """Read a file's text with "\\n" line ends. (str.splitlines also splits at characters that JSON texts may hold.)

    A byte order mark determines the Unicode encoding; the default is UTF-8. Other encodings are not guessed: text that
    is decoded wrongly would be asked and scored as if it were right.

    Args:
        path: the file; see :func:`read_bytes` for the other arguments.
        most: its largest size in bytes.
        called: start of error messages.
        error: type of the exceptions.
        fix: what the user can do about a file that is too large.
        pipe: whether it may be a pipe.

    Raises:
        Exception: of type ``error``; also if the file has another encoding.
    """
    data = read_bytes(path, most, called, error, fix=fix, pipe=pipe)
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as cause:
        line = data.count(b"\n", 0, cause.start) + 1
        if encoding != "utf-8":
            raise error(f"{called}: not the {encoding} text that its byte order mark promises") from cause
        reason = f"not UTF-8 text (byte 0x{data[cause.start]:02x} in line {line})"
        raise error(f"{called}: {reason}: save it as UTF-8") from cause
    if "\0" in text:
        raise error(f"{called}: not UTF-8 text but perhaps UTF-16 without a byte order mark: save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def file_identity(path: str | Path) -> tuple[int, int] | None:
    """Return what all names and links of a file share; None for a URL or a missing file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat takes no string
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def replaced_source(outputs: Iterable[Path], sources: Iterable[str | Path]) -> tuple[Path, str | Path] | None:
    """Return an output that is one of the source files, by whatever name, and that source; None if there is none."""
    written = {file_identity(path): path for path in outputs}
    written.pop(None, None)
    for source in sources if written else ():
        if (path := written.get(file_identity(source))) is not None:
            return path, source
    return None


@contextmanager
def write_errors(path: Path, error: type[InputError] = InputError) -> Iterator[None]:
    """Convert an ``OSError`` of the body to an exception that names ``path``.

    Raises:
        InputError: of type ``error``; the body raised an ``OSError``.
    """
    try:
        yield
    except OSError as cause:
        raise error(f"{path} could not be written: {cause.strerror or cause}") from cause


def write_file(path: Path, data: bytes | str, error: type[InputError] = InputError) -> None:
    """Write a file atomically and durably: readers see the old file or the new one, never a part.

    Args:
        path: file to create or replace; a link is replaced, not followed.
        data: its contents. Text becomes UTF-8; lone surrogates, from file names that are not Unicode, are escaped.
        error: type of the exception.

    Raises:
        InputError: of type ``error``; the file cannot be written.
    """
    with write_errors(path, error), replace_file(path) as file:
        file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the body ends, and is removed if the body raises.

    The user's umask applies; besides, others than the owner and its group can never write the file.

    Args:
        path: file to create or replace; a link is replaced, not followed.
        durable: whether the file must be on the disk afterwards. Files that can be made again need not.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o664)) as file:  # follows no link
            yield file
        publish_file(temporary, path, durable=durable)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish_file(temporary: Path, path: Path, *, durable: bool = True) -> None:
    """Move a finished file of the same directory to ``path`` atomically, replacing a file of that name.

    Raises:
        OSError: the file cannot be moved, or the disk does not take it.
    """
    if durable:
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync the entries of a directory to disk. Only POSIX systems support and need this."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class JsonLog:
    """An append-only file of JSON lines: complete lines stay, however the process ends.

    A torn tail is not read; :meth:`cut` moves it to ``NAME.torn`` before the first write. A file that is only read is
    not changed.

    Args:
        path: the file, created if necessary.
        sync_seconds: a machine failure, unlike a killed process, may lose lines younger than this; 0: none.

    Attributes:
        path: the file.
        torn: where torn tails are kept.

    Raises:
        RecordsError: the file cannot be opened for reading and writing.
    """

    def __init__(self, path: Path, *, sync_seconds: float = 0.0) -> None:
        self.path, self.torn = path, path.with_name(f"{path.name}.torn")
        self._sync_seconds, self._synced = sync_seconds, now()
        with write_errors(path, RecordsError):
            self._file = _open_log(path)
            with path.open("rb") as file:
                self._complete = complete_size(file)
            self._is_torn = self._complete < os.fstat(self._file).st_size

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the byte offset and the bytes of each complete line; of one that is too long, its pieces."""
        offset = 0
        with self.path.open("rb") as file:
            while (line := file.readline(LONGEST_LINE)) and not (self._is_torn and offset >= self._complete):
                yield offset, line
                offset += len(line)

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines at byte offsets."""
        with self.path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield file.readline(LONGEST_LINE)

    def cut(self) -> int:
        """Move a torn tail to the end of :attr:`torn`. Return its length in bytes, 0 if there is none.

        Raises:
            RecordsError: the tail cannot be written there.
        """
        if not self._is_torn:
            return 0
        with write_errors(self.torn, RecordsError):
            with self.path.open("rb") as file, self.torn.open("ab") as torn:
                file.seek(self._complete)
                tail = file.read()
                torn.write(tail.rstrip(b"\n") + b"\n")
                torn.flush()
                os.fsync(torn.fileno())
            sync_directory(self.path.parent)
            os.ftruncate(self._file, self._complete)
            os.fsync(self._file)
        self._is_torn = False
        return len(tail)

    def append(self, lines: bytes) -> int:
        """Append one or more complete lines, and return the byte offset of the first.

        Raises:
            RecordsError: the lines cannot be written; the file is then as it was before.
        """
        self.cut()
        before = os.fstat(self._file).st_size
        try:
            with write_errors(self.path, RecordsError):
                rest = memoryview(lines)
                while rest:  # more than once only if the disk is nearly full
                    rest = rest[os.write(self._file, rest) :]
                if now() - self._synced >= self._sync_seconds:
                    self._sync()
        except BaseException as cause:  # includes KeyboardInterrupt: the next line must not join a partial one
            with contextlib.suppress(OSError):
                if isinstance(cause, Exception) or os.fstat(self._file).st_size < before + len(lines):
                    os.ftruncate(self._file, before)
            raise
        return before

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace all lines atomically: readers see the old file or the new one.

        Raises:
            RecordsError: the new file cannot be written.
        """
        self.cut()
        with write_errors(self.path, RecordsError):
            with replace_file(self.path) as file:
                file.writelines(lines)
            old, self._file = self._file, _open_log(self.path)
            os.close(old)

    def close(self) -> None:
        """Flush everything to disk and close the file."""
        with contextlib.suppress(OSError):  # a failed write has already raised
            self._sync()
        os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = now()


def _open_log(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o664)


def complete_size(file: BinaryIO) -> int:
    """Return the length of a log without its torn tail: a last line without its line break, or with zeros.

    A killed process leaves the first, a machine failure either.
    """
    size = file.seek(0, os.SEEK_END)
    block = _TAIL_BYTES
    while True:
        start = max(0, size - block)
        file.seek(start)
        tail = file.read(size - start)
        end = tail.rfind(b"\n") + 1
        last = tail.rfind(b"\n", 0, max(end - 1, 0)) + 1
        if last or not start or block > 2 * LONGEST_LINE:
            break
        block *= 4
    return start + (last if end == len(tail) and b"\0" in tail[last:] else end)


class WriteLock:
    """A lock file that one process at a time holds, from :meth:`acquire` until its end.

    Args:
        path: the lock file, created if necessary and left behind. It names its holder.
        refusal: returns the exception if another process holds the lock, given its name.
    """

    def __init__(self, path: Path, refusal: Callable[[str], PanscanError]) -> None:
        from filelock import FileLock  # takes a twentieth of a second, and few commands lock

        self._path, self._refusal = path, refusal
        self._lock = FileLock(path, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            PanscanError: the refusal; another process holds the lock.
            OSError: the lock file cannot be written.
        """
        from filelock import Timeout

        if not self._path.exists():  # filelock would take some errors of creating it for a lock
            with tempfile.TemporaryFile(dir=self._path.parent):
                pass
        try:
            self._lock.acquire()
        except Timeout as held:
            raise self._refusal(self._holder()) from held
        holder = f"{os.getpid()}\n{socket.gethostname()}\n"
        with contextlib.suppress(OSError):  # a full disk is no reason to refuse
            if not self._path.read_text(errors="replace").startswith(holder):  # as filelock does where flock is missing
                self._path.write_text(holder)

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._lock.release()

    def _holder(self) -> str:
        """Return the name of the process that holds the lock; older versions did not write it."""
        with contextlib.suppress(OSError):
            pid, _, host = self._path.read_text(errors="replace")[:300].partition("\n")
            if pid.isdigit() and (host := host.split("\n")[0]).isprintable() and host:
                return f"another panscan process ({pid} on {host})"
        return "another panscan process"


def cache_directory() -> Path:
    """Return the cache directory: ``PANSCAN_CACHE``, or the user's cache directory. Does not create it."""
    return Path(os.environ.get("PANSCAN_CACHE") or platformdirs.user_cache_path("panscan"))


def fallback_directory() -> Path:
    """Return a fixed temporary directory for this user, used if the cache is not writable.

    Other users of the machine can create files there first, so it must be a directory that only this user can write.

    Raises:
        SettingError: other users can write to the directory, or it cannot be created.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"panscan-{user}"
    fix = "remove it, or set PANSCAN_CACHE to a directory that can be written"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        status = path.lstat()
    except OSError as error:
        raise SettingError(f"{path} cannot be created ({error.strerror}): {fix}") from error
    others = os.name == "posix" and (status.st_uid != user or status.st_mode & 0o077)
    if others or not stat.S_ISDIR(status.st_mode):
        raise SettingError(f"{path} is not a private directory that you own: {fix}")
    return path
