"""What a summary of a trace holds: plain dataclasses; times in milliseconds unless a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = ""
"""Name of the filler for idle time without any CPU event."""


@dataclass(frozen=True, slots=True)
class IdleSplit:
    """Idle time by cause, in the terms of HolisticTraceAnalysis.

    Args:
        host_wait_ms: the next activity was launched only after the last one had ended.
        kernel_wait_ms: shorter than 30 us, and not host wait: the delay between two launched kernels.
        other_ms: the rest, such as waits for another stream.
    """

    host_wait_ms: float
    kernel_wait_ms: float
    other_ms: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """One GPU from its first to its last activity; the four parts add up to ``span_ms``.

    Args:
        device: number of the GPU.
        streams: number of streams with activities.
        activities: number of kernels, copies and fills.
        span_ms: time from the start of the first activity to the end of the last.
        compute_ms: time with a compute kernel.
        communication_ms: time with a collective operation and no compute kernel.
        memory_ms: time with a copy or fill alone.
        idle_ms: time without any activity.
        idle: idle time by cause.
        idle_by_stream: the same for the gaps of each stream alone, as HolisticTraceAnalysis reports it.
    """

    device: str
    streams: int
    activities: int
    span_ms: float
    compute_ms: float
    communication_ms: float
    memory_ms: float
    idle_ms: float
    idle: IdleSplit
    idle_by_stream: dict[str, IdleSplit]

    @property
    def busy_ms(self) -> float:
        """Time with any activity."""
        return self.compute_ms + self.communication_ms + self.memory_ms


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """All ranges of one phase.

    Args:
        name: name of the phase without ``panscan.``.
        count: number of ranges.
        total_ms: wall time of all ranges.
        busy_ms: part of it with activity on any GPU; without a GPU: in an operator on the main thread.
        idle_ms: the rest of ``total_ms``.
        launches: kernel and graph launches that began in the ranges.
    """

    name: str
    count: int
    total_ms: float
    busy_ms: float
    idle_ms: float
    launches: int


@dataclass(frozen=True, slots=True)
class Filler:
    """A CPU function that runs while the GPU is idle; per step if the trace has steps.

    Args:
        name: operator, Python function, runtime call or annotation; empty: nothing was recorded.
        kind: "operator", "runtime", "annotation", "python" or "" (nothing recorded).
        self_ms: idle time while this function is innermost.
        total_ms: idle time while it is on the stack.
        stack_ms: time on the stack, whether the GPU is idle or not.
        depth: mean number of functions around it.
    """

    name: str
    kind: str
    self_ms: float
    total_ms: float
    stack_ms: float
    depth: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step: from the start of one to the start of the next. Without steps: the whole trace as one.

    Args:
        name: "decode step", "step" or "trace".
        count: number of steps.
        step_ms: mean wall time.
        busy_ms: part of it with activity on any GPU; without a GPU: in an operator on the main thread.
        idle_ms: the rest.
        gap_ms: mean of the longest idle stretch that begins in each step; it may end in the next one.
        kernels: GPU kernels that start in a step.
        kernel_launches: kernel launches by the CPU per step.
        graph_launches: CUDA graph launches per step.
        copies: copies and fills on the GPU per step.
        thread: the thread that launches, or the one with most operators.
        fillers: CPU activity during the idle time, on the thread whose launch ends it; most self time first.
        cause: the innermost function with at least half of the idle time that does not run all the time; None: there
            is none.
    """

    name: str
    count: int
    step_ms: float
    busy_ms: float
    idle_ms: float
    gap_ms: float
    kernels: float
    kernel_launches: float
    graph_launches: float
    copies: float
    thread: str
    fillers: tuple[Filler, ...]
    cause: Filler | None


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All activities of one name.

    Args:
        name: name of the kernel, copy or fill.
        kind: "compute", "communication" or "memory".
        count: number of activities.
        total_ms: sum of their durations.
        mean_us: mean duration in microseconds.
        share: part of the sum over all activities.
        bytes_per_s: achieved bandwidth, where the trace has the bytes.
        flops_per_s: achieved rate, where the trace has the shapes.
        ceiling_share: achieved part of the GPU's bandwidth or rate, the closer one; None: unknown.
    """

    name: str
    kind: str
    count: int
    total_ms: float
    mean_us: float
    share: float
    bytes_per_s: float | None
    flops_per_s: float | None
    ceiling_share: float | None


@dataclass(frozen=True, slots=True)
class ProductTime:
    """All calls of one matrix multiplication with recorded shapes.

    Args:
        label: operator, sizes and type.
        count: number of calls.
        total_ms: time of their kernels; without a GPU: of the operators.
        flops_per_s: achieved rate.
        bytes_per_s: achieved bandwidth, each factor and the result counted once.
        bound: "compute" or "bandwidth", what limits it on this GPU; None: unknown GPU.
        ceiling_share: least time at the GPU's limits over the measured time; None: unknown GPU.
    """

    label: str
    count: int
    total_ms: float
    flops_per_s: float
    bytes_per_s: float
    bound: str | None
    ceiling_share: float | None


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All calls of one operator or runtime function on the main thread.

    Args:
        name: name of the operator.
        count: number of calls.
        self_ms: time outside other operators that it calls.
        total_ms: time including these.
    """

    name: str
    count: int
    self_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The main thread: the one that launches, or the one with most operators.

    Args:
        thread: process and thread.
        span_ms: time from its first to its last operator.
        busy_ms: part of it in operators and runtime calls.
        idle_ms: the rest: Python code, or waiting.
    """

    thread: str
    span_ms: float
    busy_ms: float
    idle_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one trace.

    Args:
        name: name of the file.
        headline: one sentence: the most important figure.
        notes: missing parts of the trace, and how to record them.
        span_ms: time from the first to the last event.
        events: number of timed events.
        gpu_name: name of the first GPU, if the trace has it.
        limits: the GPU whose data sheet rates are compared with; None: unknown GPU.
        gpus: one per GPU; empty: no GPU events.
        phases: by phase, in the order of their start; empty: no ``panscan.*`` ranges.
        steps: the mean decode step.
        kernels: activities by name, longest total first.
        other_kernels_ms: time of all others.
        products: matrix multiplications, longest total first; empty: no shapes recorded.
        cpu: the main thread; None: no CPU events.
        operators: operators by name, longest self time first.
    """

    name: str
    headline: str
    notes: tuple[str, ...]
    span_ms: float
    events: int
    gpu_name: str | None
    limits: str | None
    gpus: tuple[GpuTime, ...]
    phases: tuple[PhaseTime, ...]
    steps: StepTime | None
    kernels: tuple[KernelTime, ...]
    other_kernels_ms: float
    products: tuple[ProductTime, ...]
    cpu: CpuTime | None
    operators: tuple[OperatorTime, ...]
