"""Tensor parallelism, the parent's side: one process per rank, joined by messages of plain data.

Every rank gets the same batches in the same order; rank 0 sends the results back. Pixels have a connection of their
own, so that a page does not hold up a pass. A watchdog kills all ranks when one of them dies or stops answering, and
everything that waits for the group raises the reason.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
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
from panscan.core.process import time_line
from panscan.engine.model_runner import PassResult, RunnerFacts
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import FlatBatch
from panscan.engine.views import PixelRef
from panscan.settings import Settings

__all__ = [
    "BEAT_SECONDS",
    "Beat",
    "Broken",
    "Failed",
    "Forget",
    "Landed",
    "Load",
    "Memory",
    "Put",
    "RankGroup",
    "Ready",
    "Start",
    "Stop",
]

SILENCE_SECONDS = 30.0
"""A rank that sends nothing for this long is taken for hung. It sends a heartbeat every :data:`BEAT_SECONDS`."""
BEAT_SECONDS = 2.0
_PASS_SECONDS = {"cuda": 30.0}  # for one pass: a collective that waits for a lost rank never returns
_SLOW_PASS_SECONDS = 600.0  # where a CPU computes it
_WATCH_SECONDS = 0.5
_LAST_WORDS = 300  # characters of a rank's last error message


@dataclass(frozen=True, slots=True)
class Load:
    """To a rank: load this shard.

    Args:
        settings: name the model and the device.
        rank: which shard, from 0.
        size: number of ranks.
        store: a file through which the ranks find each other.
        threads: threads of the rank's products on a CPU.
        time_line: origin of the parent's time line (see :func:`panscan.core.process.join_time_line`).
    """

    settings: Settings
    rank: int
    size: int
    store: str
    threads: int
    time_line: float


@dataclass(frozen=True, slots=True)
class Start:
    """To a rank: build a model runner."""

    options: EngineOptions


@dataclass(frozen=True, slots=True)
class Stop:
    """To a rank: drop the model runner, keep the weights."""


@dataclass(frozen=True, slots=True)
class Put:
    """To a rank, over its connection for pixels: keep the pixels of these views (see ``PixelStore.put``)."""

    handles: list[int]
    levels: NDArray[np.uint8]
    views: list[View] | None


@dataclass(frozen=True, slots=True)
class Forget:
    """To a rank, over its connection for pixels: drop them."""

    handles: list[int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes that PyTorch reserved and allocated on each rank's GPU; 0 on a CPU."""

    reserved: tuple[int, ...]
    allocated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """From a rank: the last command is done. ``facts``: of a new model runner."""

    facts: RunnerFacts | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """From rank 0: a pass is over."""

    result: PassResult


