"""A subprocess of the load generator: receives a share of a level, sends it, and reports the outcomes.

    python -m panscan.load.workers CONNECTION_FD

It exits when the connection closes, so that nothing keeps running if its parent is killed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from panscan.core.process import join_time_line, time_line
from panscan.load.chat import ChatRequest
from panscan.load.sender import LevelShare, Outcomes, Sender, prepared_process

__all__ = ["CANCEL", "HEARTBEAT", "frame", "main", "read_frame", "share_frames"]

HEARTBEAT = 1.0
"""Longest silence of a subprocess, in seconds."""
CANCEL = "cancel"
"""Message to a subprocess: drop the open requests and end."""

_SMALL_SEGMENT = 64 * 1024  # bytes
_LENGTH = struct.Struct("!Q")


# Messages between a subprocess and its parent: pickles and raw bytes, each after its length


def frame(message: Any) -> bytes:
    """Return a message with its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: the connection is closed.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def share_frames(share: LevelShare) -> Iterator[bytes]:
    """Yield the messages that transfer a share: a description, then each segment of the bodies once."""
    numbers: dict[int, int] = {}  # by identity: equal images are the same object
    segments: list[bytes] = []
    requests = []
    for request in share.requests:
        for segment in request.body:
            if id(segment) not in numbers:
                numbers[id(segment)] = len(segments)
                segments.append(segment)
        requests.append((request.id, request.max_tokens, [numbers[id(segment)] for segment in request.body]))
    yield frame((time_line(), share.endpoint, share.arrivals, share.max_concurrency, requests, len(segments)))
    small = bytearray()  # segments that are sent together
    for segment in segments:
        small += _LENGTH.pack(len(segment))
        if len(segment) < _SMALL_SEGMENT:
            small += segment
        if len(segment) >= _SMALL_SEGMENT or len(small) >= _SMALL_SEGMENT:
            yield bytes(small)
            small.clear()
        if len(segment) >= _SMALL_SEGMENT:
            yield segment
    yield bytes(small)


def _read_share(stream: BinaryIO) -> LevelShare:
    """Return the share that the parent sends, and join its time line.

    Raises:
        EOFError: the connection is closed.
    """
    origin, endpoint, arrivals, max_concurrency, requests, count = pickle.loads(_read_bytes(stream))
    join_time_line(origin)
    segments = [_read_bytes(stream) for _ in range(count)]
    built = [ChatRequest(id, tuple(segments[each] for each in body), most) for id, most, body in requests]
    return LevelShare(endpoint, built, arrivals, max_concurrency)


def _read_bytes(stream: BinaryIO) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


class _Child:
    """The subprocess's side of the connection."""

    def __init__(self, connection: socket.socket, share: LevelShare) -> None:
        self._connection, self._share = connection, share
        self._cancelled = False
        self._sent = time.monotonic()

    async def run(self) -> None:
        """Send the share once the parent names the start; report the outcomes."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._writer.write(frame("ready"))
        start = await read_frame(reader)
        listening = asyncio.create_task(self._listen(reader))
        load = await Sender(self._share, self._report, lambda: self._cancelled).run(start)
        self._writer.write(frame(load))
        await self._writer.drain()
        await listening  # until the parent closes the connection

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._cancelled = await read_frame(reader) == CANCEL
        except (asyncio.IncompleteReadError, OSError):
            os._exit(0)  # the parent has everything, or is gone

    def _report(self, batch: Outcomes) -> None:
        if batch or time.monotonic() - self._sent >= HEARTBEAT:
            self._sent = time.monotonic()
            self._writer.write(frame(batch))


def main() -> None:
    """Run a subprocess."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        with connection.makefile("rb") as stream:
            share = _read_share(stream)
        with prepared_process(share.max_concurrency or len(share.requests)):
            asyncio.run(_Child(connection, share).run())
    except (EOFError, OSError, asyncio.IncompleteReadError):  # the parent is gone
        sys.exit(1)


if __name__ == "__main__":
    main()
