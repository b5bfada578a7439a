"""Tensor parallelism, the parent's side: one process per rank, joined by messages of plain data.

Every rank gets the same batches in the same order; rank 0 sends the results back. Pixels have a separate connection, so
that a large image does not delay a pass. A watchdog ends the group when a rank exits, fails or hangs; every wait for a
rank then raises ``EngineError``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import EngineError, PanscanError, View
from panscan.core.process import time_line, worker_command
from panscan.engine.model_runner import PassResult, RunnerFacts
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import FlatBatch
from panscan.engine.views import PixelRef
from panscan.settings import Settings

__all__ = [
    "HEARTBEAT_SECONDS",
    "CommandDone",
    "CommandFailed",
    "ForgetPixels",
    "Heartbeat",
    "LoadShard",
    "PassFailed",
    "PassFinished",
    "PutPixels",
    "RankGroup",
    "ReportPeaks",
    "StartRunner",
    "StopRunner",
    "pass_seconds",
]

SILENCE_SECONDS = 30.0
"""A rank that sends nothing for this long has hung. It sends a heartbeat every :data:`HEARTBEAT_SECONDS`."""
HEARTBEAT_SECONDS = 2.0
_IMPORT_SECONDS = 300.0  # until a rank's first heartbeat: from a network disk, PyTorch takes minutes to import
_COMMAND_SECONDS = 3600.0  # to load a shard, or to build a model runner
_FAILED_SECONDS = 5.0  # between the first rank that fails a command and the last, if all fail alike
_EXIT_SECONDS = 10.0  # from SIGKILL to the end of a process, which may have to release a GPU
_WATCH_SECONDS = 0.5
_ERROR_CHARACTERS = 300  # characters of a rank's last error message
_SIGNALS = {each.value: each.name for each in signal.Signals}


def pass_seconds(device: str) -> float:
    """Return the deadline of one pass: a collective that waits for a lost rank never returns."""
    return 30.0 if device == "cuda" else 600.0


@dataclass(frozen=True, slots=True)
class LoadShard:
    """To a rank: load this shard.

    Args:
        settings: settings with the model and the device.
        rank: number of the shard, starting at 0.
        size: number of ranks.
        store: file through which the ranks find each other.
        threads: CPU threads of the rank.
        time_line: origin of the parent's time line (see :func:`panscan.core.process.join_time_line`).
    """

    settings: Settings
    rank: int
    size: int
    store: str
    threads: int
    time_line: float


@dataclass(frozen=True, slots=True)
class StartRunner:
    """To a rank: build a model runner. ``session``: its number, which its pixels carry too."""

    options: EngineOptions
    session: int


@dataclass(frozen=True, slots=True)
class StopRunner:
    """To a rank: drop the model runner, keep the weights."""


@dataclass(frozen=True, slots=True)
class PutPixels:
    """To a rank, over its connection for pixels: keep the pixels of these views (see ``PixelStore.put_as``).

    Pixels of an earlier session are ignored: a thread may still have been preparing them when it ended.
    """

    session: int
    handles: list[int]
    levels: NDArray[np.uint8]
    views: list[View]


@dataclass(frozen=True, slots=True)
class ForgetPixels:
    """To a rank, over its connection for pixels: drop the pixels with these handles."""

    handles: list[int]


@dataclass(frozen=True, slots=True)
class ReportPeaks:
    """To a rank: report peak memory since the last reset. ``reset``: then start new peaks."""

    reset: bool


@dataclass(frozen=True, slots=True)
class CommandDone:
    """From a rank: the last command is done.

    Args:
        facts: answer to :class:`StartRunner`.
        peaks: answer to :class:`ReportPeaks`, as :func:`panscan.model.machine.peak_memory` returns them.
    """

    facts: RunnerFacts | None = None
    peaks: dict[str, int | None] | None = None


@dataclass(frozen=True, slots=True)
class PassFinished:
    """From rank 0: the result of a pass. ``number``: index of its batch, from 0."""

    number: int
    result: PassResult


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From a rank: it is alive."""


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """From a rank: its command failed."""

    error: PanscanError


