"""This machine: its devices, their memory, precision, events and results, and facts about them for records."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import psutil
import torch

from panscan.core import UnsupportedError
from panscan.core.errors import brief

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_capturing = Lock()
_T = TypeVar("_T")
_limits: dict[int, list[float]] = {}  # by GPU: the limits of this process's engines; the lowest applies


def resolve_device(name: str) -> torch.device:
    """The device a name stands for; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        UnsupportedError: a device that is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UnsupportedError(f"--device {name}: {count or 'no'} NVIDIA GPU(s) visible")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UnsupportedError("--device mps: this machine has no Apple GPU")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator and float32 on a CPU; fp16 is allowed, though Gemma 3 overflows in it."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]


def release_memory() -> None:
    """Collect unreferenced objects, and return cached blocks to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations, as it does once a large block was freed.

    Otherwise it may return the end of the heap to the system after each pass on a CPU, and the next one waits for
    hundreds of pages. Has no effect with other allocators, or where variables of the environment set the thresholds.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)  # 32 MiB is the highest threshold that glibc chooses


def measure_memory(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes of a device's memory: in total, free, and reserved by this process's allocator.

    MPS shares the computer's memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free, torch.cuda.memory_reserved(device)
    memory = psutil.virtual_memory()
    return memory.total, memory.available, 0


def limit_process_memory(device: torch.device, bound: int) -> Callable[[], None]:
    """Limit the memory that PyTorch may reserve on an NVIDIA GPU; return a function that removes the limit.

    Beyond the limit, allocations raise ``torch.OutOfMemoryError``. The CUDA context is not counted. Other devices have
    no limit.

    Args:
        device: the device.
        bound: bytes.
    """
    if device.type != "cuda":
        return lambda: None
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = _limits.setdefault(index, [])
    limits.append(min(1.0, bound / torch.cuda.mem_get_info(index)[1]))
    torch.cuda.set_per_process_memory_fraction(min(limits), index)

    def lift(limit: float = limits[-1]) -> None:
        limits.remove(limit)
        torch.cuda.set_per_process_memory_fraction(min(limits, default=1.0), index)

    return lift


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


@contextlib.contextmanager
def memory_advice() -> Iterator[None]:
    """Say which settings to lower where ``generate()`` runs out of memory.

    Raises:
        UnsupportedError: instead of the device's error.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fix = "lower --batch-size, --max-num-crops or --max-new-tokens, or use --quantization or the engine"
        raise UnsupportedError(f"out of memory in generate(): {fix} ({brief(error)})") from error


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def reset_peak_memory() -> None:
    """Start new peaks: on every GPU in use, and of this process where the system lets it (Linux)."""
    for index in _initialised_gpus():
        torch.cuda.reset_peak_memory_stats(index)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident size


def peak_memory() -> dict[str, int | None]:
    """Peak bytes since :func:`reset_peak_memory`: allocated and reserved, summed over GPUs (None without one in use),
    and the process's resident size (None where its peak cannot be reset, so that it would be an earlier cell's)."""
    devices = _initialised_gpus()
    return {
        "peak_allocated_bytes": sum(map(torch.cuda.max_memory_allocated, devices)) if devices else None,
        "peak_reserved_bytes": sum(map(torch.cuda.max_memory_reserved, devices)) if devices else None,
        "peak_rss_bytes": _peak_rss(),
    }


def gpu_facts() -> list[dict[str, Any]]:
    """Name, memory in bytes, compute capability, multiprocessors and driver of each visible NVIDIA GPU."""
    return [
        {
            "name": facts.name,
            "memory_bytes": facts.total_memory,
            "capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": facts.multi_processor_count,
            "driver": _driver(),
        }
        for facts in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def thread_count() -> int:
    """Threads that PyTorch computes with on the CPU."""
    return torch.get_num_threads()


def set_thread_count(threads: int) -> None:
    """Set how many threads PyTorch computes with on the CPU."""
    torch.set_num_threads(threads)


def gpu_count() -> int:
    """Visible NVIDIA GPUs. No CUDA context is made."""
    return torch.cuda.device_count()


def cuda_version() -> str | None:
    """The CUDA version that PyTorch was built for; None for a CPU build."""
    return torch.version.cuda


def record_event(device: torch.device, *, blocking: bool = False) -> Any:
    """Record and return a ``torch.cuda.Event`` after the work enqueued so far on the current stream.

    Args:
        device: an NVIDIA GPU.
        blocking: a thread that waits for the event sleeps instead of spinning.
    """
    event: Any = torch.cuda.Event  # its calls have no types
    event = event(enable_timing=True, blocking=blocking)
    event.record(torch.cuda.current_stream(device))
    return event


def side_stream(device: torch.device) -> Any:
    """Return a new ``torch.cuda.Stream`` of an NVIDIA GPU."""
    stream: Any = torch.cuda.Stream  # it has no types
    return stream(device)


_capture_stream = cache(side_stream)  # one for all engines: PyTorch keeps 32 MiB for each stream that ran a product


class GraphRecorder:
    """Records CUDA graphs of one GPU. They share their memory, since only one of them runs at a time.

    Args:
        device: the GPU.
        capture: record. Without, functions are called again, on any device.
    """

    def __init__(self, device: torch.device, *, capture: bool = True) -> None:
        self.device, self.capture = device, capture
        self._pool: Any = None

    def record(self, body: Callable[[], _T]) -> Callable[[], _T]:
        """Record what a function launches; return a function that launches it again and returns the same tensors.

        They are valid until the next replay. Graphs refer to tensors by address: the caller keeps those that the
        function reads.
        """
        if not self.capture:
            return body
        stream = _capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph: Any = torch.cuda.CUDAGraph
        graph = graph()
        with _capturing:  # engines of one process share the stream
            with torch.cuda.stream(stream):
                body()  # one-time compilation and allocation must not happen while recording
            torch.cuda.current_stream(self.device).wait_stream(stream)
            torch.cuda.synchronize(self.device)
            # Other threads may allocate and copy pixels meanwhile; "thread_local" does not treat that as an error.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = body()
        self._pool = self._pool or graph.pool()

        def replay() -> _T:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class Readback:
    """Tensors that are being copied to the host.

    Args:
        host: copies on the host.
        done: CUDA event, reached when the copies are complete; None: they are complete.
    """

    host: tuple[torch.Tensor, ...]
    done: Any

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Readback:
        """Enqueue copies of tensors behind the work of their device."""
        if not tensors or tensors[0].device.type != "cuda":
            return cls(tuple(tensor.cpu() for tensor in tensors), None)
        host = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(host, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return cls(host, record_event(tensors[0].device, blocking=True))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the copies and return them."""
        if self.done is not None:
            self.done.synchronize()
        return self.host


def _initialised_gpus() -> range:
    """Return all visible GPUs if CUDA is initialised in this process, else none: a query must not initialise it."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    return range(torch.cuda.device_count() if started else 0)


def _peak_rss() -> int | None:
    try:
        lines = _STATUS.read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
