"""27B on 2, 4 or 8 GPUs of one machine: W1 with tensor parallelism, and replicas over HTTP and in batch jobs.

    python -m benchmarks.many_gpus FOLDER                # all jobs that fit on this machine, in less than nine minutes
    python -m benchmarks.many_gpus FOLDER serve-4x2-int8-40gb faults-4x2      # some jobs
    python -m benchmarks.many_gpus FOLDER --device cpu --model tiny --gpus 8  # rehearsal

A layout is REPLICASxGPUS[-WEIGHTS][-MEMORYgb][-head][-CACHEkv]: ``8x1-int8-40gb-head-int8kv`` is eight replicas of one
GPU each, with int8 weights, at most 40 GB of every GPU, an int8 output matrix and an int8 KV cache. Jobs, each of which
writes a record of its own:

``w1-tpN[-WEIGHTS]``
    The workload W1 with tensor parallelism over N GPUs.
``serve-LAYOUT``
    ``panscan serve --replicas`` under ``panscan load`` on the same machine: W1's pages at once. Replicas of two GPUs
    or with quantised weights then get mixed documents (W3) at rising shares of that rate.
``batch-LAYOUT``
    W1's pages as files, answered by the replicas of ``panscan batch``, without HTTP.
``faults-LAYOUT``
    ``kill -9`` of a replica, and of a rank, under load. Not part of a run without job names.

Jobs that need fewer GPUs than there are run beside others. A job starts only if the time left is likely to suffice:
those that did not start are named at the end, for another call, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import batch_replicas, faults
from benchmarks.ingress import cpu_seconds, processes_of
from benchmarks.load_replicas import levels, load
from benchmarks.workloads import w1
from benchmarks.workloads.common import say
from benchmarks.workloads.pages import page
from panscan.core import SettingError
from panscan.core.files import write_file
from panscan.model.shapes import SHAPES, split_reason
from panscan.records.environment import environment
from panscan.settings import settings_from

SECONDS = 530.0
SHARES = (0.5, 0.8, 0.95)  # of the rate of W1's pages: the rates of W3
LIMITS = ("ttft:2000", "tpot:50")  # milliseconds
_WARM_UPS = 2  # requests per replica
_START_SECONDS = 240.0  # until all replicas answer
_SETTLE_SECONDS = 20.0  # from SIGTERM to the end of a job
_EVERY_TOKEN = '{"stream_options": {"continuous_usage_stats": true}}'
"""Fields of a request whose answer has a chunk for every token: most of random weights' tokens have no text."""
_FAULTS = ("kill_replica", "kill_rank")
_LAYOUT = re.compile(r"([1-9]\d?)x([1-9]\d?)(?:-(fp8|int8|int4))?(?:-(\d+)gb)?(-head)?(?:-(int8|fp8)kv)?")


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of replicas, and the GPUs, weights and cache of each.

    Args:
        replicas: number of replicas.
        size: GPUs of each.
        weights: their quantisation; None: bf16.
        memory: gigabytes that the engine may use of each GPU; None: 92% of them.
        head: whether the output matrix is int8.
        cache: 8-bit KV cache; None: bf16.
    """

    replicas: int
    size: int
    weights: str | None = None
    memory: int | None = None
    head: bool = False
    cache: str | None = None

    @classmethod
    def parse(cls, name: str) -> Layout:
        """Return the layout of a name.

        Raises:
            SettingError: the name is not that of a layout.
        """
        match = _LAYOUT.fullmatch(name)
        if match is None:
            form = "REPLICASxGPUS[-WEIGHTS][-MEMORYgb][-head][-CACHEkv], such as 8x1-int8-40gb"
            raise SettingError(f"{name!r}: expected a layout, {form}")
        replicas, size, weights, memory, head, cache = match.groups()
        return cls(int(replicas), int(size), weights, int(memory) if memory else None, head is not None, cache)

    def settings(self) -> dict[str, Any]:
        """Return the settings of an engine that do not depend on the machine, by name."""
        return {
            "tensor_parallel_size": self.size,
            **({"quantization": self.weights} if self.weights else {}),
            **({"quantize_head": "int8"} if self.head else {}),
            **({"kv_cache_dtype": self.cache} if self.cache else {}),
        }

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.size


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work to measure on a machine.

    Args:
        pages: of W1 per replica.
        repeats: measured turns of W1.
        tokens: output tokens of W1.
        level_seconds: length of a level of W3.
        job_seconds: what a job needs at least.
    """

    pages: int
    repeats: int
    tokens: int
    level_seconds: float
    job_seconds: float


