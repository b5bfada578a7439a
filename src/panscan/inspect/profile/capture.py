"""One piece of work under ``torch.profiler``, written as a compressed trace with facts about the run."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from panscan.core import RecordsError
from panscan.core.files import replace_file, write_errors
from panscan.model.machine import synchronize
from panscan.model.phases import phase

FACTS_KEY = "panscan"
"""The key of the trace file's top level under which the facts are."""
_QUIET = "KINETO_LOG_LEVEL"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What a trace contains besides time; each makes it larger.

    Args:
        record_shapes: shapes of tensors.
        memory: allocations, of the thread that starts the profiler alone.
        stacks: Python functions.
    """

    record_shapes: bool = False
    memory: bool = False
    stacks: bool = False


def captured(work: Callable[[], T], device: torch.device, options: CaptureOptions) -> tuple[T, profile]:
    """Profile one call; return what it returned, and the profiler.

    The trace has all threads of this process. With ``options.memory`` it has only the calling one: PyTorch records no
    allocations otherwise.

    Args:
        work: function to profile; marked as ``panscan.request``, up to the moment when the device has finished.
        device: the model's device. On an NVIDIA GPU the trace has its kernels, elsewhere the host's operators only.
        options: contents of the trace.
    """
    profiler = _profiler(device, options)
    profiler.start()
    try:
        with phase("request"):
            result = work()
            synchronize(device)
    finally:
        profiler.stop()
    return result, profiler


def start_profiler_once(device: torch.device) -> None:
    """Start and stop a profiler, so that the setup of the GPU's tracing is in no trace."""
    os.environ.setdefault(_QUIET, "99")  # Kineto would print to standard output when it starts and stops
    profiler = _profiler(device, CaptureOptions())
    profiler.start()
    torch.ones(1, device=device).add_(1)
    synchronize(device)
    profiler.stop()


def _profiler(device: torch.device, options: CaptureOptions) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        record_shapes=options.record_shapes,
        profile_memory=options.memory,
        with_stack=options.stacks,
        # The engine computes in one thread and prepares requests in others; by default only this one is recorded.
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=not options.memory),
    )


def write_trace(profiler: profile, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a trace, with facts as the first key of the file.

    Args:
        profiler: a stopped profiler.
        path: file to write, ``.json.gz``.
        facts: what the trace says of itself under :data:`FACTS_KEY`; JSON values.

    Raises:
        RecordsError: the file cannot be written.
    """
    with write_errors(path, RecordsError), tempfile.TemporaryDirectory() as folder, replace_file(path) as file:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.GzipFile("", "wb", 6, file) as target:
            if not (opening := source.readline().strip() or source.readline().strip()).startswith(b"{"):
                raise RecordsError(f"{path}: the profiler wrote no JSON object")
            target.write(b"{" + f"{json.dumps(FACTS_KEY)}: {json.dumps(facts)},".encode() + opening[1:])
            shutil.copyfileobj(source, target)
