"""Two replicas under ``panscan load``: latency over throughput, the highest rate within the goodput, and a kill.

    python -m benchmarks.load_replicas            # about ten minutes on two cores
    python -m benchmarks.load_replicas --short    # checks that it runs; writes no record

``panscan serve --replicas 2`` serves the mini model on the CPU. First a sweep over request rates. Then a search for the
highest rate at which 95% of the requests meet the limits. Last, shares of that rate, each twice: undisturbed, and with
one replica killed (SIGKILL) in the middle. Requests of the killed level are counted in three phases by the time that
they were due: before the kill, until both replicas answer again, and after.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.faults import QUEUED, REPLICAS, SEQUENCES, Server
from benchmarks.workloads.common import say
from panscan.core import now
from panscan.records.environment import environment
from panscan.records.goodput import goodput_of
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run, read_run
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "load-replicas.json"
RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0)  # requests per second
SHARES = (0.5, 0.9)  # of the highest rate, for the levels with a kill
LIMITS = {"ttft": 1000.0, "tpot": 50.0}  # milliseconds
TOKENS = 32  # of each answer
DOCUMENTS = 36
SECONDS = 20.0  # of a level
KILL_AFTER, KILL_SECONDS = 20.0, 80.0  # of a level with a kill
TIMEOUT = 900.0  # seconds of one load run
RECOVERY = 180.0

_COLUMNS = (
    "offered_rate",
    "sent",
    "completed",
    "failed",
    "request_throughput",
    "goodput",
    "attainment",
    "median_ttft_ms",
    "p95_ttft_ms",
    "median_tpot_ms",
    "p95_tpot_ms",
    "median_e2el_ms",
    "p95_e2el_ms",
    "client_lag_median_ms",
    "client_limited",
)


def load(url: str, folder: Path, *options: str) -> Run:
    """Run ``panscan load`` with these options and return its records, which a new folder in ``folder`` keeps."""
    command = [sys.executable, "-m", "panscan", "load", url, "--output-dir", str(folder), *options]
    say(" ".join(command[2:]))
    before = set(folder.glob("*"))
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    say(process.stderr[-2000:])
    [directory] = set(folder.glob("*")) - before
    run = read_run(directory)
    if not run.repeats:
        raise SystemExit(f"panscan load measured nothing: {process.stdout[-2000:]}")
    return run


def _load_questions(url: str, dataset: Path, folder: Path, *options: str) -> Run:
    """Send the questions of the dataset."""
    limits = [f"{name}:{limit:g}" for name, limit in LIMITS.items()]
    work = ["--dataset", str(dataset), "--max-tokens", str(TOKENS), "--ignore-eos"]
    return load(url, folder, *work, *options, "--goodput", *limits)


def levels(run: Run) -> list[dict[str, Any]]:
    """Return the figures of each level, from ``summary.csv``."""
    directory = run.path if run.path.is_dir() else run.path.parent
    with (directory / "summary.csv").open(newline="", encoding="utf-8") as file:
        return [{name: _value(row[name]) for name in _COLUMNS} for row in csv.DictReader(file)]


def _value(text: str) -> float | bool | None:
    if text in ("true", "false"):
        return text == "true"
    return float(text) if text else None


def phase(records: Sequence[RequestRecord], start: float, end: float) -> dict[str, Any]:
    """Return the figures of the requests that were due between two times (seconds of ``panscan.core.now``)."""
    due = [record for record in records if record.due is not None and start <= record.due < end]
    if not due:
        return {"sent": 0}
    goodput = goodput_of(due, LIMITS)
    times = [record.ttft for record in due if record.error is None]
    ttft = 1e3 * np.array([seconds for seconds in times if seconds is not None])
    errors = Counter(f"{record.error_kind}: {record.error}" for record in due if record.error is not None)
    return {
        "seconds": round(end - start, 1),
        "sent": len(due),
        "failed": sum(errors.values()),
        "errors": dict(errors),
        "attainment": goodput.attainment,
        "median_ttft_ms": float(np.median(ttft)) if len(ttft) else None,
        "p95_ttft_ms": float(np.percentile(ttft, 95)) if len(ttft) else None,
    }


class Killer(threading.Thread):
    """Kills one replica some seconds after the first request of a level, and waits until all replicas answer again."""

    def __init__(self, server: Server, after: float) -> None:
        super().__init__(daemon=True)
        self._server, self._after = server, after
        self.killed = float("inf")  # not yet
        self.recovered: float | None = None

    def run(self) -> None:
        """Wait for load, kill, wait for the recovery."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            deadline = time.monotonic() + TIMEOUT
            while time.monotonic() < deadline and not await self._busy(client):
                await asyncio.sleep(0.1)
            await asyncio.sleep(self._after)
            victim, *others = self._server.actors()
            self.killed = now()
            victim.kill()
            while now() - self.killed < RECOVERY:
                alive = [actor for actor in self._server.actors() if actor.status() != psutil.STATUS_ZOMBIE]
                if len(alive) > len(others) and len(await self._server.engines(client)) == REPLICAS:
                    self.recovered = now()
                    return
                await asyncio.sleep(0.2)

    async def _busy(self, client: httpx.AsyncClient) -> bool:
        metrics = await self._server.metrics(client)
        return any(value for name, value in metrics.items() if "num_requests_running" in name)


