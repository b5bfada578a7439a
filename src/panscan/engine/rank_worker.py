"""Tensor parallelism, one rank's side: loads a shard and computes the batches that its parent sends.

One channel to the parent is for commands, batches and results, the other for pixels.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed

from panscan.core import PanscanError
from panscan.core.child import Parent
from panscan.core.errors import error_line
from panscan.engine.model_runner import ModelRunner
from panscan.engine.passes import RunnerFacts, WaitForPass
from panscan.engine.ranks import (
    HEARTBEAT_SECONDS,
    PIXELS,
    CommandReply,
    ForgetPixels,
    LoadShard,
    PassEnded,
    PutPixels,
    RankSignal,
    StartRunner,
    pass_seconds,
)
from panscan.engine.scheduling.batch import FlatBatch, SamplingRow
from panscan.model.checkpoint import Loaded
from panscan.model.load import load_shard
from panscan.model.machine import peak_memory, release_memory, reset_peak_memory
from panscan.model.runtime import forbid_tf32, quiet_libraries
from panscan.model.sharding import ProcessRanks

_PIXEL_SHARE = 0.8  # part of a pass's deadline after which it stops waiting for pixels, and can say so
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class _Worker:
    """One rank: commands on the main thread; pixels, results and heartbeats on separate threads."""

    def __init__(self) -> None:
        self._parent = Parent()
        self._launched: queue.SimpleQueue[tuple[int, WaitForPass] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._failed = threading.Event()
        self._arrived = threading.Condition()
        self._held: set[int] = set()  # handles of pixels that have arrived
        self._passes = count()
        self._session = self._number = 0
        self._wait: WaitForPass
        self._runner: ModelRunner | None = None
        self._loaded: Loaded | None = None
        self._vocab_size = 0
        self._ranks: ProcessRanks | None = None

    def run(self) -> None:
        """Serve commands until the parent closes the connection, which ends this process."""
        for target in (self._send_heartbeats, self._receive_pixels, self._report):
            threading.Thread(target=target, daemon=True).start()
        while True:
            message = self._parent.receive()
            if isinstance(message, FlatBatch | tuple):
                self._compute(message)
            else:
                self._parent.send(CommandReply(self._result_of(message)))

    def _result_of(self, command: Any) -> RunnerFacts | dict[str, int | None] | PanscanError | None:
        """Carry out a command and return its result, or its error."""
        try:
            match command:
                case LoadShard():
                    self._load(command)
                case StartRunner():
                    return self._start(command)
                case RankSignal.STOP_RUNNER:
                    self._drop_runner()
                case RankSignal.REPORT_PEAKS:
                    peaks = peak_memory()
                    reset_peak_memory()
                    return peaks
                case _:
                    raise TypeError(f"unknown command {type(command).__name__}")
        except PanscanError as error:
            return error
        except Exception as error:  # whatever a library raises is the command's failure, and the parent's to report
            traceback.print_exc()
            return PanscanError(f"--tensor-parallel-size: {error_line(error, 300)}")
        return None

    def _load(self, load: LoadShard) -> None:
        quiet_libraries()
        torch.set_num_threads(load.threads)
        self._loaded, self._vocab_size, device = load_shard(load.settings, load.rank, load.size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{load.store}",
            rank=load.rank,
            world_size=load.size,
            timeout=timedelta(minutes=10),
            device_id=device if device.type == "cuda" else None,
        )
        forbid_tf32()
        self._ranks = ProcessRanks(load.rank, load.size, device)
        self._ranks.all_reduce(torch.zeros(1, device=device))  # opens the connections

    def _start(self, start: StartRunner) -> RunnerFacts:
        assert self._loaded is not None and self._ranks is not None  # LoadShard comes first
        if self._runner is not None:  # its engine failed to start, and did not stop it
            self._drop_runner()
        self._session = start.session
        self._runner = ModelRunner(self._loaded, start.options, self._ranks, self._vocab_size)
        gc.freeze()  # else each full collection would visit the modules of PyTorch and Transformers
        return self._runner.facts

    def _compute(self, message: FlatBatch | tuple[SamplingRow, ...]) -> None:
        """Launch a pass, or sample the tokens of the one that was launched without its sampling rows."""
        if isinstance(message, FlatBatch):
            self._number = next(self._passes)
        if self._failed.is_set():
            return  # in a later pass, the other ranks would mistake this one's sums for those of the failed pass
        try:
            if isinstance(message, FlatBatch):
                self._wait = self._execute(message)
            else:
                assert self._runner is not None  # it launched the pass
                self._runner.sample(message)
            if isinstance(message, tuple) or message.sampling is not None:
                self._launched.put((self._number, self._wait))
        except Exception as error:  # the other ranks may be waiting for this one in a collective
            self._report_failure(error, self._number)

    def _execute(self, batch: FlatBatch) -> WaitForPass:
        runner, ranks = self._runner, self._ranks
        if runner is None or ranks is None:
            raise RuntimeError("a batch came before its model runner was built")
        handles = {view.pixels for view in batch.encode if view.pixels % ranks.size == ranks.rank}
        seconds = _PIXEL_SHARE * pass_seconds(runner.facts.device)
        with self._arrived:
            if not self._arrived.wait_for(lambda: handles <= self._held, seconds):
                raise TimeoutError(f"the pixels of a view did not arrive in {seconds:.0f} s")
            self._held -= handles
        return runner.execute(batch)

    def _report(self) -> None:
        """Wait for each pass in turn; rank 0 sends its result."""
        with torch.no_grad():
            while True:
                launched = self._launched.get()
                if launched is None:
                    self._idle.set()
                    continue
                number, wait = launched
                try:
                    result = wait()
                except Exception as error:  # devices report failures of a pass at the next synchronisation
                    self._report_failure(error, number)
                    continue
                if self._ranks is not None and self._ranks.rank == 0:
                    self._parent.send(PassEnded(number, result))
                del launched, wait, result  # otherwise their tensors live until the next pass

    def _receive_pixels(self) -> None:
        try:
            while True:
                self._store_pixels(self._parent.receive(PIXELS))
        except Exception as error:  # for example, out of memory
            self._report_failure(error)

    def _store_pixels(self, message: PutPixels | ForgetPixels) -> None:
        runner = self._runner
        if runner is None:
            return
        if isinstance(message, ForgetPixels):
            runner.pixels.forget(message.handles)
            with self._arrived:
                self._held -= {*message.handles}
        elif message.session == self._session:
            runner.pixels.put(message.levels, message.views, message.handles)
            with self._arrived:
                if self._runner is runner:  # else its pixels were dropped in the meantime
                    self._held |= {*message.handles}
                    self._arrived.notify_all()

    def _send_heartbeats(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_SECONDS):
            self._parent.send(RankSignal.HEARTBEAT)

    def _drop_runner(self) -> None:
        self._launched.put(None)
        self._idle.wait()  # until passes in flight have finished, which use the runner's tensors
        self._idle.clear()
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            gc.unfreeze()
        with self._arrived:
            self._held.clear()
        release_memory()

    def _report_failure(self, error: Exception, number: int = 0) -> None:
        self._failed.set()
        traceback.print_exc()
        self._parent.send(PassEnded(number, error_line(error, 300)))


def main() -> None:
    """Serve the parent until it closes the connection."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _LOOPBACK)  # the ranks are on one host, whose name may not resolve
    _Worker().run()
