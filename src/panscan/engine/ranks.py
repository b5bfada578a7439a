"""Tensor parallelism, the parent's side: one process per rank, joined by messages of plain data.

A message to a rank is a batch, the sampling rows of the last one, or a call of a method of
:class:`panscan.engine.rank_worker.RankWorker`. Every rank gets the same batches in the same order; rank 0 sends the
results back. Pixels have a separate connection, so that a large image does not delay a pass. A watchdog ends the group
when a rank exits, fails or hangs; every wait for a rank then raises ``EngineError``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, NoReturn

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


class CommandReply(Struct, frozen=True):
    """The result of a method that the parent called, or its error."""

    value: object


class PassEnded(Struct, frozen=True, eq=False):
    """From rank 0: the result of a pass. From any rank: why a pass failed, so that the group has to end.

    The other ranks may wait for a failed one in a collective.

    Args:
        number: index of its batch, from 0.
        result: the result, or the reason.
    """

    number: int
    result: PassResult | str


class RankGroup:
    """The rank processes of one model, started and loaded.

    Args:
        settings: settings with the model, the device and ``tensor_parallel_size``.

    Raises:
        PanscanError: a rank cannot load its shard.
        EngineError: a rank died.
    """

    def __init__(self, settings: Settings) -> None:
        self._size = settings.tensor_parallel_size
        self._process = os.getpid()
        self._reason: str | None = None  # why the group was ended
        self._broken: str | None = None  # the first pass that failed
        self._closed = threading.Event()
        self._replies: queue.SimpleQueue[tuple[int, CommandReply | None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[PassEnded | None] = queue.SimpleQueue()
        self._launched = self._finished = 0  # passes
        self._finished_before = 0  # of the watchdog's last look
        self._stalled = 0.0  # seconds without another finished pass
        self._pass_seconds = pass_seconds("cpu")
        self._sessions, self._handles = count(), count()
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
    def processes(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.child.pid for rank in self._ranks]

    def peak_memory(self) -> list[dict[str, int | None]]:
        """Return each rank's peaks since the last call (see :func:`panscan.model.machine.peak_memory`).

        Raises:
            EngineError: a rank died or hung.
        """
        return self._command([methodcaller("report_peaks")] * self._size, self._pass_seconds)

    def start(self, options: EngineOptions) -> RankRunners:
        """Build a model runner on every rank and return what drives them.

        Raises:
            PanscanError: a rank cannot build it.
        """
        session = next(self._sessions)
        facts: RunnerFacts = self._command([methodcaller("start_runner", options, session)] * self._size)[0]
        self._pass_seconds = pass_seconds(facts.device)
        return RankRunners(facts, self.execute, self.sample, partial(self.put, session), self.forget, self.stop)

    def close(self) -> None:
        """Kill the ranks and wait until they have exited. Does nothing in a forked child, or a second time."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._closed.set()
        self._kill()
        if self._watchdog.is_alive() and threading.current_thread() is not self._watchdog:
            self._watchdog.join(_EXIT_SECONDS)
        for rank in self._ranks:
            rank.child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def execute(self, batch: FlatBatch) -> WaitForPass:
        """Send a batch to all ranks and return what waits for its result.

        Raises:
            EngineError: a rank died or hung.
        """
        number, self._launched = self._launched, self._launched + 1
        self._broadcast(batch)
        return partial(self.result, number)

    def sample(self, rows: tuple[SamplingRow, ...]) -> None:
        """Have all ranks sample the tokens of the last batch.

        Raises:
            EngineError: a rank died or hung.
        """
        self._broadcast(rows)

    def result(self, number: int) -> PassResult:
        """Wait for the pass with this number and return its result; results of passes before it are discarded.

        Raises:
            EngineError: a rank died or hung.
        """
        while True:
            self._raise_if_closed()
            ended = self._results.get()  # None: woken by _kill()
            if ended is None:
                self._raise_closed()
            if ended.number == number and isinstance(ended.result, PassResult):
                return ended.result

    def stop(self) -> None:
        """Drop the model runners; the ranks keep their weights."""
        with suppress(EngineError):  # dropped with their processes
            self._command([methodcaller("stop_runner")] * self._size, self._pass_seconds)

    def put(self, session: int, levels: NDArray[np.uint8], views: Sequence[View]) -> list[int]:
        """Distribute an image's views over the ranks in turn, and send the image to each rank that has some.

        Raises:
            EngineError: a rank died or hung.
        """
        handles = [next(self._handles) for _ in views]
        for rank in self._ranks:
            share = {
                handle: view for handle, view in zip(handles, views, strict=True) if handle % self._size == rank.number
            }
            if share:
                with self._ending_with_ranks():
                    rank.child.send(methodcaller("put_pixels", session, levels, share), PIXELS)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """Have the ranks drop pixels."""
        dropped = list(handles)
        for rank in self._ranks:
            if share := [handle for handle in dropped if handle % self._size == rank.number]:
                with suppress(ChildEndedError):  # its pixels ended with it
                    rank.child.send(methodcaller("forget_pixels", share), PIXELS)

    def _broadcast(self, message: object) -> None:
        self._raise_if_closed()
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._ending_with_ranks():
            for rank in self._ranks:
                rank.child.send_pickled(pickled)

    def _command(self, commands: Sequence[object], seconds: float = _COMMAND_SECONDS) -> list[Any]:
        """Have each rank call a method of its worker, wait until all have returned, and return their results by rank.

        Raises:
            PanscanError: the error of the first rank that failed. Unless all ranks failed, the group is ended.
            EngineError: a rank died or hung.
        """
        with self._commanding:
            self._raise_if_closed()
            with self._ending_with_ranks():
                for rank, command in zip(self._ranks, commands, strict=True):
                    rank.child.send(command)
            values = self._collect(seconds)
        errors = [value for value in values.values() if isinstance(value, PanscanError)]
        if len(values) < self._size or 0 < len(errors) < self._size:
            self._end(str(errors[0]) if errors else f"not all ranks answered a command within {seconds:.0f} s")
        if errors:
            raise errors[0]
        self._raise_if_closed()
        return [values[rank] for rank in range(self._size)]

    def _collect(self, seconds: float) -> dict[int, Any]:
        """Return values of replies by rank, in the order of their arrival; not all if a rank failed or hung."""
        values: dict[int, Any] = {}
        while len(values) < self._size:
            try:
                rank, reply = self._replies.get(timeout=seconds)
            except queue.Empty:
                break
            if reply is None:
                self._raise_closed()
            values[rank] = reply.value
            if isinstance(reply.value, PanscanError):
                seconds = _FAILED_SECONDS  # the others may wait for the failed one in a collective
        return values

    def _receive(self, rank: _Rank, message: PassEnded | CommandReply | Literal["heartbeat"] | None) -> None:
        """Handle a message of a rank; None: its connection is closed."""
        rank.lost, rank.heard, rank.silent = message is None, True, 0.0
        match message:
            case PassEnded(result=str(reason)):
                self._broken = self._broken or f"rank {rank.number}: {reason}"
            case PassEnded():
                self._finished = message.number + 1
                if self._broken is None:  # otherwise the result may combine different passes
                    self._results.put(message)
            case CommandReply() | None:
                self._replies.put((rank.number, message))

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            self._raise_closed()

    def _raise_closed(self) -> NoReturn:
        """Raise an error with the reason why the group was closed."""
        self._closed.wait(_EXIT_SECONDS)  # the watchdog is about to find the reason
        raise EngineError(self._reason or "the engine's processes were closed")

    @contextmanager
    def _ending_with_ranks(self) -> Iterator[None]:
        """Raise why the group was closed if a rank has ended."""
        try:
            yield
        except ChildEndedError:
            self._raise_closed()

    def _watch(self) -> None:
        """End the group when a rank dies, fails, falls silent or does not finish a pass."""
        while not self._closed.wait(_WATCH_SECONDS):
            # A clock would include suspension of the program.
            for rank in self._ranks:
                rank.silent += _WATCH_SECONDS
            stalls = self._launched > self._finished == self._finished_before
            self._stalled = self._stalled + _WATCH_SECONDS if stalls else 0.0
            self._finished_before = self._finished
            if self._failure_reason() is None or self._closed.wait(_WATCH_SECONDS):
                continue
            # Check twice: when a rank dies, the others' passes fail some time before its exit is visible.
            if (reason := self._failure_reason()) is not None:
                self._end(reason)

    def _failure_reason(self) -> str | None:
        """Return why the group has failed, preferring causes over their effects; None if it has not."""
        exits = (rank.exit_reason() for rank in self._ranks)
        hangs = (rank.hang_reason() for rank in self._ranks)
        stalled = f"a pass took more than {self._pass_seconds:.0f} s" if self._stalled > self._pass_seconds else None
        return next((reason for reason in (*exits, self._broken, *hangs, stalled) if reason is not None), None)

    def _end(self, reason: str) -> None:
        self._reason = self._reason or f"--tensor-parallel-size {self._size}: {reason}"
        self._closed.set()
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.child.kill()
        self._results.put(None)  # wakes the thread that waits for a result


