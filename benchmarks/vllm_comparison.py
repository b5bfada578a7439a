"""The engine beside vLLM on the same GPUs: python -m benchmarks.vllm_comparison --part NAME --output part.json

    python -m benchmarks.vllm_comparison --part w1-27b --output w1.json
    python -m benchmarks.vllm_comparison --part w2-27b --output w2.json
    python -m benchmarks.vllm_comparison --part w4-4b --output w4.json
    python -m benchmarks.vllm_comparison --part traffic-4b --output traffic.json
    python -m benchmarks.vllm_comparison --part verdict-27b,verdict-4b --output verdicts.json
    python -m benchmarks.vllm_comparison --merge w1.json w2.json w4.json traffic.json verdicts.json
    python -m benchmarks.vllm_comparison --merge benchmarks/records/vllm-comparison.json --other-machine generate.json

A part runs its sides (the engine, vLLM, ``generate()``), each in a process of its own, on all GPUs at once. The first
two sides run on every GPU, in one order on even GPUs and in the other on odd ones; with one GPU, in both orders one
after the other (``--rounds 2``). So each ratio is between figures of the same GPUs, whose UUIDs the record has.
``generate()`` runs once. The parts are written after every process, whose log is kept in the folder ``part.processes``,
and beside the part if it failed; ``--merge`` makes the record, or adds parts to it. Those after ``--other-machine`` did
not run on the GPUs of the others, and the table says so. vLLM must be installed, or ``--vllm-path`` name the folder
with it; from 0.26 on, its default attention is the exact one that is named here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.workloads.common import say
from panscan.core.files import write_file
from panscan.model.machine import gpu_count

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "records" / "vllm-comparison.json"
SIDES = {
    "engine": ("--runner", "engine"),
    "vllm-exact": ("--runner", "vllm", "--vllm-attention", "TRITON_ATTN"),
    "generate": ("--runner", "generate"),
}
"""Options of a workload by side."""
_COMPARED = 2  # sides that run on every GPU, in both orders
_SECONDS = 420.0  # of one process at most
_BRIEF = ("--random-weights", "--compared", "0", "--brief")
_LOG_LINES = 200  # vLLM prints its engine's error before some 60 lines of its own


@dataclass(frozen=True, slots=True)
class Part:
    """A workload with one shape.

    Args:
        module: that runs it.
        options: of every side.
        sides: to compare.
        repeats: turns of each process.
    """

    module: str
    options: tuple[str, ...]
    sides: tuple[str, ...]
    repeats: int


PARTS = {
    "w1-27b": Part("benchmarks.workloads.w1", ("--model-shape", "27b", *_BRIEF), tuple(SIDES), 2),
    "w2-27b": Part("benchmarks.workloads.w2", ("--model-shape", "27b", *_BRIEF), tuple(SIDES)[:2], 2),
    "w4-4b": Part("benchmarks.workloads.w1", ("--model-shape", "4b", *_BRIEF), tuple(SIDES), 2),
    "w4-12b": Part("benchmarks.workloads.w1", ("--model-shape", "12b", *_BRIEF), tuple(SIDES), 2),
    "traffic-27b": Part("benchmarks.workloads.traffic", ("--model-shape", "27b", *_BRIEF), tuple(SIDES)[:2], 2),
    "traffic-4b": Part("benchmarks.workloads.traffic", ("--model-shape", "4b", *_BRIEF), tuple(SIDES)[:2], 2),
}
VERDICTS = {
    "verdict-27b": ("--model-shape", "27b"),
    "verdict-4b": ("--model-shape", "4b"),
    "verdict-mini": ("--model", "mini"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One process.

    Args:
        part: its name.
        side: measured; empty for verdicts, which have all.
        words: the command behind ``python -m``, without ``--output``.
        gpu: index.
        vllm: whether vLLM runs in it.
    """

    part: str
    side: str
    words: tuple[str, ...]
    gpu: int
    vllm: bool


