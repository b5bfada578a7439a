"""Tensor parallelism, one rank's side: loads a shard and computes the batches that its parent sends.

One channel to the parent is for calls, batches and results, the other for pixels.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from datetime import timedelta

import torch
from torch import distributed

from panscan.core import PanscanError
from panscan.core.child import Parent
from panscan.core.errors import error_line
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import RunnerFacts, WaitForPass
from panscan.engine.ranks import PIXELS, PassFailed, RankReply, pass_seconds
from panscan.engine.scheduling.batch import FlatBatch, SamplingRow
from panscan.model.checkpoint import Loaded
from panscan.model.load import load_shard
from panscan.model.machine import peak_memory, release_memory, reset_peak_memory
from panscan.model.runtime import quiet_libraries
from panscan.model.sharding import ProcessRanks
from panscan.settings import Settings

_HEARTBEAT_SECONDS = 2.0
_PIXEL_SHARE = 0.8  # part of a pass's deadline after which it stops waiting for pixels, and can say so
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class RankWorker:
    """One rank: calls and batches on the main thread; pixels, results and heartbeats on separate threads."""

    def __init__(self) -> None:
        self._parent = Parent()
        self._launched: queue.Queue[WaitForPass] = queue.Queue()
        self._failed = False
        self._wait: WaitForPass
        self._loaded: Loaded
        self._ranks: ProcessRanks
        self._runner: ModelRunner | None = None

    def run(self) -> None:
        """Serve the parent until it closes the connection, which ends this process."""
        for target in (self._send_heartbeats, self._receive_pixels, self._report):
            threading.Thread(target=target, daemon=True).start()
        while True:
            message = self._parent.receive()
            if isinstance(message, FlatBatch | tuple):
                self._compute(message)
                continue
            try:
                result = message(self)
            except PanscanError as error:
                result = error
            except Exception as error:  # whatever a library raises is the parent's to report
                traceback.print_exc()
                result = PanscanError(f"--tensor-parallel-size: {error_line(error, 300)}")
            self._parent.send(RankReply(result))

    def load(self, settings: Settings, rank: int, size: int, store: str, threads: int) -> None:
        """Load a shard.

        Args:
            settings: settings with the model and the device.
            rank: number of the shard, starting at 0.
            size: number of ranks.
            store: file through which the ranks find each other.
            threads: CPU threads of the rank.
        """
        quiet_libraries()
        torch.set_num_threads(threads)
        self._loaded = load_shard(settings, rank, size)
        device = self._loaded.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=10),
            device_id=device if device.type == "cuda" else None,
        )
        self._ranks = ProcessRanks(rank, size, device)
        self._ranks.all_reduce(torch.zeros(1, device=device))  # opens the connections
        gc.freeze()  # else each full collection would visit the modules of PyTorch and Transformers

    def start_runner(self, options: EngineOptions) -> RunnerFacts:
        """Build a model runner and return its facts."""
        if self._runner is not None:  # its engine failed to start, and did not stop it
            self.stop_runner()
        self._runner = ModelRunner(self._loaded, options, self._ranks)
        self._runner.pixels.patience = _PIXEL_SHARE * pass_seconds(self._runner.facts.device)
        return self._runner.facts

    def stop_runner(self) -> None:
        """Drop the model runner and keep the weights."""
        self._launched.join()  # passes in flight use the runner's tensors
        if self._runner is not None:
            self._runner.stop()
            self._runner = None
        release_memory()

    def report_peaks(self) -> dict[str, int | None]:
        """Return peak memory since the last call (see :func:`panscan.model.machine.peak_memory`)."""
        peaks = peak_memory()
        reset_peak_memory()
        return peaks

    def _compute(self, message: FlatBatch | tuple[SamplingRow, ...]) -> None:
        """Launch a pass, or sample the tokens of the one that was launched without its sampling rows."""
        if self._failed:
            return  # in a later pass, the other ranks would mistake this one's sums for those of the failed pass
        try:
            if self._runner is None:
                raise RuntimeError("a batch came before its model runner was built")
            if isinstance(message, FlatBatch):
                self._wait = self._runner.execute(message)
                if message.sampling is None:  # its rows follow
                    return
            else:
                self._runner.sample(message)
            self._launched.put(self._wait)
        except Exception as error:  # the other ranks may be waiting for this one in a collective
            self._report_failure(error)

    def _report(self) -> None:
        """Wait for each pass in turn; rank 0 sends its result."""
        with torch.no_grad():
            while True:
                wait = self._launched.get()
                try:
                    result = wait()
                    if self._ranks.rank == 0:
                        self._parent.send(result)
                    del result
                except Exception as error:  # devices report failures of a pass at the next synchronisation
                    self._report_failure(error)
                del wait  # otherwise its tensors live until the next pass
                self._launched.task_done()

    def _receive_pixels(self) -> None:
        """Have the pixel store put or forget pixels. Without a model runner, a thread was still preparing them when the
        engine ended."""
        try:
            while True:
                call = self._parent.receive(PIXELS)
                if (runner := self._runner) is not None:
                    call(runner.pixels)
        except Exception as error:  # for example, out of memory
            self._report_failure(error)

    def _send_heartbeats(self) -> None:
        pause = threading.Event()
        while not pause.wait(_HEARTBEAT_SECONDS):
            self._parent.send("heartbeat")

    def _report_failure(self, error: Exception) -> None:
        self._failed = True
        traceback.print_exc()
        self._parent.send(PassFailed(error_line(error, 300)))


def main() -> None:
    """Serve the parent until it closes the connection."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _LOOPBACK)  # the ranks are on one host, whose name may not resolve
    RankWorker().run()
