"""The engine's thread, which owns the loop, and the threads that prepare requests in advance."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from panscan.core import EngineError, FinishReason, InputError, PanscanError
from panscan.core.daemons import DaemonThreads
from panscan.core.streams import FORKED
from panscan.engine.loop import Loop
from panscan.engine.request_state import RequestState

__all__ = ["Worker"]

_THREADS = 4  # to decode and resize images; Pillow releases the GIL while it does
T = TypeVar("T")


class Worker:
    """A thread that owns a loop. Other threads reach the loop only through messages.

    Args:
        build: builds the loop. Called in the worker's thread, because PyTorch keeps some warmed-up state per thread.
        ahead: maximum requests that are in preparation or prepared and queued. ``--image-memory-gb`` limits the memory
            of their images.

    Raises: whatever ``build`` raises.
    """

    def __init__(self, build: Callable[[], Loop], ahead: int) -> None:
        self._ahead = ahead
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._accepted: deque[RequestState] = deque()
        self._preparing: set[RequestState] = set()
        self._broken: EngineError | None = None
        self._lock = threading.Lock()
        self._closed = self._closing = False
        self._process = os.getpid()
        self._pool = DaemonThreads(_THREADS, "panscan-prepare")
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="panscan-engine", daemon=True)
        self._thread.start()
        try:
            built.result()
        except BaseException:  # includes KeyboardInterrupt: the thread ends as soon as it can
            self._closed = True
            self._messages.put(self._close)
            self._pool.shutdown()
            raise

    def accept(self, state: RequestState) -> None:
        """Accept a request. It always ends with a result."""
        self._send(lambda: self._accept(state))

    def cancel(self, state: RequestState) -> None:
        """End a request with the tokens it has. Does nothing if it has ended."""
        self._send(lambda: self._end(state, "cancelled"))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the worker's thread, between two steps, and return its result."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # raised in the caller's thread; the loop continues
                result.set_exception(error)

        self._send(run)
        return result.result()

    def check_process(self) -> None:
        """Raise in a forked child, which has a copy of the engine without its thread.

        Raises:
            EngineError: another process created the engine.
        """
        if os.getpid() != self._process:
            raise EngineError(FORKED)

    def close(self) -> None:
        """Cancel all requests and end the thread; further requests are refused.

        Does nothing in a forked child, where locks that the parent's threads held are never released.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._messages.put(self._close)
        if threading.current_thread() is not self._thread:  # garbage collection may run the finalizer in the thread
            self._thread.join()
        self._pool.shutdown()

    def _send(self, message: Callable[[], None]) -> None:
        self.check_process()
        with self._lock:  # no message may follow the last one: it would never be processed
            if self._closed:
                raise EngineError("the engine is closed")
            self._messages.put(message)

    def _run(self, build: Callable[[], Loop], built: Future[None]) -> None:
        try:
            self.loop = build()
        except BaseException as error:  # raised in the constructor
            built.set_exception(error)
            return
        built.set_result(None)
        self._run_loop()

    def _run_loop(self) -> None:
        with torch.no_grad():
            while not self._closing:
                try:
                    self._prepare_ahead()
                    if self._broken is not None or not self.loop.step():
                        self._messages.get()()
                    while not self._messages.empty():
                        self._messages.get()()
                except BaseException as error:  # a bug, or a library's panic: waiting callers must get an error
                    self._fail(error)

    def _accept(self, state: RequestState) -> None:
        if self._broken is not None:
            state.end("error", self._broken)
        else:
            self._accepted.append(state)

    def _prepare_ahead(self) -> None:
        while self._accepted and len(self._preparing) + self.loop.waiting < self._ahead:
            state = self._accepted.popleft()
            self._preparing.add(state)
            self._pool.submit(partial(self._prepare, state))

    def _prepare(self, state: RequestState) -> None:
        """Prepare a request, in a thread of the pool."""
        error: PanscanError | None = None
        try:
            if not state.ended:
                self.loop.preparer.prepare(state)
        except PanscanError as known:
            error = known
        except BaseException as unknown:  # whatever a decoder raises for a file, even a panic, fails only its request
            text = " ".join(str(unknown).split())[:300]
            error = InputError(f"request {state.request.id!r}: {type(unknown).__name__}: {text}")
        self._messages.put(lambda: self._prepared(state, error))

    def _prepared(self, state: RequestState, error: PanscanError | None) -> None:
        self._preparing.discard(state)
        if state.ended:  # cancelled during preparation
            state.drop_pixels()
            return
        if error is not None:
            state.end("error", error)
        else:
            self.loop.add(state)

    def _end(self, state: RequestState, reason: FinishReason, error: PanscanError | None = None) -> None:
        if state.ended:
            return
        if state in self._accepted:
            self._accepted.remove(state)
        self.loop.end(state, reason, error)

    def _fail(self, error: BaseException) -> None:
        """End all requests and refuse new ones: after a bug, the bookkeeping cannot be trusted."""
        text = " ".join(str(error).split())[:300]
        known = isinstance(error, EngineError)
        self._broken = EngineError(text if known else f"the engine stopped: {type(error).__name__}: {text}")
        for state in self._unfinished():
            if not state.ended:
                state.end("error", self._broken)
        self._accepted.clear()

    def _close(self) -> None:
        self._closing = True
        for state in self._unfinished():
            self._end(state, "cancelled")
        self.loop.preparer.memory.close()
        self.loop.close()

    def _unfinished(self) -> list[RequestState]:
        return [*self.loop.states, *self._preparing, *self._accepted]
