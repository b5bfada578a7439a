"""Tensor parallelism, the parent's side: one process per rank, joined by messages of plain data.

A message to a rank is a batch, the sampling rows of the last one, or a call of a method of
:class:`panscan.engine.rank_worker.RankWorker`. Every rank gets the same batches in the same order; rank 0 sends the
results back. Calls of its :class:`panscan.engine.views.PixelStore` have a separate connection, so that a large image
does not delay a pass. Each wait for a rank is a future. A watchdog ends the group when a rank exits, fails
or hangs, and all futures with it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from panscan.core import EngineError, PanscanError, View
from panscan.core.child import Child, ChildEndedError
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassResult, RunnerFacts, WaitForPass
from panscan.engine.scheduling.batch import FlatBatch, SamplingRow
from panscan.settings import Settings

PIXELS = 1
"""The channel for pixels (see :class:`panscan.core.child.Child`)."""
SILENCE_SECONDS = 30.0
"""A rank that sends nothing for this long has hung; it sends a heartbeat more often."""
_IMPORT_SECONDS = 300.0  # until a rank's first heartbeat: from a network disk, PyTorch takes minutes to import
_COMMAND_SECONDS = 3600.0  # to load a shard, or to build a model runner
_FAILED_SECONDS = 5.0  # between the first rank that fails a command and the last, if all fail alike
_EXIT_SECONDS = 10.0  # until the reason for a rank's end is known
_WATCH_SECONDS = 0.5


def pass_seconds(device: str) -> float:
    """Return the deadline of one pass: a collective that waits for a lost rank never returns."""
    return 30.0 if device == "cuda" else 600.0


class RankReply(Struct, frozen=True, eq=False):
    """The result of a method that the parent called, or its error."""

    value: object


class PassFailed(Struct, frozen=True):
    """Why a pass failed on a rank. The group has to end: the other ranks may wait for this one in a collective."""

    reason: str


class RankGroup:
    """The rank processes of one model, started and loaded. An executor of passes, once model runners are started.

    Args:
        settings: settings with the model, the device and ``tensor_parallel_size``.
        one_engine: whether the processes end with the first engine that uses them.

    Raises:
        PanscanError: a rank cannot load its shard.
        EngineError: a rank died.
    """

    def __init__(self, settings: Settings, *, one_engine: bool = False) -> None:
        self._one_engine = one_engine
        self._size = settings.tensor_parallel_size
        self._process = os.getpid()
        self.facts: RunnerFacts  # set by start()
        self._reason: str | None = None  # why the group was ended
        self._broken: str | None = None  # the first pass that failed
        self._closed = threading.Event()
        self._results: deque[Future[Any]] = deque()  # of passes in flight; rank 0 returns them in order
        self._pass_seconds = pass_seconds("cpu")
        self._commanding = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="panscan-ranks-"))
        self._watchdog = threading.Thread(target=self._watch, name="panscan-ranks", daemon=True)
        self._ranks: list[_Rank] = []
        atexit.register(self.close)
        try:
            for number in range(self._size):
                child = Child("panscan.engine.rank_worker", keep_output=True, channels=2)
                self._ranks.append(_Rank(number, child))
                child.listen(partial(self._receive, self._ranks[-1]))
            self._watchdog.start()
            store, threads = str(self._folder / "store"), torch.get_num_threads()
            if "OMP_NUM_THREADS" not in os.environ:
                threads = max(1, threads // self._size)
            shards = range(self._size)
            self._command([methodcaller("load", settings, rank, self._size, store, threads) for rank in shards])
        except BaseException:
            self.close()
            raise

    @property
    def failed(self) -> bool:
        """Whether the group was ended because of a rank."""
        return self._reason is not None

    @property
    def pixels(self) -> Self:
        """The receiver of pixels: the group."""
        return self

    @property
    def processes(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.child.pid for rank in self._ranks]

    def peak_memory(self) -> list[dict[str, int | None]]:
        """Return each rank's peaks since the last call (see :func:`panscan.model.machine.peak_memory`).

        Raises:
            EngineError: a rank died or hung.
        """
        return self._command([methodcaller("report_peaks")] * self._size, self._pass_seconds)

    def start(self, options: EngineOptions) -> Self:
        """Build a model runner on every rank, and return the group, which executes passes now.

        Raises:
            PanscanError: a rank cannot build it.
        """
        self.facts = self._command([methodcaller("start_runner", options)] * self._size)[0]
        self._pass_seconds = pass_seconds(self.facts.device)
        return self

    def close(self) -> None:
        """Kill the ranks and wait until they have exited. Does nothing in a forked child, or a second time."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._kill()
        if self._watchdog.is_alive() and threading.current_thread() is not self._watchdog:
            self._watchdog.join(_EXIT_SECONDS)
        for rank in self._ranks:
            rank.child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def execute(self, batch: FlatBatch) -> WaitForPass:
        """Send a batch to all ranks and return what waits for its result.

        Raises:
            EngineError: a rank died or hung. So does the wait.
        """
        result = self._expect(self._results)
        self._broadcast(batch)
        return result.result

    def sample(self, rows: tuple[SamplingRow, ...]) -> None:
        """Send the sampling rows of the last batch to all ranks.

        Raises:
            EngineError: a rank died or hung.
        """
        self._broadcast(rows)

    def _broadcast(self, message: FlatBatch | tuple[SamplingRow, ...]) -> None:
        """Send a batch, or the sampling rows of the last one, to all ranks.

        Raises:
            EngineError: a rank died or hung.
        """
        self._check_open()
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with suppress(ChildEndedError):  # as in _Rank.send()
            for rank in self._ranks:
                rank.child.send_pickled(pickled)

    def stop(self) -> None:
        """Drop the model runners; the ranks keep their weights, or end with their only engine."""
        if self._one_engine:
            self.close()
            return
        with suppress(EngineError):  # dropped with their processes
            self._command([methodcaller("stop_runner")] * self._size, self._pass_seconds)

    def put(self, levels: NDArray[np.uint8], views: Mapping[int, View]) -> None:
        """Distribute an image's views over the ranks by handle, and send the image to each rank that has some.

        Raises:
            EngineError: a rank died or hung.
        """
        self._check_open()
        for rank in self._ranks:
            if share := {handle: view for handle, view in views.items() if handle % self._size == rank.number}:
                rank.send(methodcaller("put", levels, share), PIXELS)

    def forget(self, handles: Iterable[int]) -> None:
        """Have each rank drop those of these pixels that it has."""
        dropped = list(handles)
        # No message to the other ranks: the engine's thread would wait while one of them receives an image.
        for rank in self._ranks:
            if share := [handle for handle in dropped if handle % self._size == rank.number]:
                rank.send(methodcaller("forget", share), PIXELS)

    def _command(self, commands: Sequence[object], seconds: float = _COMMAND_SECONDS) -> list[Any]:
        """Have each rank call a method of its worker, wait until all have returned, and return their results by rank.

        Raises:
            PanscanError: the error of the first rank that failed. Unless all ranks failed, the group is ended.
            EngineError: a rank died or hung.
        """
        with self._commanding:
            self._check_open()
            replies = [self._expect(rank.replies) for rank in self._ranks]
            for rank, command in zip(self._ranks, commands, strict=True):
                rank.send(command)
            if any(reply.exception() for reply in wait(replies, seconds, FIRST_EXCEPTION).done):
                wait(replies, _FAILED_SECONDS)  # the others may wait for the failed one in a collective
            errors = [error for reply in replies if reply.done() and (error := reply.exception()) is not None]
            if not all(reply.done() for reply in replies) or 0 < len(errors) < self._size:
                self._end(str(errors[0]) if errors else f"not all ranks answered a command within {seconds:.0f} s")
            if errors:
                raise errors[0]
            return [reply.result() for reply in replies]

    def _expect(self, awaited: deque[Future[Any]]) -> Future[Any]:
        """Append the future of a result or reply to those that are awaited; it fails when the group ends."""
        future: Future[Any] = Future()
        awaited.append(future)
        if self._closed.is_set():
            self._fail_waits()
        return future

    def _receive(self, rank: _Rank, message: PassResult | RankReply | PassFailed | Literal["heartbeat"] | None) -> None:
        """Handle a message of a rank; None: its connection is closed."""
        rank.lost, rank.heard, rank.silent = message is None, True, 0.0
        if isinstance(message, PassFailed):
            self._broken = self._broken or f"rank {rank.number}: {message.reason}"
            return
        with suppress(IndexError):  # the group has ended, and all waits with it
            if isinstance(message, PassResult) and self._broken is None:  # else it may combine different passes
                self._results.popleft().set_result(message)
            elif isinstance(message, RankReply):
                reply = rank.replies.popleft()
                if isinstance(message.value, PanscanError):
                    reply.set_exception(message.value)
                else:
                    reply.set_result(message.value)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise self._ended()

    def _ended(self) -> EngineError:
        """Return the error of a call that needs the ranks after their end."""
        return EngineError(self._reason or "the engine's processes were closed")

    def _watch(self) -> None:
        """End the group when a rank dies, fails, falls silent or does not finish a pass."""
        oldest: list[Future[Any]] = []  # the first unfinished pass, if any
        stalled = 0.0  # seconds for which it has been that
        while not self._closed.wait(_WATCH_SECONDS):
            # A clock would include suspension of the program.
            for rank in self._ranks:
                rank.silent += _WATCH_SECONDS
            before, oldest = oldest, [*self._results][:1]
            stalled = stalled + _WATCH_SECONDS if oldest and oldest == before else 0.0
            if self._failure_reason(stalled) is None or self._closed.wait(_WATCH_SECONDS):
                continue
            # Check twice: when a rank dies, the others' passes fail some time before its exit is visible.
            if (reason := self._failure_reason(stalled)) is not None:
                self._end(reason)

    def _failure_reason(self, stalled: float) -> str | None:
        """Return why the group has failed, preferring causes over their effects; None if it has not."""
        exits = (rank.exit_reason() for rank in self._ranks)
        hangs = (rank.hang_reason() for rank in self._ranks)
        late = f"a pass took more than {self._pass_seconds:.0f} s" if stalled > self._pass_seconds else None
        return next((reason for reason in (*exits, self._broken, *hangs, late) if reason is not None), None)

    def _end(self, reason: str) -> None:
        if not self._closed.is_set():
            self._reason = f"--tensor-parallel-size {self._size}: {reason}"
        self._kill()

    def _kill(self) -> None:
        self._closed.set()
        for rank in self._ranks:
            rank.child.kill()
        self._fail_waits()

    def _fail_waits(self) -> None:
        for awaited in (self._results, *(rank.replies for rank in self._ranks)):
            with suppress(IndexError):  # none is left
                while True:
                    awaited.popleft().set_exception(self._ended())


@dataclass(slots=True)
class _Rank:
    """One rank's process, and what the watchdog knows about it.

    Args:
        number: rank, from 0.
        child: the process.
        replies: awaited replies to methods that the parent called.
        silent: seconds since its last message; the watchdog counts them.
        heard: whether it has sent a message.
        lost: whether it has closed its connection.
    """

    number: int
    child: Child
    replies: deque[Future[Any]] = field(default_factory=deque)
    silent: float = 0.0
    heard: bool = False
    lost: bool = False

    def send(self, call: object, channel: int = 0) -> None:
        """Send a call; if the process has ended, the watchdog finds the reason, and ends all waits."""
        with suppress(ChildEndedError):
            self.child.send(call, channel)

    def exit_reason(self) -> str | None:
        """Return how the process exited; None: it runs."""
        return None if self.child.exit_code is None else f"rank {self.number} {self.child.ending()}"

    def hang_reason(self) -> str | None:
        """Return why the process is considered unresponsive; None if it answers."""
        if self.lost:
            return f"rank {self.number} closed its connection"
        limit = SILENCE_SECONDS if self.heard else _IMPORT_SECONDS
        return f"rank {self.number} has not answered for {self.silent:.0f} s" if self.silent > limit else None