ON_GPUS = Scale(pages=64, repeats=2, tokens=128, level_seconds=6.0, job_seconds=70.0)
ON_CPU = Scale(pages=2, repeats=1, tokens=4, level_seconds=2.0, job_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """The model and the machine that it runs on.

    Args:
        model: name of a shape; on a CPU, of a bundled model.
        device: ``cuda`` or ``cpu``.
        folder: of the records.
        environment: hardware and versions, for the records.
    """

    model: str
    device: str
    folder: Path
    environment: dict[str, Any]

    @property
    def scale(self) -> Scale:
        return ON_CPU if self.device == "cpu" else ON_GPUS

    @property
    def cards(self) -> int:
        """GPUs of the machine."""
        return len(self.environment["gpus"])

    def settings(self, layout: Layout) -> dict[str, Any]:
        """Return the settings of an engine by name."""
        settings = layout.settings()
        if self.device == "cpu":
            return {**settings, "model": self.model, "device": "cpu", "kv_cache_gb": 0.05, "max_num_seqs": 4}
        if layout.memory is not None:
            settings["gpu_memory_gb"] = layout.memory
        return {**settings, "random_weights": True, "model_shape": self.model, "preprocess": "device"}

    def flags(self, layout: Layout) -> str:
        """Return the same as options of a command."""
        settings = self.settings(layout)
        words = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in settings.items()
        ]
        return " ".join(words)

    def path(self, job: Job) -> Path:
        """Return the path of a job's record, whose name ends with that of the GPU."""
        gpu = self.environment["gpus"][0]["name"].split()[1].lower() if self.cards else "cpu"
        kind, _, rest = job.name.partition("-")
        return self.folder / f"{kind}-{self.model}-{rest}-{gpu}.json"


@dataclass(frozen=True, slots=True)
class Job:
    """One process and the number of GPUs that it takes.

    Args:
        name: see the module.
        kind: ``w1``, ``serve``, ``batch`` or ``faults``.
        layout: what it measures.
        after: job that must have ended; empty for none.
    """

    name: str
    kind: str
    layout: Layout
    after: str = ""

    @classmethod
    def named(cls, name: str, model: str) -> Job:
        """Return the job of a name.

        Raises:
            SettingError: no job has that name, or the layout does not divide the model.
        """
        kind, _, rest = name.partition("-")
        if kind == "w1" and rest.startswith("tp"):
            layout = Layout.parse(f"1x{rest.removeprefix('tp')}")
        elif kind in ("serve", "batch", "faults"):
            layout = Layout.parse(rest)
        else:
            raise SettingError(f"{name!r}: expected w1-tpN[-WEIGHTS], serve-LAYOUT, batch-LAYOUT or faults-LAYOUT")
        text, size = SHAPES[model].text, layout.size
        reason = split_reason(heads=text.heads, kv_heads=text.kv_heads, intermediate=text.intermediate, size=size)
        if reason is not None:
            raise SettingError(f"{name}: {reason}")
        # Quantised weights are compared with the reference of the job without quantisation.
        return cls(name, kind, layout, f"w1-tp{size}" if kind == "w1" and layout.weights else "")