@dataclass(frozen=True, slots=True)
class RankRunners:
    """The model runners of all ranks as one: a ``PassExecutor`` and its ``PixelIntake`` (:mod:`panscan.engine.passes`).

    The pixels that it puts belong to these runners, not to those that the ranks may have later.
    """

    facts: RunnerFacts
    execute: Callable[[FlatBatch], WaitForPass]
    sample: Callable[[tuple[SamplingRow, ...]], None]
    put: Callable[[NDArray[np.uint8], Sequence[View]], list[int]]
    forget: Callable[[Iterable[int]], None]
    close: Callable[[], None]

    @property
    def pixels(self) -> RankRunners:
        """Itself."""
        return self


@dataclass(slots=True)
class _Rank:
    """One rank's process, and what the watchdog knows about it.

    Args:
        number: rank, from 0.
        child: the process.
        silent: seconds since its last message; the watchdog counts them.
        heard: whether it has sent a message.
        lost: whether it has closed its connection.
    """

    number: int
    child: Child
    silent: float = 0.0
    heard: bool = False
    lost: bool = False

    def exit_reason(self) -> str | None:
        """Return how the process exited; None: it runs."""
        return None if self.child.exit_code is None else f"rank {self.number} {self.child.ending()}"

    def hang_reason(self) -> str | None:
        """Return why the process is considered unresponsive; None if it answers."""
        if self.lost:
            return f"rank {self.number} closed its connection"
        limit = SILENCE_SECONDS if self.heard else _IMPORT_SECONDS
        return f"rank {self.number} has not answered for {self.silent:.0f} s" if self.silent > limit else None
