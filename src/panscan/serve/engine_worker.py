"""The engine process: loads the model and answers messages of the HTTP server's process.

Its command line has the file descriptor of the connection. It exits when the connection closes, so that nothing keeps
running if the server is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from panscan.core import EngineError, PanscanError, Result, TokenEvent, now
from panscan.core.process import join_time_line
from panscan.images.pool import decode_in_children
from panscan.serve.loaded_model import LoadedModel, open_model
from panscan.serve.messages import (
    AskQuery,
    Cancel,
    CountTokens,
    Ended,
    EngineReady,
    Events,
    LoadFailed,
    Open,
    Query,
    QueryAnswer,
    ReadStats,
    Submit,
    TokenTexts,
)

__all__ = ["main"]

_HELPERS = 2  # threads for queries: token counts and token texts


class _Worker:
    """A worker that reads messages on the main thread and sends them in batches from another thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._registering = threading.RLock()
        self._cancels: dict[str, Callable[[], None]] = {}
        self._pool = ThreadPoolExecutor(_HELPERS, "panscan-query")
        self._stats = ThreadPoolExecutor(1, "panscan-stats")

    def run(self) -> None:
        """Serve until the connection closes."""
        threading.Thread(target=self._send, name="panscan-send", daemon=True).start()
        opening = pickle.loads(self._connection.recv_bytes())
        assert isinstance(opening, Open)  # the server sends it first
        join_time_line(opening.time_line)
        decode_in_children()
        try:
            model = open_model(opening.settings)
        except PanscanError as error:
            self._outgoing.put(LoadFailed(error))
        else:
            self._outgoing.put(EngineReady(model.info, os.getpid()))
            self._serve(model)
        self._connection.recv_bytes()  # until the server closes the connection

    def _serve(self, model: LoadedModel) -> None:
        while True:
            message = pickle.loads(self._connection.recv_bytes())
            match message:
                case Submit():
                    self._submit(model, message)
                case Cancel():
                    if (cancel := self._cancels.get(message.id)) is not None:
                        cancel()
                case AskQuery():
                    # Statistics wait for the engine's current step, and must not delay other queries.
                    pool = self._stats if isinstance(message.query, ReadStats) else self._pool
                    pool.submit(partial(self._answer, model, message))
                case _:
                    raise TypeError(f"unknown message {type(message).__name__}")

    def _submit(self, model: LoadedModel, submit: Submit) -> None:
        id = submit.request.id
        on_event = partial(self._on_event, id) if submit.stream else None
        with self._registering:  # a request may end before start() returns
            try:
                self._cancels[id] = model.start(submit.request, on_event, partial(self._on_end, id))
            except EngineError as error:
                self._outgoing.put(Ended(id, Result.unanswered(id, now(), error)))

    def _on_event(self, id: str, event: TokenEvent) -> None:
        self._outgoing.put((id, event))

    def _on_end(self, id: str, result: Result) -> None:
        if isinstance(result.error, EngineError):  # later requests would fail too: the server restarts the process
            sys.stderr.write(f"the engine has failed: {result.error}\n")
            sys.stderr.flush()
            os._exit(1)
        self._outgoing.put(Ended(id, result))
        with self._registering:
            self._cancels.pop(id, None)

    def _answer(self, model: LoadedModel, ask: AskQuery) -> None:
        try:
            self._outgoing.put(QueryAnswer(ask.number, _answer_to(model, ask.query)))
        except PanscanError as error:
            self._outgoing.put(QueryAnswer(ask.number, error))
        except Exception as error:  # an image decoder may raise anything; only this query fails
            self._outgoing.put(QueryAnswer(ask.number, PanscanError(f"{type(error).__name__}: {error}")))

    def _send(self) -> None:
        """Send queued messages; those that are waiting go out as one batch."""
        with suppress(OSError):  # the server has exited, which ends the main thread too
            while True:
                batch = [self._outgoing.get()]
                with suppress(queue.Empty):
                    while True:
                        batch.append(self._outgoing.get_nowait())
                self._connection.send_bytes(pickle.dumps(_packed(batch), pickle.HIGHEST_PROTOCOL))


def _packed(batch: list[Any]) -> list[Any]:
    """Return messages in order, with consecutive events merged into one message."""
    packed: list[Any] = []
    for message in batch:
        if not isinstance(message, tuple):
            packed.append(message)
        elif packed and isinstance(packed[-1], Events):
            packed[-1].events.append(message)
        else:
            packed.append(Events([message]))
    return packed


def _answer_to(model: LoadedModel, query: Query) -> Any:
    match query:
        case CountTokens():
            return model.count(query.request)
        case TokenTexts():
            return model.token_texts(query.ids)
        case ReadStats():
            return model.stats()


def main() -> None:
    """Run the engine's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when the engine exits
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the server closed the connection, or has exited
        _Worker(Connection(int(sys.argv[1]))).run()
    sys.stderr.flush()
    os._exit(0)  # the engine's threads may be inside a long step