def default_jobs(gpus: int) -> list[str]:
    """Return the names of the jobs on a machine with this number of GPUs: first those that run beside others."""
    sizes = [size for size in (4, 2, 1) if size <= gpus]
    names = [f"w1-tp{sizes[0]}"] if sizes[0] > 1 else []
    names += [f"serve-1x{size}" for size in sizes]
    names += ["serve-1x1-int8-40gb"] if gpus > 1 else []
    several = [size for size in (2, 4, 1) if gpus // size > 1]  # the layout with a bar comes first
    names += [f"serve-{gpus // size}x{size}" for size in several]
    names += [f"serve-{gpus}x1-int8-40gb"] if gpus > 1 else []
    names += [f"w1-tp{sizes[0]}-fp8"] if sizes[0] > 2 else []
    return names + (["batch-1x2", f"batch-{gpus // 2}x2"] if gpus > 2 else [])


def run_jobs(jobs: Sequence[Job], machine: Machine, cards: Sequence[str], seconds: float) -> list[str]:
    """Run jobs in order, each as soon as its cards are free; return the names of those that failed or did not start.

    Args:
        jobs: in the order of their importance.
        machine: runs them.
        cards: identifiers of the GPUs; on a CPU, where one job runs at a time, any names.
        seconds: time after which jobs that still run are ended.
    """
    deadline, waiting, free = time.monotonic() + seconds, list(jobs), list(cards)
    running: dict[Job, tuple[BaseProcess, list[str]]] = {}
    failed: list[str] = []

    def log(text: str) -> None:
        say(f"{time.monotonic() - deadline + seconds:5.0f} s: {text}")

    try:
        while (waiting or running) and time.monotonic() < deadline:
            first = waiting[0] if waiting else None
            if first is not None and deadline - time.monotonic() < machine.scale.job_seconds:
                failed += [job.name for job in waiting]
                waiting.clear()
            elif first is not None and _can_start(first, running, free, machine):
                waiting.remove(first)
                job_cards, free = free[: first.layout.gpus], free[first.layout.gpus :]
                running[first] = _start(first, machine, job_cards), job_cards
                log(f"{first.name} on {len(job_cards)} GPUs")
            else:
                time.sleep(0.5)
            for job, (process, job_cards) in list(running.items()):
                if process.exitcode is not None:
                    del running[job]
                    free = [card for card in cards if card in free or card in job_cards]
                    failed += [job.name] if process.exitcode else []
                    log(f"{job.name} {'failed' if process.exitcode else 'ended'}")
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join(_SETTLE_SECONDS)
    return failed + [job.name for job in (*running, *waiting)]


def _can_start(job: Job, running: Iterable[Job], free: Sequence[str], machine: Machine) -> bool:
    """Return whether a job's cards are free and the job before it has ended; on a CPU, whether nothing runs."""
    names = {other.name for other in running}
    return job.layout.gpus <= len(free) and job.after not in names and (machine.device == "cuda" or not names)


def _exit(*_: object) -> None:
    """Exit as after an error, so that child processes end first."""
    sys.exit(1)


def _start(job: Job, machine: Machine, cards: Sequence[str]) -> BaseProcess:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards) if machine.device == "cuda" else ""
    process = get_context("spawn").Process(target=run_job, args=(job, machine))
    process.start()
    return process


