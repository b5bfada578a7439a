"""Python child processes: start one, exchange messages with it, say how it ended, and end it.

:class:`Child` and :class:`Parent` exchange pickled objects. A child that reads untrusted input is a :class:`JsonChild`,
and its side a :class:`JsonParent`: they exchange JSON objects and open files, which cannot run code in the parent.

Every child ends with its parent, uses its time line, and ignores Ctrl-C, which is for the parent to handle.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, Self

from panscan.core.errors import one_line
from panscan.core.process import from_perf_counter, join_time_line, now, worker_command

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<QB")  # bytes of the JSON object, number of files
_MOST_JSON = 16 * 2**20
_SEND_SECONDS = 60.0  # for the other side to take a JSON message
_MOST_FILES = 8
_EXIT_SECONDS = 10.0  # from SIGKILL to the end of a process, which may have to release a GPU
_PARENT_MILLISECONDS = 2000  # between two checks that the parent runs
_TAIL_BYTES = 4096
_MOST_OUTPUT = 2**20  # bytes of a child's output that are kept
_BUFFER_BYTES = 2**16


class ChildEndedError(Exception):
    """A child process has ended. The message says how."""


class _ChildProcess:
    """A process that runs ``main()`` of one of panscan's modules, in a new session, and sockets to it.

    Args:
        module: name of the module.
        environment: the child's environment variables; None: those of this process.
        keep_output: keep what the child prints, to quote its last line, instead of sharing this process's standard
            error.
        channels: number of sockets.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,
        keep_output: bool = False,
        channels: int = 1,
    ) -> None:
        self._output = os.fdopen(unnamed_file(append=True), "w+b") if keep_output else None
        self._killing, self._killed, self._ended_by_kill = threading.Lock(), False, False
        self._listener: threading.Thread | None = None
        pairs = [socket.socketpair() for _ in range(channels)]
        self._sockets = [parent_end for parent_end, _ in pairs]
        self._sending = [threading.Lock() for _ in pairs]
        descriptors = [child_end.fileno() for _, child_end in pairs]
        try:
            self._process = subprocess.Popen(
                worker_command(module, str(os.getpid()), repr(from_perf_counter(0)), *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                stdout=self._output or sys.stderr,
                stderr=self._output,
                pass_fds=descriptors,
                start_new_session=True,  # so that kill() also ends what the child has started
                env=environment,
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            for _, child_end in pairs:
                child_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def ending(self) -> str:
        """Return how the process ended, as the end of a sentence; kill it if it has not ended.

        ``was killed by SIGABRT`` or ``exited with code 1``, followed by its last line of output.
        """
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                code = self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:  # stuck in a driver or a file system
                return "was killed, but has not ended"
        if code == -signal.SIGKILL and self._ended_by_kill:
            return "was killed by panscan"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        names = {number.value: number.name for number in signal.Signals}
        text = f"was killed by {names.get(-code, -code)}" if code < 0 else f"exited with code {code}"
        if self._output is None:
            return f"{text}; its output is above"
        lines = self._output_tail()[1].decode("utf-8", "replace").strip().splitlines()
        return one_line(f"{text}: {' '.join(lines[-1].split())[-300:]}") if lines else text

    def kill(self) -> None:
        """Kill the process, and the processes that it started in its session."""
        with self._killing:
            if not self._killed:  # a second time, the number may belong to another process
                self._killed, self._ended_by_kill = True, self._process.poll() is None
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, grace: float = 0.0) -> None:
        """Close the connection, which ends the child; kill it if it has not ended after ``grace`` seconds."""
        for connection in self._sockets:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)  # also ends waits of other threads
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in a driver or a file system: nothing else can be done
            self._process.wait(_EXIT_SECONDS)
        self._close_files()

    def forget(self) -> None:
        """Drop the connection in a forked copy of this process, which does not own the child."""
        self._close_files()
        self._process.returncode = 0  # else Popen would wait for, and warn about, a process of another parent

    def _close_files(self) -> None:
        for connection in self._sockets:
            connection.close()
        if self._output is not None:
            self._output.close()

    def _limit_output(self) -> None:
        """Drop all but the end of the kept output, which a long-lived child would fill the memory with."""
        size, tail = self._output_tail()
        if size > _MOST_OUTPUT and self._output is not None:
            os.ftruncate(self._output.fileno(), 0)
            os.write(self._output.fileno(), tail)  # at the end: the file is opened to append

    def _output_tail(self) -> tuple[int, bytes]:
        """Return the size of the kept output, and its end; nothing if it is not kept, or closed."""
        if self._output is None or self._output.closed:
            return 0, b""
        size = os.fstat(self._output.fileno()).st_size
        return size, os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))