@dataclass(frozen=True, slots=True)
class PassFailed:
    """From a rank: a pass failed. The others may wait for it in a collective, so the group has to end."""

    reason: str


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
        self._answers: queue.SimpleQueue[tuple[int, CommandDone | CommandFailed | None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[PassFinished | None] = queue.SimpleQueue()
        self._launched = self._finished = 0  # passes
        self._finished_before, self._stalled = (
            0,
            0.0,
        )  # the watchdog's: passes that had finished; seconds without another
        self._pass_seconds = pass_seconds("cpu")
        self._sessions, self._handles, self._turns = count(), count(), count()
        self._numbering, self._commanding = threading.Lock(), threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="panscan-ranks-"))
        self._watchdog = threading.Thread(target=self._watch, name="panscan-ranks", daemon=True)
        self._ranks: list[_Rank] = []
        atexit.register(self.close)
        try:
            for rank in range(self._size):
                self._ranks.append(_Rank(rank, self._receive))
            self._watchdog.start()
            store, threads = str(self._folder / "store"), _threads_each(self._size)
            self._command(
                [LoadShard(settings, rank, self._size, store, threads, time_line()) for rank in range(self._size)]
            )
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
        return [rank.process.pid for rank in self._ranks]

    def peak_memory(self, *, reset: bool = False) -> list[dict[str, int | None]]:
        """Return each rank's peaks since the last reset (see :func:`panscan.model.machine.peak_memory`).

        Args:
            reset: then start new peaks.

        Raises:
            EngineError: a rank died or hung.
        """
        answers = self._command([ReportPeaks(reset)] * self._size, self._pass_seconds)
        return [answer.peaks for answer in answers if answer.peaks is not None]

    def start(self, options: EngineOptions) -> _Session:
        """Build a model runner on every rank and return the session that drives them.

        Raises:
            PanscanError: a rank cannot build it.
        """
        session = next(self._sessions)
        facts = self._command([StartRunner(options, session)] * self._size)[0].facts
        assert facts is not None  # every rank built a runner
        self._pass_seconds = pass_seconds(facts.device)
        return _Session(self, session, facts)

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
            rank.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def launch(self, batch: FlatBatch) -> int:
        """Send a batch to all ranks and return its number.

        Raises:
            EngineError: a rank died or hung.
        """
        self._check()
        message = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        number, self._launched = self._launched, self._launched + 1
        for rank in self._ranks:
            rank.send(message, self._raise_closed)
        return number

    def result(self, number: int) -> PassResult:
        """Wait for the pass with this number and return its result; results of passes before it are discarded.

        Raises:
            EngineError: a rank died or hung.
        """
        while True:
            self._check()
            finished = self._results.get()  # ended by _kill()
            if finished is None:
                self._raise_closed()
            if finished.number == number:
                return finished.result

    def stop(self) -> None:
        """Drop the model runners; the ranks keep their weights.

        Raises:
            EngineError: a rank died or hung.
        """
        self._command([StopRunner()] * self._size, self._pass_seconds)

    def put(self, session: int, levels: NDArray[np.uint8], views: Sequence[View]) -> list[PixelRef]:
        """Distribute an image's views over the ranks in turn, and send the image to each rank that has some.

        Raises:
            EngineError: a rank died or hung.
        """
        with self._numbering:
            refs = [PixelRef(next(self._handles), next(self._turns) % self._size) for _ in views]
        for rank in self._ranks:
            own = [at for at, ref in enumerate(refs) if ref.rank == rank.number]
            if own:
                put = PutPixels(session, [refs[at].handle for at in own], levels, [views[at] for at in own])
                rank.send_pixels(put, self._raise_closed)
        return refs

    def forget(self, refs: Iterable[PixelRef]) -> None:
        """Have the ranks drop pixels."""
        held = list(refs)
        for rank in self._ranks:
            handles = [ref.handle for ref in held if ref.rank == rank.number]
            if handles:
                with suppress(EngineError):  # the rank has exited, and its pixels with it
                    rank.send_pixels(ForgetPixels(handles), self._raise_closed)

    def _command(self, messages: Sequence[Any], seconds: float = _COMMAND_SECONDS) -> list[CommandDone]:
        """Send each rank its command, wait until all are done, and return their answers by rank.

        Raises:
            PanscanError: the error of the first rank that failed. Unless all ranks failed, the group is ended.
            EngineError: a rank died or hung.
        """
        with self._commanding:
            self._check()
            for rank, message in zip(self._ranks, messages, strict=True):
                rank.send(pickle.dumps(message), self._raise_closed)
            answers = self._collect(seconds)
        errors = [answer.error for answer in answers.values() if isinstance(answer, CommandFailed)]
        if len(answers) < self._size or 0 < len(errors) < self._size:
            why = f"not all ranks answered a command within {seconds:.0f} s"
            self._end(str(errors[0]) if errors else why)
        if errors:
            raise errors[0]
        self._check()
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, CommandDone)]

    def _collect(self, seconds: float) -> dict[int, CommandDone | CommandFailed]:
        """Return answers to a command by rank, in the order of their arrival; not all if a rank failed or hung."""
        answers: dict[int, CommandDone | CommandFailed] = {}
        while len(answers) < self._size:
            if any(isinstance(answer, CommandFailed) for answer in answers.values()):
                seconds = _FAILED_SECONDS  # the others may wait for the failed one in a collective
            try:
                rank, answer = self._answers.get(timeout=seconds)
            except queue.Empty:
                break
            if answer is None:
                self._raise_closed()
            answers[rank] = answer
        return answers

    def _receive(self, rank: int, message: Any) -> None:
        """Handle a message of a rank; None: its connection is closed."""
        match message:
            case Heartbeat():
                pass
            case PassFinished():
                self._finished = message.number + 1
                if self._broken is None:  # otherwise the result may combine different passes
                    self._results.put(message)
            case PassFailed():
                self._broken = self._broken or f"rank {rank}: {message.reason}"
            case _:
                self._answers.put((rank, message))

    def _check(self) -> None:
        if self._closed.is_set():
            self._raise_closed()

    def _raise_closed(self) -> NoReturn:
        """Raise an error with the reason why the group was closed."""
        self._closed.wait(_EXIT_SECONDS)  # the watchdog is about to find the reason
        raise EngineError(self._reason or "the engine's processes were closed")

    def _watch(self) -> None:
        """End the group when a rank dies, fails, falls silent or does not finish a pass."""
        while not self._closed.wait(_WATCH_SECONDS):
            self._count_silence()
            if self._failure_reason() is None or self._closed.wait(_WATCH_SECONDS):
                continue
            # Check twice: when a rank dies, the others' passes fail some time before its exit is visible.
            if (reason := self._failure_reason()) is not None:
                self._end(reason)

    def _count_silence(self) -> None:
        """Count the time without messages and finished passes. A clock would include suspension of the program."""
        for rank in self._ranks:
            rank.silent += _WATCH_SECONDS
        stalls = self._launched > self._finished == self._finished_before
        self._stalled = self._stalled + _WATCH_SECONDS if stalls else 0.0
        self._finished_before = self._finished

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
            rank.process.kill()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):  # stuck in a driver: there is nothing else to do
                rank.process.wait(_EXIT_SECONDS)
        self._results.put(None)  # wakes the thread that waits for a result


