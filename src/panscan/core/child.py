"""Python child processes: start one, exchange messages and open files with it, and say how it ended.

A message is a JSON object, optionally with bytes and open files. Messages from a child that reads untrusted input are
therefore plain data: unlike pickles, they cannot run code in the parent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple, Self

from panscan.core.errors import one_line
from panscan.core.process import now, worker_command

__all__ = ["Child", "ChildEndedError", "Message", "Parent"]

_HEAD = struct.Struct("<IQB")  # bytes of the JSON object, bytes of the payload, number of files
_MOST_JSON = 16 * 2**20
_SEND_SECONDS = 60.0  # for the other side to take a message
_MOST_FILES = 8
_EXIT_SECONDS = 5.0
_TAIL_BYTES = 4096


class Message(NamedTuple):
    """A message: a JSON object, bytes, and file descriptors that the receiver owns."""

    fields: dict[str, Any]
    payload: bytes = b""
    files: tuple[int, ...] = ()


class ChildEndedError(Exception):
    """A child process ended before it replied. The message says how."""


class Child:
    """A process that runs ``main()`` of one of panscan's modules. Not thread-safe.

    It ends when this process ends: ``main()`` uses :class:`Parent`, which notices the closed connection.

    Args:
        module: name of the module.
        environment: the child's environment variables; None: those of this process.
        keep_stderr: keep standard error to quote its last line, instead of sharing this process's.
        most_payload: longest payload of a message from the child, bytes.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,
        keep_stderr: bool = False,
        most_payload: int = 0,
    ) -> None:
        self._stderr = _unnamed_file() if keep_stderr else None
        self._most_payload = most_payload
        self._socket, child_end = socket.socketpair()
        with child_end, ExitStack() as on_failure:
            on_failure.callback(self._close_files)
            self._process = subprocess.Popen(
                # A new session: Ctrl-C in a terminal reaches this process only, which decides what its children do.
                worker_command(module, str(child_end.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if self._stderr is None else self._stderr,
                stderr=self._stderr,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
                env=environment,
            )
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, fields: Mapping[str, Any], payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a message. The files stay open in this process.

        Raises:
            ChildEndedError: the child has ended.
        """
        try:
            _send(self._socket, fields, payload, files)
        except OSError:
            raise ChildEndedError(self.ending()) from None

    def readable(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a message, or for the child's end; return whether there is one."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1e3))

    def receive(self, seconds: float) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: no complete message within ``seconds``.
            ChildEndedError: the child has ended.
        """
        try:
            message = _receive(self._socket, now() + seconds, self._most_payload)
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError):  # a child that was taken over may send anything
            message = None
        if message is None:
            raise ChildEndedError(self.ending())
        return message

    def ending(self) -> str:
        """Return how the process ended; kill it if it has not.

        ``was killed by SIGABRT``, or ``exited with code 1`` followed by its last line on standard error if it was kept.
        """
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        if code < 0:
            with suppress(ValueError):  # a signal without a name
                return f"was killed by {signal.Signals(-code).name}"
        line = self._last_line()
        return f"exited with code {code}" + (f" ({line})" if line else "")

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def close(self, grace: float = 0.0) -> None:
        """Close the connection, which ends the child; kill it if it has not ended after ``grace`` seconds."""
        self._socket.close()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in a driver or a file system: nothing else can be done
                self._process.wait(_EXIT_SECONDS)
        self._close_files()

    def _close_files(self) -> None:
        self._socket.close()
        if self._stderr is not None:
            self._stderr.close()

    def forget(self) -> None:
        """Drop the connection in a forked copy of this process, which does not own the child."""
        self._socket.close()
        self._process.returncode = 0  # else Popen would wait for, and warn about, a process of another parent

    def _last_line(self) -> str:
        if self._stderr is None:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return one_line(lines[-1][-300:]) if lines else ""


class Parent:
    """The connection of a child process to its parent, named by the child's command line."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(sys.argv[1]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent(self) -> None:
        """End this process as soon as the parent has ended, even while the main thread is inside a C library."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._socket, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
            poll.poll()
            os._exit(0)

        threading.Thread(target=watch, name="panscan-parent", daemon=True).start()

    def receive(self) -> Message | None:
        """Return the next message; None once the parent has closed the connection."""
        try:
            return _receive(self._socket, None, sys.maxsize)
        except OSError:
            return None

    def send(self, fields: Mapping[str, Any], payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a message; end this process if the parent has ended."""
        try:
            _send(self._socket, fields, payload, files)
        except OSError:
            os._exit(0)


def _unnamed_file() -> IO[bytes]:
    """Return a new file without a name: in memory on Linux, because the temporary directory may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("panscan-child", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def _send(connection: socket.socket, fields: Mapping[str, Any], payload: bytes, files: Sequence[int]) -> None:
    text = json.dumps(fields).encode()
    head = _HEAD.pack(len(text), len(payload), len(files))
    connection.settimeout(_SEND_SECONDS)
    if files:
        socket.send_fds(connection, [head], files)
    else:
        connection.sendall(head)
    connection.sendall(text)
    if payload:
        connection.sendall(payload)


def _receive(connection: socket.socket, until: float | None, most_payload: int) -> Message | None:
    """Return the next message; None at the end of the connection.

    Raises:
        TimeoutError: the message is not complete at ``until``.
        ValueError: the message is malformed.
        OSError: the connection is broken.
    """
    _limit(connection, until)
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, _MOST_FILES)
    try:
        if not head:
            return None
        head += _exactly(connection, _HEAD.size - len(head), until)
        text, payload, count = _HEAD.unpack(head)
        if text > _MOST_JSON or payload > most_payload or count != len(files):
            raise ValueError("malformed message")
        fields = json.loads(_exactly(connection, text, until))
        if not isinstance(fields, dict):
            raise ValueError("malformed message")
        return Message(fields, bytes(_exactly(connection, payload, until)), tuple(files))
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytearray:
    content = bytearray()
    while len(content) < size:
        _limit(connection, until)
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            raise ConnectionError("the connection ended within a message")
        content += part
    return content


def _limit(connection: socket.socket, until: float | None) -> None:
    if until is not None and until <= now():
        raise TimeoutError
    connection.settimeout(None if until is None else until - now())