def schedule(
    names: Sequence[str], gpus: Sequence[int], rounds: int, sides: Sequence[str], extra: Sequence[str] = ()
) -> list[list[Job]]:
    """Return the jobs of each GPU, in order.

    Args:
        names: of parts and verdicts.
        gpus: indices.
        rounds: times that the first sides run on each GPU, in alternating order.
        sides: to run; others of a part are left out.
        extra: further options of every workload.
    """
    queues: list[list[Job]] = [[] for _ in gpus]
    for name in names:
        if name in VERDICTS:
            place = min(range(len(gpus)), key=lambda index: len(queues[index]))
            queues[place].append(Job(name, "", ("benchmarks.vllm_verdict", *VERDICTS[name]), gpus[place], vllm=True))
            continue
        part = PARTS[name]
        chosen = [side for side in part.sides if side in sides]
        for place, gpu in enumerate(gpus):
            order: list[str] = []
            for number in range(rounds):
                compared = [side for side in part.sides[:_COMPARED] if side in chosen]
                order += compared[::-1] if (place + number) % 2 else compared
            order += [side for side in chosen if side not in part.sides[:_COMPARED]][place :: len(gpus)]
            words = (part.module, *part.options, "--repeats", str(part.repeats), *extra)
            queues[place] += [Job(name, side, (*words, *SIDES[side]), gpu, side.startswith("vllm")) for side in order]
    return queues


def run_job(job: Job, folder: Path, vllm_path: str) -> dict[str, Any]:
    """Run a process to its end and return its record, or why it ``failed`` and the last lines of its log.

    The whole log of a failed process is copied to the folder above.
    """
    output = folder / f"{job.part}-{job.side or 'all'}-gpu{job.gpu}-{time.monotonic_ns()}.json"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": str(job.gpu), "PYTHONUNBUFFERED": "1"}
    if job.vllm and vllm_path:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (vllm_path, environ.get("PYTHONPATH"))))
    words = [sys.executable, "-m", *job.words, "--output", str(output)]
    started, wall = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with output.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine is a separate process
                process.wait()
    text = output.with_suffix(".log").read_text("utf-8", "replace")
    run = {
        "side": job.side,
        "gpu": job.gpu,
        "started": wall,
        "seconds": time.monotonic() - started,
        "backends": sorted(set(re.findall(r"Using (\S+) (?:attention )?backend", text))),
    }
    if code or not output.exists():
        reason = "out of time" if code is None else f"exit code {code}"
        write_file(folder.parent / f"{output.stem}.log", text.encode())
        return run | {"failed": reason, "log": text.splitlines()[-_LOG_LINES:]}
    return run | {"record": _read(output)}


def _read(path: Path) -> dict[str, Any]:
    """Return a process's record, whose command does not depend on where it was written."""
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if "command" in record:
        record["command"] = re.sub(r"--output \S+", "--output record.json", record["command"])
    return record


class Log:
    """Runs by part, written to a file after each."""

    def __init__(self, output: Path, command: str) -> None:
        self._output, self._lock = output, Lock()
        self.record: dict[str, Any] = {"command": command, "parts": {}}

    def add(self, job: Job, run: Mapping[str, Any]) -> None:
        """Add the run of a job, and write all."""
        with self._lock:
            self.record["parts"].setdefault(job.part, []).append(run)
            save(self.record, self._output)
            say(f"gpu {job.gpu}: {job.part} {job.side}: {run.get('failed', 'done')} in {run['seconds']:.0f} s")
            for line in run.get("log", ()):
                say(f"    {line}")
            for line in figures(run):
                say(f"    {line}")


def figures(run: Mapping[str, Any]) -> list[str]:
    """Return the throughput and the latency of a run, one line each, to show as it proceeds."""
    record = run.get("record", {})
    if "verdicts" in record:
        return [f"{side}: {verdict['verdict']} {verdict['ratio']}" for side, verdict in record["verdicts"].items()]
    lines = []
    for measured in record.get("measured", {}).values():
        for name, value in (measured | measured.get("turns", {})).items():
            if isinstance(value, list) and value and isinstance(value[0], dict) and "requests_per_s" in value[0]:
                lines.append(f"{name}: " + ", ".join(f"{turn['requests_per_s']:.2f}" for turn in value) + " req/s")
            elif name in ("alone", "follow_up"):
                lines.append(f"{name}: TTFT {value['ttft_ms']['median']:.1f} ms")
    return lines