@dataclass(frozen=True, slots=True)
class _LaunchedOnRanks:
    """A pass on all ranks."""

    group: RankGroup
    number: int

    def wait(self) -> PassResult:
        """See :class:`panscan.engine.model_runner.Launched`."""
        return self.group.result(self.number)


class _Session:
    """The model runners of all ranks as one: a ``panscan.engine.loop.PassExecutor``."""

    def __init__(self, group: RankGroup, number: int, facts: RunnerFacts) -> None:
        self._group, self._number = group, number
        self.facts = facts

    def execute(self, batch: FlatBatch) -> _LaunchedOnRanks:
        """Launch a pass on every rank."""
        return _LaunchedOnRanks(self._group, self._group.launch(batch))

    def put(self, levels: NDArray[np.uint8], views: Sequence[View]) -> list[PixelRef]:
        """See :class:`panscan.engine.prepare.PixelIntake`."""
        return self._group.put(self._number, levels, views)

    def forget(self, refs: Iterable[PixelRef]) -> None:
        """See :class:`panscan.engine.prepare.PixelIntake`."""
        self._group.forget(refs)

    def close(self) -> None:
        """Drop the model runners; the ranks keep their weights."""
        with suppress(EngineError):  # dropped with their processes
            self._group.stop()


class _Rank:
    """One process and its two connections.

    ``silent``: seconds since its last message; the watchdog counts them.

    Args:
        number: rank, from 0.
        on_message: called with the number and each message, in the listener thread; with None at the end.
    """

    def __init__(self, number: int, on_message: Callable[[int, Any], None]) -> None:
        self.number = number
        self.silent = 0.0
        self._on_message = on_message
        self._heard = self._lost = False
        self._sending, self._sending_pixels = threading.Lock(), threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._control, control = _pair()
        self._pixels, pixels = _pair()
        try:
            self.process = subprocess.Popen(
                worker_command("panscan.engine.rank_worker", str(control), str(pixels)),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(control, pixels),
            )
        finally:
            for theirs in (control, pixels):
                os.close(theirs)
        self._listener = threading.Thread(target=self._listen, name=f"panscan-rank-{number}", daemon=True)
        self._listener.start()

    def send(self, message: bytes, raise_closed: Callable[[], NoReturn]) -> None:
        """Send a pickled command or batch; call ``raise_closed`` if the process has exited."""
        try:
            with self._sending:
                self._control.send_bytes(message)
        except OSError:
            raise_closed()

    def send_pixels(self, message: PutPixels | ForgetPixels, raise_closed: Callable[[], NoReturn]) -> None:
        """Send pixels. Thread-safe."""
        try:
            with self._sending_pixels:
                self._pixels.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise_closed()

    def exit_reason(self) -> str | None:
        """Return how the process exited; None: it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code == -signal.SIGKILL:
            return f"rank {self.number} was killed by SIGKILL (by the system, if the host ran out of memory)"
        how = f"was killed by {_SIGNALS.get(-code, -code)}" if code < 0 else f"exited with code {code}"
        return f"rank {self.number} {how}{self._error_text()}"

    def hang_reason(self) -> str | None:
        """Return why the process is considered unresponsive; None if it answers."""
        if self._lost:
            return f"rank {self.number} closed its connection"
        limit = SILENCE_SECONDS if self._heard else _IMPORT_SECONDS
        return f"rank {self.number} has not answered for {self.silent:.0f} s" if self.silent > limit else None

    def release(self) -> None:
        """Close the connections of a killed process, once no thread uses them."""
        if threading.current_thread() is not self._listener:
            self._listener.join(_EXIT_SECONDS)
        with self._sending, self._sending_pixels:
            self._control.close()
            self._pixels.close()
        self._errors.close()

    def _listen(self) -> None:
        with suppress(Exception):  # closed, cut off or not readable: the watchdog ends the group in any case
            while True:
                message = pickle.loads(self._control.recv_bytes())
                self.silent, self._heard = 0.0, True
                self._on_message(self.number, message)
        self._lost = True
        self._on_message(self.number, None)

    def _error_text(self) -> str:
        """Return the last line that the process wrote, as the end of a sentence."""
        lines = os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace").split("\n")
        last = next((" ".join(line.split())[:_ERROR_CHARACTERS] for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


def _pair() -> tuple[Connection, int]:
    """Return a connection, and the file descriptor of its other end for a child process."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs.detach()


def _threads_each(size: int) -> int:
    """Return the threads of each rank: OMP_NUM_THREADS if it is set, else an equal part of the available cores."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // size)