def run_job(job: Job, machine: Machine) -> None:
    """Run one job in this process and write its record."""
    signal.signal(signal.SIGTERM, _exit)
    layout = job.layout
    if job.kind == "w1":
        sys.exit(w1.main(_w1_words(job, machine)))
    options = "" if machine.device == "cuda" else f" --device cpu --model {machine.model}"
    record: dict[str, Any] = {
        "workload": job.kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"benchmarks/many_gpus.sh FOLDER {job.name}{options}",
        "environment": {**machine.environment, "gpus": machine.environment["gpus"][: layout.gpus]},
        "settings": settings_from({**machine.settings(layout), "runner": "engine"}).changed(),
        "replicas": layout.replicas,
    }

    def keep(**parts: Any) -> None:
        record.update(parts)
        write_file(machine.path(job), json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")
        say(f"wrote {machine.path(job)}")

    if job.kind == "serve":
        asyncio.run(_serve(layout, machine, keep))
    elif job.kind == "batch":
        keep(**_batch(layout, machine))
    else:
        names = [name for name in _FAULTS if layout.size > 1 or name != "kill_rank"]
        options = f"{machine.flags(layout)} --max-queued-requests {faults.QUEUED}"
        more = {"replicas": layout.replicas, "start_seconds": _START_SECONDS}
        keep(faults=asyncio.run(faults.run(names, options, **more)))


def _w1_words(job: Job, machine: Machine) -> list[str]:
    """Return the arguments of W1; with quantised weights, it measures throughput and latency only."""
    scale = machine.scale
    words = [*machine.flags(job.layout).split(), "--output", str(machine.path(job))]
    words += ["--repeats", str(scale.repeats), "--compared", "2", "--references", str(machine.folder / "references")]
    words += ["--num-requests", str(2 * scale.pages), "--max-new-tokens", str(scale.tokens)]
    return [*words, *(["--brief"] if job.layout.weights else [])]


async def _serve(layout: Layout, machine: Machine, keep: Callable[..., None]) -> None:
    """Measure a server: W1's pages at once; several pairs, or replicas with quantised weights, also under W3."""
    scale = machine.scale
    count = scale.pages * layout.replicas
    options = f"{machine.flags(layout)} --max-queued-requests {2 * count}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = faults.Server(folder / "log", options, replicas=layout.replicas, start_seconds=_START_SECONDS)
        server.start()
        try:
            keep(start_s=round(await server.ready(), 1), pages_per_replica=scale.pages)
            warm_ups = [_WARM_UPS * layout.replicas, *[0] * (scale.repeats - 1)]
            turns = [_burst(server, folder, count, warm_up, scale.tokens) for warm_up in warm_ups]
            keep(w1=turns)
            if layout.replicas > 1 and (layout.size == 2 or layout.weights is not None):
                rate = fmean(turn["requests_per_s"] for turn in turns)
                keep(w3=_rising_rates(server, folder, rate, scale.level_seconds))
        finally:
            await server.end()


def _burst(server: faults.Server, folder: Path, count: int, warm_ups: int, tokens: int) -> dict[str, Any]:
    """Send ``count`` of W1's pages at once; return figures and the CPU time of each part of the server."""
    processes = processes_of(server.process.pid)
    before = cpu_seconds(processes)
    words = f"--scenario distinct-documents --num-prompts {count} --num-warmups {warm_ups} --max-tokens {tokens}"
    run = load(server.url, folder, *words.split(), "--goodput", *LIMITS)
    after = cpu_seconds(processes)
    [level] = levels(run)
    [repeat], [requests] = run.repeats.values(), run.requests.values()
    seconds = repeat.ended - repeat.started
    spent = {part: 1e3 * (after[part] - before[part]) / (count + warm_ups) for part in after if part != "client"}
    return {
        **level,
        "seconds": seconds,
        "requests_per_s": (level["completed"] or 0) / seconds,
        "prompt_tokens": fmean(request.prompt_tokens or 0 for request in requests),
        "output_tokens": tokens,
        "cpu_ms_per_request": {part: round(milliseconds, 2) for part, milliseconds in sorted(spent.items())},
    }


def _rising_rates(server: faults.Server, folder: Path, most: float, seconds: float) -> list[dict[str, Any]]:
    """Send mixed documents at shares of a rate; return the figures of each level."""
    rates = ",".join(f"{share * most:.4g}" for share in SHARES)
    words = f"--scenario mixed-documents --request-rate {rates} --num-prompts {max(4, round(most * seconds))}"
    options = ["--num-warmups", "0", "--ignore-eos", "--extra-body", _EVERY_TOKEN, "--goodput", *LIMITS]
    return levels(load(server.url, folder, *words.split(), *options))


def _batch(layout: Layout, machine: Machine) -> dict[str, Any]:
    """Answer W1's pages, as files, in turns."""
    scale = machine.scale
    settings = {**machine.settings(layout), "max_new_tokens": scale.tokens, "ignore_eos": True}
    count = scale.pages * layout.replicas
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, seeds in (("warm-up", range(count, count + count // 4 + 1)), ("pile", range(count))):
            (folder / name).mkdir()
            for seed in seeds:
                page(seed).save(folder / name / f"{seed:05d}.png", compress_level=1)
        turn = batch_replicas.measure(str(layout.replicas), folder, settings)
    return {"batch": [{**turn, "requests_per_s": turn["pages"] / turn["seconds"]}], "pages_per_replica": scale.pages}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs; return 1 if one failed or did not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the records")
    parser.add_argument("jobs", nargs="*", help="names of jobs; default: all that fit on this machine")
    parser.add_argument("--model", default="27b", choices=SHAPES, help="shape; default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    parser.add_argument("--gpus", type=int, help="GPUs to use, on a CPU to stand for; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit; default: %(default)g")
    options = parser.parse_intermixed_args(argv)
    signal.signal(signal.SIGTERM, _exit)
    with ProcessPoolExecutor(1, get_context("spawn")) as child:  # CUDA would take memory here until the end
        facts = child.submit(environment).result()
    if options.device == "cpu":
        facts["gpus"] = []
    machine = Machine(options.model, options.device, options.folder, facts)
    count = options.gpus or machine.cards
    if not count:
        parser.error("no GPU: use --device cpu --model tiny --gpus 8 for a rehearsal")
    jobs = []
    for name in options.jobs or default_jobs(count):
        try:
            jobs.append(Job.named(name, options.model))
        except SettingError as error:
            if options.jobs:
                parser.error(str(error))
            say(f"left out: {error}")
    if large := [job.name for job in jobs if job.layout.gpus > count]:
        parser.error(f"{', '.join(large)}: needs more than {count} GPUs")
    options.folder.mkdir(parents=True, exist_ok=True)
    cards = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    missing = run_jobs(jobs, machine, cards[:count], options.seconds)
    say(f"failed or left out: {' '.join(missing) or 'none'}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