def with_kill(server: Server, dataset: Path, folder: Path, rate: float, after: float, seconds: float) -> dict[str, Any]:
    """Measure one rate undisturbed and with a kill, and return the figures of both."""
    count = str(max(4, round(rate * seconds)))
    shape = ["--request-rate", f"{rate:g}", "--num-prompts", count, "--num-warmups", "0"]
    [undisturbed] = levels(_load_questions(server.url, dataset, folder, *shape))
    killer = Killer(server, after)
    killer.start()
    run = _load_questions(server.url, dataset, folder, *shape)
    killer.join(RECOVERY)
    records = [record for group in run.requests.values() for record in group]
    due = [record.due or 0.0 for record in records]
    start, end = min(due), max(due) + 1e-6
    recovered = end if killer.recovered is None else min(killer.recovered, end)
    [disturbed] = levels(run)
    return {
        "rate": rate,
        "undisturbed": undisturbed,
        "with_kill": disturbed,
        "recovered_s": None if killer.recovered is None else round(killer.recovered - killer.killed, 1),
        "phases": {
            "before": phase(records, start, killer.killed),
            "during": phase(records, killer.killed, recovered),
            "after": phase(records, recovered, end),
        },
    }


def measure(*, short: bool) -> dict[str, Any]:
    """Run all parts and return their figures."""
    rates = RATES[:2] if short else RATES
    seconds = 3.0 if short else SECONDS
    after, kill_seconds = (3.0, 40.0) if short else (KILL_AFTER, KILL_SECONDS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dataset = write_samples(folder / "documents", count=DOCUMENTS)
        (folder / "runs").mkdir()
        server = Server(folder / "log")
        server.start()
        try:
            asyncio.run(server.ready())
            warm = ["--max-concurrency", str(REPLICAS * SEQUENCES), "--num-prompts", "32"]
            _load_questions(server.url, dataset, folder / "runs", *warm)
            curve = []
            for rate in rates:
                count = str(max(4, round(rate * seconds)))
                run = _load_questions(
                    server.url, dataset, folder / "runs", "--request-rate", f"{rate:g}", "--num-prompts", count
                )
                curve += levels(run)
            search = _load_questions(
                server.url,
                dataset,
                folder / "runs",
                "--find-max-rate",
                "--num-prompts",
                "4" if short else "32",
            )
            assert search.search is not None  # the run ended
            best = search.search.rate or min(rates)
            highest = {
                **{key: getattr(search.search, key) for key in ("rate", "attainment", "note")},
                "levels": levels(search),
            }
            kills = [
                with_kill(server, dataset, folder / "runs", round(share * best, 2), after, kill_seconds)
                for share in SHARES[: 1 if short else None]
            ]
        finally:
            asyncio.run(server.end())
    return {"curve": curve, "highest_rate": highest, "kills": kills}


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few requests; writes no record")
    short = parser.parse_args().short
    figures = measure(short=short)
    say(json.dumps(figures, indent=1))
    if not short:
        server = {"replicas": REPLICAS, "max_num_seqs": SEQUENCES, "max_queued_requests": QUEUED, "tokens": TOKENS}
        record = {"server": server, "limits_ms": LIMITS, **figures, "environment": environment()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