@dataclass(frozen=True, slots=True)
class Beat:
    """From a rank: it is alive. Peak bytes of its GPU's memory, reserved and allocated."""

    reserved: int = 0
    allocated: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank: its command failed."""

    error: PanscanError


@dataclass(frozen=True, slots=True)
class Broken:
    """From a rank: a pass failed. The others may wait for it in a collective, so the group has to end."""

    reason: str


class RankGroup:
    """The processes of one model, started and loaded.

    Args:
        settings: name the model, the device and ``tensor_parallel_size``.

    Raises:
        PanscanError: a rank cannot load its shard.
        EngineError: a rank died.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._size = settings, settings.tensor_parallel_size
        self._failure: EngineError | None = None
        self._results: queue.SimpleQueue[Landed | None] = queue.SimpleQueue()
        self._launched: dict[int, float] = {}  # passes in flight, and when they were launched
        self._numbers, self._turns = count(), count()
        self._handles = count()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pass_seconds = _SLOW_PASS_SECONDS
        self._folder = tempfile.TemporaryDirectory(prefix="panscan-ranks-")
        self._ranks: list[_Rank] = []
        try:
            for rank in range(self._size):
                self._ranks.append(_Rank(rank, self._took_result))
            threading.Thread(target=self._watch, name="panscan-ranks", daemon=True).start()
            store, threads = str(Path(self._folder.name) / "store"), _threads_each(self._size)
            self._command([Load(settings, rank, self._size, store, threads, time_line()) for rank in range(self._size)])
        except BaseException:
            self.close()
            raise

    @property
    def failed(self) -> bool:
        """Whether the group was ended because of a rank."""
        return self._failure is not None

    @property
    def processes(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def peak_memory(self) -> Memory:
        """Return the peaks of GPU memory that the ranks last reported."""
        beats = [rank.beat for rank in self._ranks]
        return Memory(tuple(beat.reserved for beat in beats), tuple(beat.allocated for beat in beats))

    def start(self, options: EngineOptions) -> _Session:
        """Build model runners of these sizes and return what drives them.

        Raises:
            PanscanError: a rank cannot build it.
        """
        facts = self._command([Start(options)] * self._size)
        assert facts is not None  # every rank built a runner
        self._pass_seconds = _PASS_SECONDS.get(facts.device, _SLOW_PASS_SECONDS)
        return _Session(self, facts)

    def close(self) -> None:
        """Kill the ranks. Nothing of them is left when this returns."""
        self._closed.set()
        self._kill()
        for rank in self._ranks:
            rank.release()
        self._folder.cleanup()

    # What a session needs.

    def launch(self, batch: FlatBatch) -> int:
        """Send a batch to all ranks and return its number."""
        message = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        number = next(self._numbers)
        self._launched[number] = time.monotonic()
        for rank in self._ranks:
            rank.send(message, self._gone)
        return number

    def result(self, number: int) -> PassResult:
        """Return the result of the pass with this number, which must be the oldest in flight.

        Raises:
            EngineError: a rank died or hung.
        """
        landed = None if self.failed else self._results.get()
        if landed is None:
            self._gone()
        self._launched.pop(number, None)
        return landed.result

    def stop(self) -> None:
        """Drop the model runners."""
        if not self.failed and not self._closed.is_set():
            self._command([Stop()] * self._size)

    def put(self, levels: NDArray[np.uint8], views: Sequence[View] | None) -> list[PixelRef]:
        """Share views out over the ranks, in turn, and send each its pixels."""
        with self._lock:
            total = len(levels) if views is None else len(views)
            refs = [PixelRef(next(self._handles), next(self._turns) % self._size) for _ in range(total)]
        for rank in self._ranks:
            own = [at for at, ref in enumerate(refs) if ref.rank == rank.number]
            if own:
                chosen = None if views is None else [views[at] for at in own]
                sent = levels[own] if views is None else levels
                rank.send_pixels(Put([refs[at].handle for at in own], sent, chosen), self._gone)
        return refs

    def forget(self, refs: Iterable[PixelRef]) -> None:
        """Have the ranks drop pixels."""
        held = list(refs)
        for rank in self._ranks:
            handles = [ref.handle for ref in held if ref.rank == rank.number]
            if handles:
                with suppress(EngineError):  # the pixels are gone with the rank
                    rank.send_pixels(Forget(handles), self._gone)

    def _command(self, messages: Sequence[Any]) -> RunnerFacts | None:
        """Send each rank its command and wait until all are done; return the facts of the first."""
        for rank, message in zip(self._ranks, messages, strict=True):
            rank.send(pickle.dumps(message), self._gone)
        answers = [rank.answer() for rank in self._ranks]
        errors = [answer.error for answer in answers if isinstance(answer, Failed)]
        if errors:
            raise errors[0]
        if any(answer is None for answer in answers):
            self._gone()
        return next(answer.facts for answer in answers if isinstance(answer, Ready))

    def _took_result(self, landed: Landed) -> None:
        self._results.put(landed)

    def _gone(self) -> NoReturn:
        """Raise the reason why the ranks are of no use any more."""
        self._closed.wait(2 * _WATCH_SECONDS)  # the watchdog is about to find out
        if self._failure is not None:
            raise self._failure
        raise EngineError("the engine's processes were closed")

    def _watch(self) -> None:
        """End the group when a rank dies, fails, falls silent or does not finish a pass."""
        while not self._closed.wait(_WATCH_SECONDS):
            if (reason := self._trouble()) is not None:
                self._failure = EngineError(f"--tensor-parallel-size {self._size}: {reason}")
                self._closed.set()
                self._kill()
                return

    def _trouble(self) -> str | None:
        for rank in self._ranks:
            if (reason := rank.trouble()) is not None:
                return reason
        oldest = min(list(self._launched.values()), default=None)
        if oldest is not None and time.monotonic() - oldest > self._pass_seconds:
            return f"a pass took more than {self._pass_seconds:.0f} s"
        return None

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._results.put(None)  # for the thread that waits for a result


@dataclass(frozen=True, slots=True)
class _LaunchedThere:
    """A pass on all ranks."""

    group: RankGroup
    number: int

    def wait(self) -> PassResult:
        """See :class:`panscan.engine.model_runner.Launched`."""
        return self.group.result(self.number)


class _Session:
    """The model runners of all ranks as one: what an engine's loop drives (see ``panscan.engine.loop.Runner``)."""

    def __init__(self, group: RankGroup, facts: RunnerFacts) -> None:
        self._group = group
        self.facts = facts

    def execute(self, batch: FlatBatch) -> _LaunchedThere:
        """Launch a pass on every rank."""
        return _LaunchedThere(self._group, self._group.launch(batch))

    def put(self, levels: NDArray[np.uint8], views: Sequence[View] | None) -> list[PixelRef]:
        """See :class:`panscan.engine.prepare.PixelIntake`."""
        return self._group.put(levels, views)

    def forget(self, refs: Iterable[PixelRef]) -> None:
        """See :class:`panscan.engine.prepare.PixelIntake`."""
        self._group.forget(refs)

    def close(self) -> None:
        """Drop the model runners; the ranks keep their weights."""
        with suppress(EngineError):
            self._group.stop()


class _Rank:
    """One process, its two connections, and what it last said."""

    def __init__(self, number: int, on_result: Callable[[Landed], None]) -> None:
        self.number = number
        self.beat = Beat()
        self._heard = time.monotonic()
        self._on_result = on_result
        self._answers: queue.SimpleQueue[Ready | Failed | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._sending, self._sending_pixels = threading.Lock(), threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._control, control = _pair()
        self._pixels, pixels = _pair()
        self.process = subprocess.Popen(
            # -P: a module in the working directory must not shadow a library
            [sys.executable, "-P", "-m", "panscan.engine.rank_worker", str(control), str(pixels)],
            stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors, pass_fds=(control, pixels),
        )  # fmt: skip
        for theirs in (control, pixels):
            os.close(theirs)
        threading.Thread(target=self._listen, name=f"panscan-rank-{number}", daemon=True).start()

    def send(self, message: bytes, gone: Callable[[], NoReturn]) -> None:
        """Send a pickled command or batch; ``gone`` raises if the process is not there any more."""
        try:
            with self._sending:
                self._control.send_bytes(message)
        except OSError:
            gone()

    def send_pixels(self, message: Put | Forget, gone: Callable[[], NoReturn]) -> None:
        """Send pixels; any thread may."""
        try:
            with self._sending_pixels:
                self._pixels.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            gone()

    def answer(self) -> Ready | Failed | None:
        """Wait for the answer to a command; None if the process ended instead."""
        return self._answers.get()

    def trouble(self) -> str | None:
        """Return why this rank is of no use, or None."""
        if self._failure is not None:
            return f"rank {self.number}: {self._failure}"
        code = self.process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"rank {self.number} {how}{self._last_words()}"
        silent = time.monotonic() - self._heard
        return f"rank {self.number} has not answered for {silent:.0f} s" if silent > SILENCE_SECONDS else None

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def release(self) -> None:
        """Close the connections of a killed process."""
        self._control.close()
        self._pixels.close()
        self._errors.close()

    def _listen(self) -> None:
        try:
            while True:
                message = pickle.loads(self._control.recv_bytes())
                self._heard = time.monotonic()
                match message:
                    case Landed():
                        self._on_result(message)
                    case Beat():
                        self.beat = message
                    case Broken():
                        self._failure = message.reason
                    case _:
                        self._answers.put(message)
        except (EOFError, OSError):
            self._answers.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((" ".join(line.split())[:_LAST_WORDS] for line in reversed(lines) if line.strip()), "")
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
