"""The HTTP server: uvicorn in front of any client of engines, with a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from panscan.core.activity import activity
from panscan.core.sampling import REST_OF_CONTEXT
from panscan.images.pool import decode_in_children
from panscan.serve.admission import race
from panscan.serve.app import create_app
from panscan.serve.client import EngineClient
from panscan.serve.options import ServeOptions

log = logging.getLogger("panscan.serve")

_KEEP_ALIVE = 30  # seconds that an idle connection stays open
_BACKLOG = 2048  # connections that wait to be accepted
_CHECK_SECONDS = 30  # headers may take one to two of these periods, and a client may stop reading for two to three
_GRACE = 5.0  # seconds from the end of the last request to the end of its connection
_ABORT_SECONDS = 2.0  # for requests whose connection was closed
_POLL_SECONDS = 0.05
_SWITCH_SECONDS = 0.001  # that a thread may hold Python's lock while the event loop waits for it
_WARNING_SECONDS = 60.0  # between two warnings about the number of connections
_FEWEST_CONNECTIONS = 16
_RESERVE = 192  # descriptors for the engine, documents, downloads and modules
_LONG_ANSWERS = (
    "answers without max_tokens may fill the context of %s tokens: requests are admitted by their prompts,"
    " and the newest wait again while the KV cache is full (--max-new-tokens limits all answers)"
)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def run_server(
    options: ServeOptions, on_ready: Callable[[str], None], client: AbstractContextManager[EngineClient]
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit code.

    The first signal drains: new requests are refused, running ones finish within the drain timeout. A second signal
    ends them with an error.

    Args:
        options: server options.
        on_ready: called with the server's URL once a request can be answered.
        client: yields the client of the engines, once the port is bound.

    Raises:
        SettingError: the address cannot be bound.
        PanscanError: the model cannot be loaded.
        EngineError: no engine can be reached any more.
    """
    decode_in_children()
    with options.bound_socket() as listener, client as engines:
        gc.collect()
        gc.freeze()  # a full collection of PyTorch and Ray's half a million objects stops all streams for 0.25 s
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(_serve(options, on_ready, listener, engines))