class Child(_ChildProcess):
    """A child process that exchanges pickled objects with this one. Thread-safe. For children that are trusted only.

    Arguments: see :class:`_ChildProcess`. With several channels, a long message on one delays no message on another;
    answers arrive on the first.
    """

    def send(self, message: object, channel: int = 0) -> None:
        """Send an object.

        Raises:
            ChildEndedError: the child has ended.
        """
        self._write(lambda connection: _send_object(connection, message), channel)

    def send_if_alive(self, message: object) -> None:
        """Send an object. If the child has ended, or the object cannot be sent, :meth:`listen` reports the end."""
        try:
            self.send(message)
        except ChildEndedError:
            pass
        except Exception:
            log.exception("a message to process %d could not be sent", self.pid)

    def send_pickled(self, message: bytes) -> None:
        """Send an object that is pickled already, for example because several children receive it; see :meth:`send`."""
        self._write(lambda connection: connection.sendall(message), 0)

    def listen(self, on_message: Callable[[Any], None]) -> None:
        """Call a function with each message, in a new thread, and with None once the connection has ended."""
        self._listener = threading.Thread(target=self._listen, args=(on_message,), name="panscan-listen", daemon=True)
        self._listener.start()

    def listen_into(self, inbox: Inbox) -> None:
        """Put each message into a queue, as :meth:`listen` calls a function."""
        self.listen(lambda message: inbox.put((self, message)))

    def close(self, grace: float = 0.0) -> None:
        """See the base class; also waits for the listening thread."""
        super().close(grace)
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join(_EXIT_SECONDS)

    def _write(self, write: Callable[[socket.socket], None], channel: int) -> None:
        try:
            with self._sending[channel]:
                write(self._sockets[channel])
        except OSError:
            raise ChildEndedError(self.ending()) from None
        except BaseException:  # a part of a message was sent: the child would read nonsense from here on
            self.kill()
            raise

    def _listen(self, on_message: Callable[[Any], None]) -> None:
        try:
            with self._sockets[0].makefile("rb", _BUFFER_BYTES) as stream:
                while (message := _next_object(stream)) is not None:
                    on_message(message)
                    self._limit_output()
        finally:
            on_message(None)


Inbox = queue.SimpleQueue[tuple[Child, Any]]
"""Children with their messages, or with None once their connection has ended."""


