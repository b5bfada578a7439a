"""HTTP/1.1 client for load tests: keep-alive connections, bodies in segments, deadlines, time stamps at receipt.

Built on :class:`asyncio.Protocol`, because a task per event would limit the load that one process can generate.
Proxies, redirects, compression and HTTP/2 are not supported: each would change what is measured.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import httptools

from panscan.core import now

ErrorKind = Literal["connect", "timeout", "http", "protocol", "stream", "usage", "client"]
"""Why a request failed.

``connect``: no connection. ``timeout``: no complete response within the timeout. ``http``: an HTTP error status.
``protocol``: the response is not what the API promises. ``stream``: the response broke off or has a malformed or error
event. ``client``: the load generator could not send it. ``usage`` is not a failure: the response has no token counts.
"""

Segments = tuple[bytes, ...]
"""A request's body in parts, which requests may share."""

_CONNECT_SECONDS = 30.0
_IDLE_SECONDS = 4.0  # uvicorn and Node.js close idle connections after 5 s
_GRACE_SECONDS = 0.5  # from the last event of a response to the end of its body
_SMALL_BODY = 64 * 1024  # bytes; sent with the head in one write
_PIECE = 256 * 1024  # bytes of a large body that are written before the transport may pause
_MOST_HEAD = 256 * 1024  # bytes
_MOST_BODY = 64 * 1024 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server.

    Args:
        host: host name or IP address.
        port: TCP port.
        tls: whether connections use TLS.
    """

    host: str
    port: int
    tls: bool


class ResponseHandler(Protocol):
    """Receives one response. Times are seconds of :func:`panscan.core.now`. Its methods do not raise."""

    @property
    def complete(self) -> bool:
        """Whether the response has all that is needed, although its body may not have ended."""
        ...

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the status and the headers (lower-case names)."""
        ...

    def on_data(self, data: bytes, at: float) -> None:
        """Take a part of the body."""
        ...

    def on_end(self, at: float) -> None:
        """Take the end of the body. No further calls."""
        ...

    def on_failure(self, kind: ErrorKind, message: str, at: float) -> None:
        """Take a failure. No further calls."""
        ...


