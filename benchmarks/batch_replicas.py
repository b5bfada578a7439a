"""A pile of documents on one and on two replicas: python benchmarks/batch_replicas.py [ROUNDS]

Pages per second of `panscan batch` on the mini model on a CPU, one thread per replica, on a machine with two cores: the
engine in the command's own process, one replica, and two replicas, one after another in each round. Loading the model
and a warm-up are not timed. Each run is a separate process, which also reports the CPU time of the driver and of
Ray's processes.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from panscan.records.environment import environment
from panscan.settings import Settings, settings_from
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "batch-replicas.json"
ROUNDS, PAGES, WARM_UP = 3, 64, 8
SETTINGS = {"model": "mini", "dtype": "fp32", "device": "cpu", "max_new_tokens": 16, "max_num_seqs": 4}
LAYOUTS = ("engine", "1", "2")
LOAD_SECONDS = 300.0


def cpu_seconds() -> tuple[float, float, float]:
    """Return the CPU time so far of this process, of the replicas, and of the other children."""
    driver, replicas, others = sum(psutil.Process().cpu_times()[:2]), 0.0, 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            spent = sum(child.cpu_times()[:2])
            if re.search("EngineReplica|rank_worker", " ".join(child.cmdline())):
                replicas += spent
            else:
                others += spent
    return driver, replicas, others


def opened(layout: str, settings: Settings) -> Any:
    """Return an engine whose replicas have all loaded the model."""
    if layout == "engine":
        from panscan.engine.engine import Engine

        return Engine.from_settings(settings)
    from panscan.serve.batch_engine import BatchEngine

    engine = BatchEngine(settings, int(layout))
    end = time.monotonic() + LOAD_SECONDS
    while engine.replicas < int(layout):
        assert time.monotonic() < end, "too few replicas have started"
        time.sleep(0.1)
    return engine


def measure(layout: str, folder: Path, settings: Mapping[str, Any] = SETTINGS) -> dict[str, float]:
    """Answer the documents of a folder into a file and return seconds and CPU seconds.

    Args:
        layout: ``engine``, or the number of replicas.
        folder: has the folders ``warm-up`` and ``pile``.
        settings: settings of the engine.
    """
    from panscan.batch.answers import AnswerFile
    from panscan.batch.dispatch import answer
    from panscan.batch.job import Job, difference
    from panscan.batch.pending import Task
    from panscan.workload.items import find_work

    job = Job(settings=settings_from({**settings, "runner": "engine"}), prompt="What is the total?")

    def ask(engine: Any, source: Path, output: Path) -> None:
        work = find_work([str(source)], whole_files=False, limit=None, on_problem=print)
        with AnswerFile(output, job.header(), "force", difference) as file:
            answer(engine, job, map(Task, work), file, proven=False, on_answer=lambda _: None)
            file.finish()

    with opened(layout, job.settings) as engine, tempfile.TemporaryDirectory() as temporary:
        ask(engine, folder / "warm-up", Path(temporary) / "warm-up.jsonl")
        before, start = cpu_seconds(), time.perf_counter()
        ask(engine, folder / "pile", Path(temporary) / "pile.jsonl")
        seconds, after = time.perf_counter() - start, cpu_seconds()
        lines = [json.loads(line) for line in (Path(temporary) / "pile.jsonl").read_text().splitlines()]
    assert lines and all(line["error"] is None for line in lines)
    names = ("driver_cpu_s", "replicas_cpu_s", "ray_cpu_s")
    spent = {name: late - early for name, early, late in zip(names, before, after, strict=True)}
    return {"seconds": seconds, "pages": len(lines), **spent, "views": sum(line["views"] for line in lines)}


def main(rounds: int) -> None:
    runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder) / "pile", count=PAGES)
        write_samples(Path(folder) / "warm-up", count=WARM_UP, seed=1)
        for _ in range(rounds):
            for layout in LAYOUTS:
                command = [sys.executable, __file__, layout, folder]
                process = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=one_thread())
                runs[layout].append(json.loads(process.stdout.splitlines()[-1]))
                print(layout, runs[layout][-1], flush=True)
    ratios = {
        base: [one["seconds"] / two["seconds"] for one, two in zip(runs[base], runs["2"], strict=True)]
        for base in ("engine", "1")
    }
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/batch_replicas.py {rounds}",
        "environment": environment(),
        "settings": SETTINGS,
        "pages": PAGES,
        "runs": runs,
        "ratios": ratios,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for base, round_ratios in ratios.items():
        name = "the engine in one process" if base == "engine" else "one replica"
        print(
            f"two replicas: {statistics.median(round_ratios):.2f}x the throughput of {name} (median of {rounds} rounds)"
        )


def one_thread() -> dict[str, str]:
    """Return an environment in which each engine computes with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LAYOUTS and len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