class JsonChild(_ChildProcess):
    """A child process that exchanges JSON objects and open files with this one. Not thread-safe.

    Arguments: see :class:`_ChildProcess`.
    """

    def send(self, fields: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. The files stay open in this process.

        Raises:
            ChildEndedError: the child has ended.
        """
        try:
            _send_json(self._sockets[0], fields, files)
        except OSError:
            raise ChildEndedError(self.ending()) from None

    def readable(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a message, or for the child's end; return whether there is one."""
        poll = select.poll()
        poll.register(self._sockets[0], select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1e3))

    def receive(self, seconds: float) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: no complete message within ``seconds``.
            ChildEndedError: the child has ended.
        """
        try:
            return _receive_json(self._sockets[0], now() + seconds)
        except TimeoutError:
            raise
        except OSError:
            pass
        except (ValueError, RecursionError):  # a child that was taken over may send anything, and stay
            self.kill()
        raise ChildEndedError(self.ending())


class Message(NamedTuple):
    """A message of a :class:`JsonChild` or its parent: a JSON object, and file descriptors that the receiver owns."""

    fields: dict[str, Any]
    files: tuple[int, ...] = ()


class _ParentConnection:
    """The sockets of a child process to its parent, named by the child's command line.

    The process ends as soon as the parent has closed them or has ended, even while it is inside a C library.
    """

    def __init__(self) -> None:
        parent, origin, *descriptors = sys.argv[1:]
        self._parent = int(parent)  # not getppid(): it may have ended already
        join_time_line(float(origin))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._sockets = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
        for connection in self._sockets:  # else what this process starts would keep the connection open
            connection.set_inheritable(False)
        threading.Thread(target=self._end_with_parent, name="panscan-parent", daemon=True).start()

    def _end_with_parent(self) -> None:
        poll = select.poll()
        poll.register(self._sockets[0], getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        # A forked copy of the parent may keep the connection open.
        while not poll.poll(_PARENT_MILLISECONDS) and os.getppid() == self._parent:
            pass
        _exit_child()


class Parent(_ParentConnection):
    """A child's connection to its parent, which exchanges pickled objects. One thread may receive from each channel."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = [connection.makefile("rb", _BUFFER_BYTES) for connection in self._sockets]
        self._sending = threading.Lock()

    def receive(self, channel: int = 0) -> Any:
        """Return the next object; end this process if the parent has ended."""
        message = _next_object(self._streams[channel])
        if message is None:
            _exit_child()
        return message

    def send(self, message: object) -> None:
        """Send an object; end this process if the parent has ended. Thread-safe."""
        try:
            with self._sending:
                _send_object(self._sockets[0], message)
        except OSError:
            _exit_child()


class JsonParent(_ParentConnection):
    """A child's connection to its parent, which exchanges JSON objects and open files."""

    def receive(self) -> Message:
        """Return the next message; end this process if the parent has ended."""
        try:
            return _receive_json(self._sockets[0], None)
        except OSError:
            _exit_child()

    def send(self, fields: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message; end this process if the parent has ended."""
        try:
            _send_json(self._sockets[0], fields, files)
        except OSError:
            _exit_child()


def _exit_child() -> NoReturn:
    """End a child process at once: its threads may be inside a library that never returns."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


def unnamed_file(*, append: bool = False) -> int:
    """Return a descriptor of a new file without a name: in memory on Linux, so that it never reaches the disk.

    Args:
        append: whether each write goes to its end.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("panscan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    if append:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def _send_object(connection: socket.socket, message: object) -> None:
    """Pickle an object to a socket. Long buffers and bytes are written without a copy."""
    pickle.Pickler(SimpleNamespace(write=connection.sendall), pickle.HIGHEST_PROTOCOL).dump(message)


def _next_object(stream: Any) -> Any:
    """Return the next object of a binary stream; None at its end, wherever it was cut off."""
    try:
        return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


def _send_json(connection: socket.socket, fields: Mapping[str, Any], files: Sequence[int]) -> None:
    text = json.dumps(fields).encode()
    head = _HEAD.pack(len(text), len(files))
    connection.settimeout(_SEND_SECONDS)
    if files:
        socket.send_fds(connection, [head], files)
    else:
        connection.sendall(head)
    connection.sendall(text)


def _receive_json(connection: socket.socket, until: float | None) -> Message:
    """Return the next message.

    Raises:
        TimeoutError: the message is not complete at ``until``.
        ValueError: the message is malformed.
        OSError: the connection has ended.
    """
    _limit_wait(connection, until)
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, _MOST_FILES)
    try:
        head += _exactly(connection, _HEAD.size - len(head), until)
        size, count = _HEAD.unpack(head)
        if size > _MOST_JSON or count != len(files):
            raise ValueError("malformed message")
        fields = json.loads(_exactly(connection, size, until))
        if not isinstance(fields, dict):
            raise ValueError("malformed message")
        return Message(fields, tuple(files))
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytearray:
    content = bytearray()
    while len(content) < size:
        _limit_wait(connection, until)
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            raise ConnectionError("the connection has ended")
        content += part
    return content


def _limit_wait(connection: socket.socket, until: float | None) -> None:
    if until is not None and until <= now():
        raise TimeoutError
    connection.settimeout(None if until is None else until - now())