class ConnectionPool:
    """Keep-alive connections to one server. Opens a connection for each request that finds none idle.

    The host name is resolved once, and later connections use the address that worked first.

    Args:
        server: address of the server.

    Attributes:
        idle: connections that can send another request.
        connections: all connections.
    """

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._tls = ssl.create_default_context() if server.tls else None
        self._addresses: list[str] = []
        self._resolving = asyncio.Lock()
        self.idle: list[_Connection] = []
        self.connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, head: bytes, body: Segments, handler: ResponseHandler, timeout: float) -> None:
        """Send a request. The handler receives the response or the failure, at the latest after the timeout.

        Args:
            head: request line and headers, with the empty line.
            body: segments of the body; shared between requests, never copied as a whole.
            handler: receiver of the response.
            timeout: seconds until the end of the response, including those for a new connection.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        fresh = loop.time() - _IDLE_SECONDS
        while self.idle:
            connection = self.idle.pop()
            if connection.usable and connection.idle_since >= fresh:
                connection.send(head, body, handler, deadline)
                return
            connection.close()
        seconds = min(_CONNECT_SECONDS, timeout)
        task = loop.create_task(self._connect_and_send(head, body, handler, deadline, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections. Handlers of open requests are not called any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)  # the transports close in the next iteration

    async def _connect_and_send(
        self, head: bytes, body: Segments, handler: ResponseHandler, deadline: float, seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                connection = await self._connect()
        except TimeoutError:
            handler.on_failure("connect", f"no connection within {seconds:g} s", now())
        except UnicodeError:  # such as an empty label
            handler.on_failure("connect", f"{self._server.host} is not a host name", now())
        except OSError as error:
            kind, message = _connect_failure(error, self._server)
            handler.on_failure(kind, message, now())
        else:
            if connection.usable:
                connection.send(head, body, handler, deadline)
            else:
                handler.on_failure("connect", "the endpoint closed the new connection", now())

    async def _connect(self) -> _Connection:
        """Return a new connection.

        Raises:
            OSError: no address accepts a connection, or the TLS handshake failed.
        """
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        async with self._resolving:
            if not self._addresses:
                server = self._server
                infos = await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
                self._addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        for address in list(self._addresses):
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    address,
                    self._server.port,
                    ssl=self._tls,
                    server_hostname=self._server.host if self._tls else None,
                )
            except OSError as error:
                failure = error
            else:
                if self._addresses[0] != address:
                    self._addresses.remove(address)
                    self._addresses.insert(0, address)
                return connection
        raise failure or OSError(errno.EHOSTUNREACH, "the host has no address")


class _Connection(asyncio.Protocol):
    """One connection; sends one request at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._handler: ResponseHandler | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: Iterator[memoryview] | None = None
        self._paused = False
        self._begin()
        self.idle_since = 0.0

    def _begin(self) -> None:
        """Reset what is known of the current response."""
        self._headers: dict[str, str] = {}
        self._status = 0  # of the final response: 0 until its head is complete
        self._received = 0  # bytes of the head, then of what follows it, with the framing of chunks and trailers
        self._message_ended = self._keep_alive = False
        self._draining = False
        self._at = 0.0

    # Requests

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: Segments, handler: ResponseHandler, deadline: float) -> None:
        """Send a request; see :meth:`ConnectionPool.send`. ``deadline``: in the event loop's time."""
        assert self._transport is not None  # connected
        self._begin()
        self._handler = handler
        self._timer = self._loop.call_at(deadline, self._expire)
        if sum(map(len, body)) <= _SMALL_BODY:
            self._transport.write(b"".join((head, *body)))
        else:
            self._unsent = _pieces(head, body)
            self._write()

    def _write(self) -> None:
        assert self._transport is not None  # connected
        while self._unsent is not None and not self._paused:
            piece = next(self._unsent, None)
            if piece is None:
                self._unsent = None
            else:
                self._transport.write(piece)

    def close(self) -> None:
        """Close the connection; its handler is not called."""
        self._handler = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def data_received(self, data: bytes) -> None:
        self._at = now()
        if self._handler is None:  # a response without a request
            self.close()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("protocol", "the endpoint switched to another protocol")
        except httptools.HttpParserError:
            if self._message_ended or (self._handler is not None and self._handler.complete):
                self._finish(reusable=False)  # what follows the answer is not its fault
                return
            is_tls = data[:2] in (b"\x15\x03", b"\x16\x03")
            no_http = "the endpoint speaks TLS: use https:// in its URL" if is_tls else "the response is not HTTP"
            self._fail("protocol", "the response is not valid HTTP" if self._status else no_http)
            return
        # Continue, or end the exchange, unless the parser's callbacks have ended it.
        handler = self._handler
        if handler is None:
            return
        if self._message_ended:
            self._finish(reusable=self._unsent is None and self._keep_alive)
        elif self._received > (_MOST_BODY if self._status else _MOST_HEAD):
            self._fail("protocol", "the response is too long")
        elif handler.complete and not self._draining:
            self._draining = True
            assert self._timer is not None  # set by send()
            self._timer.cancel()
            self._timer = self._loop.call_later(_GRACE_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connections.discard(self)
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        handler = self._handler
        if handler is None:
            return
        self._at = now()
        until_close = not {"content-length", "transfer-encoding"} & self._headers.keys()
        if handler.complete or (self._status and until_close and exc is None):
            self._finish(reusable=False)
        elif self._status:
            how = "was reset" if isinstance(exc, ConnectionError) else "was closed"
            self._fail("stream", f"the connection {how} during the response")
        else:
            how = "reset" if isinstance(exc, ConnectionError) else "closed"
            self._fail("protocol", f"the endpoint {how} the connection without a response")

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:  # trailers
            return
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response
            self._headers.clear()
            return
        self._status, self._received = status, 0
        if self._handler is not None:
            self._handler.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.on_data(data, self._at)

    def on_message_complete(self) -> None:
        self._message_ended = bool(self._status)
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it afterwards

    # Ends of an exchange

    def _finish(self, *, reusable: bool) -> None:
        handler = self._release()
        if reusable:
            self.idle_since = self._loop.time()
            self._pool.idle.append(self)
        else:
            self.close()
        handler.on_end(self._at)

    def _fail(self, kind: ErrorKind, message: str) -> None:
        handler = self._release()
        self.close()
        handler.on_failure(kind, message, self._at)

    def _release(self) -> ResponseHandler:
        handler, self._handler = self._handler, None
        self._unsent = None
        assert handler is not None and self._timer is not None  # only called during an exchange
        self._timer.cancel()
        return handler

    def _expire(self) -> None:
        if self._handler is None:
            return
        self._at = now()
        if self._handler.complete:  # the body did not end, but everything needed has arrived
            self._finish(reusable=False)
        elif not self._status:
            self._fail("timeout", "no response within the timeout")
        else:
            self._fail("timeout", "the response did not end within the timeout")


def _pieces(head: bytes, body: Segments) -> Iterator[memoryview]:
    """Yield a request in pieces that the transport may buffer."""
    yield memoryview(head)
    for segment in body:
        view = memoryview(segment)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


def _connect_failure(error: OSError, server: ServerAddress) -> tuple[ErrorKind, str]:
    """Return the kind and the message of a connection that could not be opened."""
    match error:
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            return "client", "too many open files: raise the limit (ulimit -n) or lower the request rate"
        case OSError(errno=errno.EADDRNOTAVAIL):
            return "client", "no free local port: lower the request rate or use --max-concurrency"
        case socket.gaierror():
            message = f"the host name {server.host} cannot be resolved"
        case ssl.SSLCertVerificationError():
            message = f"the TLS certificate is not valid: {error.verify_message}"
        case ssl.SSLError():
            message = f"the TLS handshake failed ({error.reason}): check https:// in the URL"
        case ConnectionRefusedError():
            message = "connection refused"
        case ConnectionResetError():
            message = "connection reset while connecting"
        case _:
            message = error.strerror or type(error).__name__
    return "connect", message
