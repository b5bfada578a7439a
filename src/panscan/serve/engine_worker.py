"""The engine process: loads the model and answers messages of the HTTP server's process."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from panscan.core import EngineError, PanscanError, Result, TokenEvent, now
from panscan.core.child import Parent
from panscan.images.pool import decode_in_children
from panscan.serve.engine_process import Cancel, Ended, Query, QueryReply, Submit
from panscan.serve.loaded_model import LoadedModel, open_model

_HELPERS = 2  # threads for queries: token counts and token texts


class _Worker:
    """A worker that reads messages on the main thread and sends them in batches from another thread."""

    def __init__(self) -> None:
        self._parent = Parent()
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._registering = threading.RLock()
        self._cancels: dict[str, Callable[[], None]] = {}
        self._pool = ThreadPoolExecutor(_HELPERS, "panscan-query")
        self._stats = ThreadPoolExecutor(1, "panscan-stats")

    def run(self) -> None:
        """Serve until the server closes the connection, which ends this process."""
        threading.Thread(target=self._send, name="panscan-send", daemon=True).start()
        settings, adapters = self._parent.receive()
        decode_in_children()
        try:
            model = open_model(settings, adapters)
        except PanscanError as error:
            self._outgoing.put(error)
        else:
            self._outgoing.put(model.info)
            self._serve(model)
        self._parent.receive()

    def _serve(self, model: LoadedModel) -> None:
        while True:
            message = self._parent.receive()
            match message:
                case Submit():
                    self._submit(model, message)
                case Cancel():
                    if (cancel := self._cancels.get(message.id)) is not None:
                        cancel()
                case Query():
                    # Statistics wait for the engine's current step, and must not delay other queries.
                    pool = self._stats if message.method == "stats" else self._pool
                    pool.submit(partial(self._reply, model, message))
                case _:
                    raise TypeError(f"unknown message {type(message).__name__}")

    def _submit(self, model: LoadedModel, submit: Submit) -> None:
        id = submit.request.id

        def on_event(event: TokenEvent) -> None:
            self._outgoing.put((id, event))

        with self._registering:  # a request may end before start() returns
            try:
                engine = model.engine_of(submit.model)
                on_events = on_event if submit.stream else None
                self._cancels[id] = engine.start(submit.request, on_events, partial(self._on_end, id))
            except EngineError as error:
                self._outgoing.put(Ended(id, Result.unanswered(id, now(), error)))

    def _on_end(self, id: str, result: Result) -> None:
        if isinstance(result.error, EngineError):  # later requests would fail too: the server restarts the process
            sys.stderr.write(f"the engine has failed: {result.error}\n")
            sys.stderr.flush()
            os._exit(1)
        self._outgoing.put(Ended(id, result))
        with self._registering:
            self._cancels.pop(id, None)

    def _reply(self, model: LoadedModel, query: Query) -> None:
        try:
            value: Any = getattr(model, query.method)(*query.arguments)
        except PanscanError as error:
            value = error
        except Exception as error:  # an image decoder may raise anything; only this query fails
            value = PanscanError(f"{type(error).__name__}: {error}")
        self._outgoing.put(QueryReply(query.number, value))

    def _send(self) -> None:
        """Send queued messages; those that are waiting go out as one batch."""
        while True:
            batch = [self._outgoing.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._outgoing.get_nowait())
            self._parent.send(batch)


def main() -> None:
    """Run the engine's process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides when the engine exits
    _Worker().run()