class _Connections:
    """The open connections of a server, and those among them that wait for a request, longest first.

    Args:
        most: maximum number of connections.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.state = ServerState()
        self._idle: dict[_Connection, None] = {}
        self._warned = -math.inf

    @property
    def full(self) -> bool:
        """Whether no other connection may be accepted."""
        return len(self.state.connections) >= self.most

    def set_idle(self, connection: _Connection, idle: bool) -> None:
        """Record that a connection waits for a request, or no longer does."""
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = None

    def close_idle(self) -> bool:
        """Close the connection that has been idle for the longest time; return False if there is none."""
        connection = next(iter(self._idle), None)
        if connection is None:
            return False
        self.set_idle(connection, False)
        connection.transport.abort()
        return True

    def warn(self, reason: str) -> None:
        """Log, at most once a minute, that connections are closed or have to wait."""
        if (time := asyncio.get_running_loop().time()) - self._warned >= _WARNING_SECONDS:
            self._warned = time
            log.warning("%s: closing idle connections, %d are open", reason, len(self.state.connections))


class _HttpServer(uvicorn.Server):
    """Uvicorn with an accept loop that pauses at the limit of connections, and with a shutdown that ends in time.

    Args:
        config: uvicorn's configuration.
        listener: listening socket.
        connections: open connections.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, connections: _Connections) -> None:
        super().__init__(config)
        self._listener, self._connections = listener, connections
        self.server_state = connections.state

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to :func:`_serve`: uvicorn would re-raise them and exit with a nonzero code."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, let responses end, and then close the remaining connections."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        if not await self._closed(_GRACE):
            for connection in list(state.connections):
                connection.transport.abort()
            if not await self._closed(_ABORT_SECONDS):
                log.warning("%d requests did not end", len(state.tasks))

    async def _closed(self, seconds: float) -> bool:
        """Return whether all connections and requests end in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.server_state.connections or self.server_state.tasks:
            if loop.time() > end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        open_connection = partial(_Connection, self.config, self._connections)
        while True:
            await self._wait_for_room()
            try:
                connection, _ = await loop.sock_accept(self._listener)
                await loop.connect_accepted_socket(open_connection, connection)
            except OSError as error:  # the client has left, or descriptors or memory are used up
                if error.errno in _EXHAUSTED:
                    self._connections.warn(f"connections cannot be accepted ({error.strerror})")
                    self._connections.close_idle()
                    await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_room(self) -> None:
        """Wait until another connection may be accepted; close idle ones once a client waits for it."""
        if self._connections.full:
            loop = asyncio.get_running_loop()
            readable = asyncio.Event()
            loop.add_reader(self._listener, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._listener)
        while self._connections.full:
            self._connections.warn("the limit of open files is reached (ulimit -n)")
            await asyncio.sleep(0 if self._connections.close_idle() else _POLL_SECONDS)


class _Connection(H11Protocol):
    """An HTTP/1.1 connection with deadlines for request headers and for clients that stop reading.

    h11 bounds the size of headers. It also reads the body of a request that offers HTTP/2, as Java's client does;
    httptools, which is faster, does not. Without a deadline, a closing connection stays open until its last byte is
    read.

    Args:
        config: uvicorn's configuration.
        connections: open connections of the server.
    """

    def __init__(self, config: uvicorn.Config, connections: _Connections) -> None:
        super().__init__(config, connections.state, app_state={})
        self._all = connections
        self._unread = 0  # bytes that the client had not read at the last check, unless it has caught up since
        self._stalled = False  # whether it read none of them in the period before
        self._waited = False  # whether there was no request at the last check, and none since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing() as soon as the client falls behind
        self._all.set_idle(self, True)
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._waited = False
            self._all.set_idle(self, self._idle())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._idle() and not self.transport.is_closing():
            self._all.set_idle(self, True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.set_idle(self, False)
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._unread = 0
        super().resume_writing()

    def _check(self) -> None:
        """End a connection without a complete request since the last check, or whose client read nothing since two."""
        unread = self.transport.get_write_buffer_size()
        stalled = unread > 0 and unread == self._unread
        if stalled and self._stalled:
            self.transport.abort()
            return
        idle = self._idle()
        if idle and self._waited:
            self.transport.close()
        self._unread, self._stalled, self._waited = unread, stalled, idle
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check)

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


async def _serve(
    options: ServeOptions, on_ready: Callable[[str], None], listener: socket.socket, client: EngineClient
) -> int:
    """Load, serve, drain; see :func:`run_server`."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    listener.listen(_BACKLOG)
    app = create_app(options, client)
    server = _http_server(app, listener)
    first_signal, second_signal = _caught_signals()
    serving = asyncio.ensure_future(server.serve())
    try:
        with activity(f"loading {options.settings.model_name}"):
            loaded, _ = await race(client.start(), first_signal.wait())
        if loaded is not None:  # otherwise, a signal arrived first
            loaded.result()
            if options.settings.max_new_tokens >= REST_OF_CONTEXT and client.info is not None:
                log.info(_LONG_ANSWERS, f"{client.info.max_model_len:,}")
            on_ready(options.url(listener.getsockname()[1]))
            failed, _ = await race(client.watch(), first_signal.wait())
            if failed is not None:
                failed.result()
            log.info("finishing running requests; a second signal cancels them")
            drained, _ = await race(app.state.admission.drain(), second_signal.wait())
            if drained is not None and not drained.result():
                log.warning("requests were still running after %g s (--drain-timeout)", options.drain_timeout)
    finally:
        app.state.admission.close()
        server.should_exit = True
        await client.close()
        await serving
    return 0


def _http_server(app: ASGIApp, listener: socket.socket) -> _HttpServer:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,  # no warning of each malformed request and each offer of HTTP/2
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE,
        server_header=False,
    )
    return _HttpServer(config, listener, _Connections(_most_connections()))


def _caught_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return events that the first and the second signal set."""
    first, second = asyncio.Event(), asyncio.Event()

    def take() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(number, take)
    return first, second


def _most_connections() -> float:
    """Raise the limit of open files to its maximum, and return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system has another maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    return max(_FEWEST_CONNECTIONS, soft - _RESERVE)
