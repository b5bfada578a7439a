"""A writer of traces in Kineto's format, and two traces with known times. Times are in microseconds."""

import gzip
import json
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

HOST = 4242
"""Process and main thread of the written traces."""

H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_110_011_392, "computeMajor": 9, "computeMinor": 0}


class KinetoTrace:
    """Events as libkineto writes them, with flow events between launches and kernels."""

    def __init__(self, *, gpu: dict[str, Any] | None = H200) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": 0, "pid": HOST, "tid": 0, "args": {"name": "python"}}
        ]
        self.metadata: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [gpu] if gpu else []}
        self._ids = count(1)

    def cpu(self, category: str, name: str, start: float, duration: float, tid: int = HOST, **arguments: Any) -> None:
        """Add a CPU range."""
        where = {"pid": HOST, "tid": tid, "ts": start, "dur": duration}
        self.events.append({"ph": "X", "cat": category, "name": name, **where, "args": arguments})

    def python(self, name: str, start: float, duration: float) -> None:
        """Add a call of a Python function."""
        self.cpu("python_function", name, start, duration)

    def launch(
        self, at: float, kernels: list[tuple[str, float, float]], *, stream: int = 7, device: int = 0, tid: int = HOST
    ) -> None:
        """Add a launch of ``(name, start, duration)``; several kernels make it the launch of a graph."""
        correlation = next(self._ids)
        call = "cudaLaunchKernel" if len(kernels) == 1 else "cudaGraphLaunch"
        if kernels[0][0].startswith(("Memcpy", "Memset")):
            call = "cudaMemcpyAsync" if kernels[0][0].startswith("Memcpy") else "cudaMemsetAsync"
        self.cpu("cuda_runtime", call, at, 5, tid, correlation=correlation, cbid=211)
        self._flow("s", correlation, HOST, tid, at)
        for name, start, duration in kernels:
            category = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
            more = {"bytes": 4096} if category != "kernel" else {"grid": [1, 1, 1]}
            arguments = {"device": device, "stream": stream, "correlation": correlation}
            where = {"pid": device, "tid": stream, "ts": start, "dur": duration}
            self.events.append({"ph": "X", "cat": category, "name": name, **where, "args": arguments | more})
            self._flow("f", correlation, device, stream, start)

    def _flow(self, phase: str, identity: int, pid: int, tid: int, at: float) -> None:
        self.events.append(
            {"ph": phase, "id": identity, "pid": pid, "tid": tid, "ts": at, "cat": "ac2g", "name": "ac2g", "bp": "e"}
        )

    def text(self) -> str:
        """Return the trace as JSON: events between metadata, as libkineto orders them."""
        return json.dumps({**self.metadata, "traceEvents": self.events, "traceName": "trace.json"})

    def save(self, path: Path) -> Path:
        """Write the trace; a name that ends in ``.gz`` is compressed."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def decode_trace(*, steps: int = 4, prepare: float = 8000, graph: bool = False, phases: bool = True) -> KinetoTrace:
    """Return a prefill of 30 ms and decode steps of 12 ms plus ``prepare`` each.

    A step prepares inputs for ``prepare`` on the CPU, then launches 4 kernels of 2000 that run one after the other from
    100 after the first launch (or one graph of them) and a copy of 10, 10 after them. The CPU waits for these until
    8200 after the first launch, works 1800 more in the step, and 2000 between the steps.
    """
    trace = KinetoTrace()
    period = prepare + 12_000
    trace.python("generation/utils.py(10): _sample", 0, 30_000 + steps * period)
    if phases:
        trace.cpu("user_annotation", "panscan.request", 0, 30_000 + steps * period)
        trace.cpu("user_annotation", "panscan.prefill", 0, 30_000)
    trace.cpu("cpu_op", "aten::mm", 100, 100)
    trace.launch(110, [("nvjet_tst_128x64", 1000, 20_000)])
    for step in range(steps):
        begin = 30_000 + step * period
        forward = begin + prepare
        if phases:
            trace.cpu("user_annotation", "panscan.decode", begin, period - 2000)
        trace.python("generation/utils.py(20): prepare_inputs_for_generation", begin, prepare)
        trace.cpu("cpu_op", "aten::arange", begin + prepare / 4, prepare / 4)
        trace.python("modeling.py(5): forward", forward, 2000)
        kernels = [(f"layer_kernel<{k % 2}>", forward + 100 + 2000 * k, 2000.0) for k in range(4)]
        for index, launched in enumerate([kernels] if graph else [[kernel] for kernel in kernels]):
            trace.launch(forward + 200 * index, launched)
        trace.launch(forward + 1000, [("Memcpy DtoH (Device -> Pinned)", forward + 8110, 10)])
        trace.cpu("cuda_runtime", "cudaStreamSynchronize", forward + 2000, 6200)
    return trace


def busy_trace(seed: int = 0, *, kernels: int = 600) -> KinetoTrace:
    """Return overlapping kernels, collectives, copies and fills on three streams, launched early or late."""
    random, trace = Random(seed), KinetoTrace()
    names = [
        "gemm",
        "void at::native::add<float>(float*)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "softmax",
    ]
    free = dict.fromkeys((7, 20, 24), 1000)
    for _ in range(kernels):
        stream = random.choice(list(free))
        start = free[stream] + random.choice((0, 1, 3, 29, 30, 31, 200))
        duration = random.randint(1, 60)
        launched = start - random.choice((5, 10, 100, 400))
        trace.launch(launched, [(random.choice(names), start, duration)], stream=stream)
        free[stream] = start + duration
    trace.cpu("cpu_op", "aten::linear", 500, 100)
    return trace
