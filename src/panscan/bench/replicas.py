"""Replicas of one sweep on disjoint devices: one process each, measured at the same time into one run."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from panscan.bench.plan import Observer, SweepPlan, Writer
from panscan.bench.replica_sync import Answer, Message, ReplicaSync, Start
from panscan.core import PanscanError, PanscanWarning, SettingError, UnsupportedError
from panscan.core.process import worker_command

__all__ = ["Slot", "gpu_slots", "run_replicas", "slots"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The devices of one replica.

    Args:
        visible: its CUDA_VISIBLE_DEVICES; None to leave the variable unchanged.
        device: the same devices as this process names them, such as ``cuda:2,3``; "" on a CPU.
    """

    visible: str | None = None
    device: str = ""


def slots(plan: SweepPlan) -> list[Slot]:
    """Return the devices of each replica of a plan: slices of the visible GPUs, or empty slots on a CPU.

    Creates no CUDA context.

    Raises:
        SettingError: a setting is not supported with replicas.
        UnsupportedError: the plan needs more GPUs than are visible.
    """
    from panscan.model.machine import gpu_count

    count, each, size = plan.replicas, plan.gpus_per_replica, _tensor_parallel_size(plan)
    if not _on_gpus(plan):
        if each > 1:
            raise SettingError(f"--gpus-per-replica {each}: this runs on the CPU; --replicas divides its cores")
        return [Slot()] * count
    if 1 < each < size:
        raise SettingError(
            f"--gpus-per-replica {each} is less than --tensor-parallel-size {size}; leave --gpus-per-replica out"
        )
    if each > size and any(cell.settings.device_map is None for cell in plan.cells):
        raise SettingError(f"--gpus-per-replica {each} needs --device-map or --tensor-parallel-size {each}")
    return gpu_slots(count, max(each, size), gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES"), size)


def _tensor_parallel_size(plan: SweepPlan) -> int:
    """Return the largest tensor parallel size in a plan."""
    return max((cell.settings.tensor_parallel_size for cell in plan.cells), default=1)


def gpu_slots(count: int, each: int, there: int, outer: str | None, size: int = 1) -> list[Slot]:
    """Return ``count`` slices of ``each`` GPUs from ``there`` visible ones.

    Args:
        count: slices.
        each: GPUs in a slice.
        there: visible GPUs.
        outer: this process's CUDA_VISIBLE_DEVICES, of numbers or UUIDs; None if it is not set.
        size: the tensor parallel size, which the error names instead of the GPUs per replica if both are equal.

    Raises:
        UnsupportedError: the slices need more GPUs than are visible.
    """
    if count * each > there:
        option = "tensor-parallel-size" if each == size > 1 else "gpus-per-replica"
        raise UnsupportedError(f"--replicas {count} with --{option} {each} need {count * each} GPUs; visible: {there}")
    names = [str(index) for index in range(there)] if outer is None else [name.strip() for name in outer.split(",")]
    slices = [range(first, first + each) for first in range(0, count * each, each)]
    return [Slot(",".join(names[i] for i in part), "cuda:" + ",".join(map(str, part))) for part in slices]


def _on_gpus(plan: SweepPlan) -> bool:
    """Return whether any cell of a plan needs a GPU.

    Raises:
        SettingError, UnsupportedError: a cell's devices are not supported with replicas.
    """
    from panscan.model.machine import resolve_device

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError("--replicas starts its processes itself: leave torchrun out")
    kinds = set()
    for cell in plan.cells:
        settings = cell.settings
        if settings.tp_plan is not None:
            raise SettingError("--tp-plan is not supported with --replicas: each replica would need its own torchrun")
        if settings.device.startswith("cuda:"):
            raise SettingError(f"--device {settings.device}: --replicas chooses the GPUs; --device cuda is enough")
        kinds.add(settings.device if settings.device == "cuda" else resolve_device(settings.device).type)
    if "mps" in kinds:
        raise UnsupportedError("--replicas: this machine has one Apple GPU; --device cpu runs them on the CPU")
    return "cuda" in kinds


def run_replicas(
    plan: SweepPlan, directory: Path, writer: Writer, done: set[tuple[str, int | None]], observer: Observer
) -> None:
    """Run a plan's sweep in each of its replicas at the same time; all replicas start each repeat together.

    If one replica fails in a cell, all skip that cell, its reason names the replica, and the sweep continues. No
    process is left when this returns or raises.

    Args:
        plan: what to measure, and in how many replicas.
        directory: the run directory.
        writer: takes the run's records; it already wrote the header.
        done: visits that an earlier start of this run finished.
        observer: observes the sweep as if it ran in one process.

    Raises:
        SettingError, UnsupportedError: see :func:`slots`.
        PanscanError: a replica died.
    """
    chosen = slots(plan)
    devices = [slot.device for slot in chosen]
    inbox: _Inbox = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        threads = _threads_each(len(chosen), _tensor_parallel_size(plan), on_cpu=not any(devices))
        replicas = [stack.enter_context(_Replica(i, slot, threads, inbox)) for i, slot in enumerate(chosen)]
        for number, replica in enumerate(replicas):
            replica.send(Start(number, plan, done, directory))
        sync = ReplicaSync(
            plan, done, devices, writer=writer, observer=observer, answer=lambda i, answer: replicas[i].send(answer)
        )
        running = set(range(len(replicas)))
        while running:
            number, message = inbox.get()
            if message is not None:
                sync.take(number, message)
            elif sync.has_finished(number):
                running.remove(number)
            else:
                raise replicas[number].death()


def _threads_each(replicas: int, size: int, *, on_cpu: bool) -> int:
    """Return the threads of each process, so that together they use the cores available to this one.

    Args:
        replicas: number of replicas.
        size: processes of each replica, the tensor parallel size.
        on_cpu: whether they compute on the CPU, so that a lack of cores deserves a warning.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if on_cpu and replicas * size > cores:
        processes = f"--replicas {replicas}" + (f" of {size} processes each" if size > 1 else "")
        message = f"{processes} share {cores} CPU core(s), which slows all of them down"
        warnings.warn(message, PanscanWarning, stacklevel=2)
    return max(1, cores // (replicas * size))


_Inbox = queue.SimpleQueue[tuple[int, Message | None]]
"""A replica's number and its message; None once its output has ended."""


class _Replica:
    """The process of one replica. Leaving the context kills it."""

    def __init__(self, number: int, slot: Slot, threads: int, inbox: _Inbox) -> None:
        self._number = number
        self._inbox = inbox
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if slot.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.visible
        self._process = subprocess.Popen(
            worker_command("panscan.bench.replica_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as stream:
                while True:
                    self._inbox.put((self._number, pickle.load(stream)))
        except (EOFError, OSError, pickle.UnpicklingError):
            pass  # the process ended, perhaps in the middle of a message
        finally:
            self._inbox.put((self._number, None))

    def send(self, message: Start | Answer) -> None:
        """Send a message; a dead replica is noticed by the end of its output, not here."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def death(self) -> PanscanError:
        """Return why this replica ended before it finished its sweep."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "")
        return PanscanError(f"replica {self._number} {how}{': ' if last else ''}{last} (finished repeats are kept)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
