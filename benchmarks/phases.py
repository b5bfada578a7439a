"""Engine time by phase for several models, weights and tensor-parallel sizes: what `panscan plan` is fitted to.

    python -m benchmarks.phases --configurations 27b:bf16:1,27b:fp8:2,4b:int4:1 --gpus 2 --output phases.json

Each configuration (model shape, weights, tensor-parallel size) runs in its own process with random weights
(:mod:`benchmarks.phases_worker`); those of one GPU run in parallel, one per GPU. The record is rewritten whenever a
phase completes, so an interrupted run keeps its completed phases. With more than one GPU, the record also holds the
time of the all-reduces between two GPUs (:mod:`benchmarks.phases_link`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from panscan.core import SettingError
from panscan.core.files import write_file
from panscan.model.shapes import SHAPES
from panscan.settings import WEIGHT_KINDS

_POLL_SECONDS = 0.5
_LINK = "link"
_LINK_SECONDS = 90.0
_KINDS = ("bf16", *WEIGHT_KINDS)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one process measures.

    Args:
        shape: model shape.
        kind: weights: ``bf16`` for unquantised ones of the device's default dtype, or a quantisation.
        ranks: tensor-parallel size.
    """

    shape: str
    kind: str
    ranks: int

    @classmethod
    def of(cls, text: str) -> Configuration:
        """Return the configuration that ``SHAPE:KIND:RANKS`` names.

        Raises:
            SettingError: it names none.
        """
        parts = text.split(":")
        if len(parts) != 3 or parts[0] not in SHAPES or parts[1] not in _KINDS or not parts[2].isdigit():
            raise SettingError(
                f"--configurations takes SHAPE:{'|'.join(_KINDS)}:RANKS, such as 27b:fp8:2; got {text!r}"
            )
        return cls(parts[0], parts[1], int(parts[2]))

    def __str__(self) -> str:
        return f"{self.shape}:{self.kind}:{self.ranks}"


@dataclass(slots=True)
class Job:
    """A Python process to run on some GPUs.

    Args:
        command: arguments of the interpreter.
        gpus: number of GPUs that it occupies.
        seconds: its deadline, from its start.
        part: the JSON file that it writes.
    """

    command: list[str]
    gpus: int
    seconds: float
    part: Path
    process: subprocess.Popen[bytes] | None = None
    assigned: tuple[int, ...] = ()
    until: float = 0.0
    error: str | None = "not completed"

    def start(self, assigned: tuple[int, ...]) -> None:
        """Start the process on these GPUs."""
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, assigned))} if assigned else {}
        self.assigned, self.until = assigned, time.monotonic() + self.seconds
        self.process = subprocess.Popen([sys.executable, *self.command], env={**os.environ, **variables})

    def over(self) -> bool:
        """Return whether the process has exited; kill it at its deadline."""
        assert self.process is not None  # it was started
        if self.process.poll() is None and time.monotonic() > self.until:
            self.process.kill()
            self.process.wait()
            self.error = f"killed after {self.seconds:g} s"
        code = self.process.poll()
        if code is not None and code >= 0:
            self.error = f"exit status {code}" if code else None
        return code is not None

    def result(self) -> dict[str, Any]:
        """Return what the process has written, with ``error`` if it failed."""
        try:
            result: dict[str, Any] = json.loads(self.part.read_bytes())
        except FileNotFoundError:
            result = {}
        return result | {"error": self.error}


def _jobs(
    configurations: Sequence[Configuration], seconds: float, worker_options: Sequence[str], folder: Path
) -> dict[str, Job]:
    """Return a job for each configuration, those of one GPU first, the link's before others of several."""
    jobs = {}
    for configuration in configurations:
        part = folder / f"{configuration.shape}-{configuration.kind}-{configuration.ranks}.json"
        command = ["-m", "benchmarks.phases_worker", str(configuration), "--output", str(part), *worker_options]
        jobs[str(configuration)] = Job(command, configuration.ranks, seconds, part)
    shapes = {configuration.shape for configuration in configurations if configuration.ranks > 1}
    if hidden := sorted({SHAPES[shape].text.hidden for shape in shapes}):
        part = folder / "link.json"
        command = ["-m", "benchmarks.phases_link", "--hidden", ",".join(map(str, hidden)), "--output", str(part)]
        jobs = {_LINK: Job(command, 2, _LINK_SECONDS, part), **jobs}
    return dict(sorted(jobs.items(), key=lambda item: item[1].gpus))


def run_jobs(jobs: dict[str, Job], gpus: int, save: Callable[[], None]) -> None:
    """Run the jobs in order as GPUs become free (on a CPU one at a time), saving the record after each change."""
    waiting, running = list(jobs.values()), list[Job]()
    free = set(range(gpus))
    try:
        while waiting or running:
            while waiting and (len(free) >= waiting[0].gpus if gpus else not running):
                assigned = tuple(sorted(free)[: waiting[0].gpus])  # none on a CPU
                free -= set(assigned)
                waiting[0].start(assigned)
                running.append(waiting.pop(0))
            time.sleep(_POLL_SECONDS)
            ended = [job for job in running if job.over()]
            running = [job for job in running if job not in ended]
            free |= {gpu for job in ended for gpu in job.assigned}
            save()
    finally:
        for job in running:
            if job.process is not None:
                job.process.kill()
                job.process.wait()
        save()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all configurations and write the record; exit status 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__)
    parser.add_argument("--configurations", required=True, help="SHAPE:KIND:RANKS, comma-separated")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use; 0 measures on the CPU (default: 1)")
    parser.add_argument("--requests", type=int, default=64, help="requests of the W1 run (default: 64)")
    parser.add_argument("--output-tokens", type=int, default=128, help="output tokens per request (default: 128)")
    parser.add_argument("--pages", default="1,2,8", help="pages of one prompt, comma-separated (default: 1,2,8)")
    parser.add_argument("--seconds", type=float, default=240, help="deadline of one configuration (default: 240)")
    parser.add_argument("--output", type=Path, required=True, help="the record, a JSON file")
    options = parser.parse_args(argv)
    configurations = [Configuration.of(text) for text in options.configurations.split(",")]
    if options.gpus and (most := max(configuration.ranks for configuration in configurations)) > options.gpus:
        raise SettingError(f"--gpus {options.gpus}: a configuration needs {most}")
    command = shlex.join(["python", "-m", "benchmarks.phases", *(sys.argv[1:] if argv is None else argv)])
    header = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    worker_options = [
        "--requests",
        str(options.requests),
        "--output-tokens",
        str(options.output_tokens),
        "--pages",
        options.pages,
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        device = [] if options.gpus else ["--device", "cpu"]
        jobs = _jobs(configurations, options.seconds, worker_options + device, Path(folder))

        def save() -> None:
            results = {name: job.result() for name, job in jobs.items()}
            link = results.pop(_LINK, None)
            environments = [result.pop("environment") for result in results.values() if "environment" in result]
            record = {
                **header,
                "environment": environments[0] if environments else None,
                "configurations": results,
                "link": link,
            }
            write_file(options.output, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")

        run_jobs(jobs, options.gpus, save)
    return int(any(job.error for job in jobs.values()))


if __name__ == "__main__":
    sys.exit(main())
