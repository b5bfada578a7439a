"""The engine's thread: takes requests, has them prepared ahead of need, and turns the loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

from panscan.core import EngineError, FinishReason, InputError, PanscanError
from panscan.engine.job import Job
from panscan.engine.loop import Loop

__all__ = ["Worker"]

_THREADS = 4  # that decode and resize; Pillow lets go of the interpreter while it does
Answer = TypeVar("Answer")


class Worker:
    """One thread that owns a loop. Everything reaches it as a message; only its thread touches the loop.

    Args:
        build: makes the loop, in the thread that turns it: PyTorch keeps some of what a start warms up per thread.
        ahead: jobs at most that are prepared, or being prepared, and wait for their turn: what bounds the memory of
            decoded images, however many requests are accepted.

    Raises: what ``build`` does.
    """

    def __init__(self, build: Callable[[], Loop], ahead: int) -> None:
        self._ahead = ahead
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._accepted: deque[Job] = deque()
        self._preparing: set[Job] = set()
        self._broken: EngineError | None = None
        self._lock = threading.Lock()
        self._closed = self._closing = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="panscan-prepare")
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(build, built), name="panscan-engine", daemon=True)
        self._thread.start()
        try:
            built.result()
        except BaseException:  # also an impatient user's: the thread ends as soon as it can
            self._closed = True
            self._messages.put(self._close)
            self._pool.shutdown(wait=False)
            raise

    def accept(self, job: Job) -> None:
        """Take a job. Its result is told in any case."""
        self._send(lambda: self._accept(job))

    def cancel(self, job: Job) -> None:
        """End a job with the tokens it has; nothing happens if it has ended."""
        self._send(lambda: self._end(job, "cancelled"))

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What ``question`` gives, called between two steps."""
        answer: Future[Answer] = Future()

        def put() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # the asker's to handle, whatever it is; the loop goes on
                answer.set_exception(error)

        self._send(put)
        return answer.result()

    def close(self) -> None:
        """Cancel what is left, and end the thread. Nothing is taken any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._messages.put(self._close)
        if threading.current_thread() is not self._thread:  # which may be the one that collects garbage
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)  # a page that hangs must not hold up the end

    def _send(self, message: Callable[[], None]) -> None:
        with self._lock:  # so that nothing comes behind the last message, and waits for ever
            if self._closed:
                raise EngineError("the engine is closed")
            self._messages.put(message)

    def _live(self, build: Callable[[], Loop], built: Future[None]) -> None:
        try:
            self.loop = build()
        except BaseException as error:  # the maker's to handle, whatever it is
            built.set_exception(error)
            return
        built.set_result(None)
        self._turn()

    def _turn(self) -> None:
        with torch.no_grad():
            while not self._closing:
                try:
                    self._prepare_ahead()
                    if self._broken is not None or not self.loop.step():
                        self._messages.get()()
                    while not self._messages.empty():
                        self._messages.get()()
                except BaseException as error:  # a bug, or a library's panic: whoever waits must hear of it
                    self._break(error)

    def _accept(self, job: Job) -> None:
        if self._broken is not None:
            job.end("error", self._broken)
        else:
            self._accepted.append(job)

    def _prepare_ahead(self) -> None:
        while self._accepted and len(self._preparing) + self.loop.waiting < self._ahead:
            job = self._accepted.popleft()
            self._preparing.add(job)
            self._pool.submit(self._prepare, job)

    def _prepare(self, job: Job) -> None:
        """In a thread of the pool."""
        error: PanscanError | None = None
        try:
            if not job.ended:
                self.loop.preparer.prepare(job)
        except PanscanError as known:
            error = known
        except BaseException as unknown:  # whatever a file makes a decoder raise, a panic too, is its request's failure
            text = " ".join(str(unknown).split())[:300]
            error = InputError(f"request {job.request.id!r}: {type(unknown).__name__}: {text}")
        self._messages.put(lambda: self._prepared(job, error))

    def _prepared(self, job: Job, error: PanscanError | None) -> None:
        self._preparing.discard(job)
        if job.ended:  # cancelled meanwhile
            return
        if error is not None:
            job.end("error", error)
        else:
            self.loop.add(job)

    def _end(self, job: Job, reason: FinishReason, error: PanscanError | None = None) -> None:
        if job.ended:
            return
        if job in self._accepted:
            self._accepted.remove(job)
        self.loop.end(job, reason, error)

    def _break(self, error: BaseException) -> None:
        """Nothing that the bookkeeping says can be trusted any more: end all jobs, and take no others."""
        self._broken = EngineError(f"the engine stopped: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        for job in self._left():
            if not job.ended:
                job.end("error", self._broken)
        self._accepted.clear()

    def _close(self) -> None:
        self._closing = True
        for job in self._left():
            self._end(job, "cancelled")
        self.loop.close()

    def _left(self) -> list[Job]:
        return [*self.loop.jobs, *self._preparing, *self._accepted]