def merged(parts: Sequence[Mapping[str, Any]], elsewhere: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the record of some parts: all runs by part, and all verdicts.

    Args:
        parts: what processes of this script wrote, or an earlier record, to add parts to it.
        elsewhere: further parts, measured on another machine with the same GPU model.

    Raises:
        SystemExit: runs of a part were not asked the same, or ran on different GPU models.
    """
    runs: dict[str, list[Any]] = {}
    verdicts: dict[str, Any] = {}
    commands: list[str] = []
    for part in (*parts, *map(_elsewhere, elsewhere)):
        verdicts |= part.get("verdicts", {})
        commands += part["commands"] if "commands" in part else [part["command"]]
        for name, part_runs in part["parts"].items():
            finished = [run for run in part_runs if "record" in run]
            if name not in VERDICTS:
                runs.setdefault(name, []).extend(finished)
            elif finished:
                verdicts[name] = finished[-1]["record"]
    for name, part_runs in runs.items():
        if len({_asked(run["record"]) for run in part_runs}) > 1:
            sys.exit(f"{name}: its sides were not asked the same, or ran on different GPUs")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "commands": commands, "parts": runs, "verdicts": verdicts}


def _elsewhere(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part whose runs are marked as from another machine."""
    runs = {name: [run | {"other_machine": True} for run in part_runs] for name, part_runs in part["parts"].items()}
    return {**part, "parts": runs}


def _asked(record: Mapping[str, Any]) -> tuple[Any, ...]:
    work = record["work"]
    gpus = sorted({gpu["name"] for gpu in record["environment"]["gpus"]})
    return (*(work[name] for name in ("views", "prompt_tokens", "image_tokens", "output_tokens")), *gpus)


def save(record: Mapping[str, Any], output: Path) -> None:
    """Write a record whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, json.dumps(record, indent=1).encode() + b"\n")


def _names(choices: Mapping[str, object], option: str) -> Any:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{option} takes {', '.join(choices)}; got {', '.join(unknown)}")
        return names

    return read


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, or merge them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options go to the workloads.",
    )
    parser.add_argument("--part", type=_names({**PARTS, **VERDICTS}, "--part"), help="one part, or a comma list")
    parser.add_argument("--sides", type=_names(SIDES, "--sides"), default=list(SIDES), help="comma list; default: all")
    parser.add_argument("--gpus", type=int, help="number of GPUs to use; default: all")
    parser.add_argument("--rounds", type=int, default=1, help="times per GPU, in alternating order; default 1")
    parser.add_argument("--vllm-path", default="", help="folder that holds vLLM, put before PYTHONPATH for vLLM alone")
    parser.add_argument("--merge", type=Path, nargs="+", help="parts to merge into the record")
    parser.add_argument("--other-machine", type=Path, nargs="+", default=[], help="parts to merge from another machine")
    parser.add_argument("--output", type=Path, help="the part's file, or the record")
    args, extra = parser.parse_known_args(argv)
    if args.merge:
        parts, elsewhere = (
            [json.loads(path.read_text("utf-8")) for path in paths] for paths in (args.merge, args.other_machine)
        )
        save(merged(parts, elsewhere), args.output or RECORD)
        return 0
    if args.other_machine:
        parser.error("--other-machine goes with --merge")
    if args.part is None or args.output is None:
        parser.error("--part and --output, or --merge")
    gpus = range(args.gpus or gpu_count() or 1)
    words = sys.argv[1:] if argv is None else argv
    command = re.sub(r" --(output|vllm-path)[ =]\S+", "", " ".join(["python -m benchmarks.vllm_comparison", *words]))
    log = Log(args.output, command)
    folder: Path = args.output.with_suffix(".processes")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(gpus)) as pool:

        def work(queue: Sequence[Job]) -> None:
            for job in queue:
                log.add(job, run_job(job, folder, args.vllm_path))

        list(pool.map(work, schedule(args.part, gpus, args.rounds, args.sides, extra)))
    return int(any("failed" in run for runs in log.record["parts"].values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
