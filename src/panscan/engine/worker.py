"""The engine's thread, which owns a loop: preparations, messages from other threads, and the end of all requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from panscan.core import EngineError, PanscanError, Result, SettingError, Stats
from panscan.core.daemons import DaemonThreads, native_work
from panscan.core.streams import FORKED
from panscan.engine.loop import Loop
from panscan.engine.request_state import RequestState, described, drop_frames
from panscan.images.pool import worker_count

_LIVENESS_SECONDS = 1.0  # between two looks at the engine's thread while a call waits for it


def ahead_of_need(device: str) -> int:
    """Return how many requests may be in preparation, or prepared and queued, on a type of device.

    A GPU can start many questions about known pages in one pass, so many must be ready when a pass ends. On a CPU,
    preparation competes with the passes for cores.
    """
    return 32 if device == "cuda" else 8


def _wake() -> None:
    """Do nothing: a message to a thread that waits for one."""


T = TypeVar("T")
_THREAD_ENDED = "the engine's thread has ended: create another engine"


class Worker:
    """A thread that owns a loop. Other threads reach the loop only through messages.

    If the loop fails, all requests end with its error, and later ones are answered with it. If the thread itself ends,
    calls raise it; none waits forever.

    ``ahead``: maximum requests in preparation, or prepared and not yet admitted by the scheduler: each holds a thread.
    ``--image-memory-gb`` limits the memory of their images.

    Args:
        build: builds the loop. Called in the worker's thread, because PyTorch keeps some warmed-up state per thread.

    Raises: whatever ``build`` raises.
    """

    def __init__(self, build: Callable[[], Loop]) -> None:
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unfinished: dict[int, RequestState] = {}  # all requests without a result, by number
        self._broken: EngineError | None = None
        self.stopped: EngineError | None = None
        self._lock = threading.RLock()  # garbage collection may close the engine in a thread that holds it
        self._closed = False
        self._process = os.getpid()
        self._documents = DaemonThreads(worker_count(), "panscan-document")
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="panscan-engine", daemon=True)
        self._thread.start()
        try:
            built.result()
        except BaseException:  # includes KeyboardInterrupt: the thread ends as soon as it can
            self._closed = True
            self._messages.put(_wake)
            raise

    def accept(self, state: RequestState) -> None:
        """Accept a request. It always ends with a result."""
        self.check_process()
        state.on_end = partial(self._deliver, state.number, state.on_end)
        with self._lock:
            self._check_open()
            self._unfinished[state.number] = state
            if self._broken is not None:
                self._messages.put(partial(state.end, "error", self._broken))
                return
            try:
                self._pool.submit(partial(self._prepare, state))
            except RuntimeError as error:  # too many threads, or the interpreter is exiting
                self._messages.put(partial(self._prepared, state, EngineError(f"no preparation: {error}")))

    def cancel(self, state: RequestState) -> None:
        """End a request with the tokens it has. Does nothing if it has ended, or if the engine is closed."""
        with suppress(EngineError):
            self._send(partial(self._cancel, state))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the worker's thread, between two steps, and return its result.

        Raises:
            EngineError: the engine is closed or has failed.
            SettingError: called from a callback, which the thread would wait for.
        """
        answers: SimpleQueue[Future[T]] = SimpleQueue()

        def run() -> None:
            result: Future[T] = Future()
            try:
                if self._broken is not None:
                    raise self._broken
                result.set_result(function())
            except BaseException as error:  # raised in the caller's thread; the loop continues
                result.set_exception(error)
            answers.put(result)

        self._check_caller()
        self._send(run)
        return self.receive(answers).result()

    def receive(self, queue: SimpleQueue[T]) -> T:
        """Wait for the next item that the worker's thread puts into a queue.

        Raises:
            EngineError: the thread has ended without one.
            SettingError: called in that thread, by a callback.
        """
        self._check_caller()
        while True:
            try:
                return queue.get(timeout=_LIVENESS_SECONDS)
            except Empty:
                if not self._thread.is_alive() and queue.empty():
                    raise self.stopped or EngineError(_THREAD_ENDED) from None

    def stats(self) -> Stats:
        """Return the loop's statistics, with all waiting requests."""
        return self.call(lambda: replace(self.loop.stats(), waiting=self.waiting))

    @property
    def waiting(self) -> int:
        """Number of accepted requests that do not run. Does not wait for the thread."""
        loop: Loop | None = getattr(self, "loop", None)  # none once the thread has ended
        return max(0, len(self._unfinished) - (loop.running if loop is not None else 0))

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
                self._messages.put(_wake)
        if threading.current_thread() is not self._thread:  # garbage collection may run the finalizer in the thread
            self._thread.join()
        for threads in (self._pool, self._documents):
            threads.shutdown()

    def _send(self, message: Callable[[], None]) -> None:
        self.check_process()
        with self._lock:  # no message may follow the last one: it would never be processed
            self._check_open()
            self._messages.put(message)

    def _check_open(self) -> None:
        if self._closed:
            raise self.stopped or EngineError("the engine is closed")

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise SettingError("a callback must not wait for the engine, which waits for it: use another thread")

    def _run(self, build: Callable[[], Loop], built: Future[None]) -> None:
        try:
            self.loop = build()
            self.ahead = ahead_of_need(self.loop.facts.device)
            self._pool = DaemonThreads(self.ahead, "panscan-prepare")
        except BaseException as error:  # raised in the constructor
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            self._run_loop()
        finally:
            self._stop()

    def _run_loop(self) -> None:
        with torch.no_grad():
            while not self._closed:
                try:
                    if self._broken is not None or not self.loop.step():
                        self._messages.get()()
                    while not self._messages.empty():
                        self._messages.get()()
                except BaseException as error:  # a bug, or a library's panic: waiting callers must get an error
                    self._fail(error)

    def _prepare(self, state: RequestState) -> None:
        """Prepare a request, in a thread of a pool, and wait until it is admitted or has ended.

        A slow one is passed on to threads that do not wait: PDF and TIFF files, images of unusual size or structure,
        and large schemas may take long, and must not delay other requests.
        """
        error: PanscanError | None = None
        try:
            if not state.ended and not state.slow and self.loop.preparer.is_slow(state.request):
                state.slow = True
                with self._lock:
                    self._documents.submit(partial(self._prepare, state))
                return
            if not state.ended:
                self.loop.preparer.prepare(state)
        except EngineError as known:
            error = known
        except BaseException as unknown:  # whatever a decoder raises for a file, even a panic, fails only its request
            error = state.error_of(unknown)
        if error is not None:
            with native_work():  # the frames may hold the last reference to a tensor
                drop_frames(error)
        self._messages.put(partial(self._prepared, state, error))
        if not state.slow:
            state.admitted.wait()

    def _prepared(self, state: RequestState, error: PanscanError | None) -> None:
        if state.ended:  # cancelled during preparation
            state.drop_pixels()
        elif error is not None:
            state.end("error", error)
        else:
            self.loop.add(state)

    def _cancel(self, state: RequestState) -> None:
        if not state.ended:
            self.loop.end(state, "cancelled")

    def _deliver(self, number: int, on_end: Callable[[Result], None], result: Result) -> None:
        """Deliver the result of a request, which no longer counts as waiting then."""
        with self._lock:
            self._unfinished.pop(number, None)
        on_end(result)

    def _fail(self, error: BaseException) -> None:
        """End all requests and refuse new ones: after a bug, the bookkeeping cannot be trusted."""
        broken = error if isinstance(error, EngineError) else EngineError(f"the engine stopped: {described(error)}")
        with self._lock:
            self._broken = broken
        for state in self._requests():
            state.end("error", broken)

    def _stop(self) -> None:
        """Leave nothing that waits: the thread ends, closed or for whatever reason."""
        with self._lock:
            if not self._closed:
                self.stopped = self._broken = self._broken or EngineError(_THREAD_ENDED)
            self._closed = True
        for state in self._requests():
            if self.stopped is None:
                with suppress(BaseException):  # a bug: the request ends with an error
                    self._cancel(state)
            state.end("error", self.stopped or EngineError(_THREAD_ENDED))
        while not self._messages.empty():
            with suppress(BaseException):  # answers calls; what else fails has no caller
                self._messages.get()()
        self.loop.preparer.close()
        self.loop.close()
        del self.loop  # frees weights, caches and graphs even while something refers to this object

    def _requests(self) -> list[RequestState]:
        with self._lock:
            return list(self._unfinished.values())
