"""CPU time per request of the server's parts, for pages of 1.5 MB and replicas of a known latency.

    python -m benchmarks.ingress                                # prints; about a minute
    python -m benchmarks.ingress --cores 2 --seconds 30 --record   # on a quiet machine with eight or more cores
    python -m benchmarks.ingress --replicas 2 8 --cores 4 --rate 120 --senders 2   # with 16 or more cores
    python -m benchmarks.ingress --replicas 0 --tokens 128 --rate 30   # what a streamed token costs beside a request

The replicas are stubs: they receive the requests and the pages of a real engine, wait, and stream tokens, all requests
in step. Everything before them is real: HTTP, admission, checks of pages, routing, Ray, and ``panscan load`` as the
client. The part ``ingress`` is the process that serves HTTP, ``ray`` are Ray's own processes. With ``--cores``, they
share one hardware thread of each of so many cores, and the client and the replicas have the other cores.

A closed loop finds the highest rate; an open loop at ``--rate`` has to keep it, which ``kept`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from io import BytesIO
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
from PIL import Image

import panscan.serve.engine_process as engine_process
from panscan.core import Request, Result, Stamps, Stats, TokenEvent, now
from panscan.core.child import Child
from panscan.engine.engine import Engine
from panscan.images.views import PUBLISHED_COST
from panscan.load.chat import ChatRequest, Endpoint, chat_body, data_url
from panscan.load.generator import run_level
from panscan.load.options import gamma_arrivals
from panscan.records.environment import environment
from panscan.serve.client import EngineClient, ModelInfo, TokenCounts
from panscan.serve.deployment import Scale, deployed_replicas
from panscan.serve.loaded_model import LoadedModel
from panscan.serve.options import ServeOptions
from panscan.serve.server import run_server
from panscan.settings import Settings

RECORD = Path(__file__).parent / "records" / "ingress.json"
REPLICAS = 2
TTFT, ITL = 0.5, 0.02
CLOSED_RATE = 57.0  # requests/s per replica in the closed loop, if nothing adds to the time of the replicas
KEPT_MS = 500.0  # added to the first token of 95% of the requests, where the server keeps the rate
PAGES, WIDTH, HEIGHT = 16, 800, 660  # pixels of noise: 1.58 MB as PNG
_PARTS = (
    ("client", r"benchmarks\.ingress (?!--serve)|panscan\.load"),
    ("replica", r"EngineReplica|rank_worker|run_worker\('benchmarks\.ingress'\)"),
    ("ingress", r"benchmarks\.ingress --serve|panscan serve"),
)


class StubEngine(Engine):
    """An engine that computes nothing: the first token after :data:`TTFT` seconds, then one every :data:`ITL`."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Request, Stamps, Callable[[TokenEvent], None] | None, Callable[..., None]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._step_forever, daemon=True).start()

    def start(
        self, request: Request, on_event: Callable[[TokenEvent], None] | None, on_end: Callable[[Result], None]
    ) -> Callable[[], None]:
        """Start a request; see :meth:`panscan.engine.engine.Engine.start`."""
        assert sum(len(page.content) for page in request.images) > 1_000_000  # the page has arrived
        with self._lock:
            self._running[request.id] = request, Stamps(now()), on_event, on_end
        return lambda: None

    def stats(self) -> Stats:
        """Return statistics of an engine that holds nothing."""
        return Stats(len(self._running), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)

    def close(self) -> None:
        """Do nothing."""

    def _step_forever(self) -> None:
        while True:
            time.sleep(ITL)
            with self._lock:
                running = list(self._running.items())
            for id, entry in running:
                self._step(id, *entry)

    def _step(
        self,
        id: str,
        request: Request,
        stamps: Stamps,
        on_event: Callable[[TokenEvent], None] | None,
        on_end: Callable[[Result], None],
    ) -> None:
        moment = now()
        if moment - stamps.accepted < TTFT:
            return
        stamps.tokens.append(moment)
        last = len(stamps.tokens) == request.sampling.max_new_tokens
        if on_event is not None:
            on_event(TokenEvent(7, "word ", moment, None, "length" if last else None, 300))
        if last:
            with self._lock:
                del self._running[id]
            stamps.end = moment
            count = len(stamps.tokens)
            on_end(Result(id, "word " * count, [7] * count, "length", 1, 0, 256, 300, stamps))


class StubModel(LoadedModel):
    """A loaded model over a :class:`StubEngine`. A subclass, so that mypy compares the signatures."""

    def __init__(self) -> None:
        self.engine, self._adapters = StubEngine(), {}
        self.info = ModelInfo(131_072, PUBLISHED_COST, "bfloat16", max_concurrency=256, vocabulary=262_208)

    def count(self, request: Request) -> TokenCounts:
        """Return no tokens."""
        return TokenCounts((), 0, 0)

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the same text for all tokens."""
        return [b"word " for _ in ids]


def main() -> None:
    """Run the engine process with a stub instead of a model (:func:`serve` starts it)."""
    import panscan.serve.engine_worker as engine_worker

    def open_stub(settings: Settings, adapters: Mapping[str, str] = MappingProxyType({})) -> LoadedModel:
        del settings, adapters
        return StubModel()

    engine_worker.open_model = open_stub  # type: ignore[attr-defined]  # mypy still compares the signatures
    engine_worker.main()


def serve(replicas: int) -> int:
    """Serve with stubs: one engine process, or replicas on Ray."""
    settings = Settings(model="mini", runner="engine", device="cpu", max_num_seqs=256)
    options = ServeOptions(settings=settings, port=0, max_queued_requests=512)
    client: AbstractContextManager[EngineClient]
    if replicas:
        from benchmarks.ingress_replica import StubReplica

        client = deployed_replicas(
            settings, Scale(replicas), None, show_logs=True, queued=512, drain_timeout=5.0, actor=StubReplica
        )
    else:

        def start_stub(_module: str, **options: Any) -> Child:
            return Child("benchmarks.ingress", **options)

        vars(engine_process)["Child"] = start_stub
        client = nullcontext(engine_process.EngineProcess(settings))
    return run_server(options, lambda url: print(url, flush=True), client)


@cache
def _requests(count: int, tokens: int) -> list[ChatRequest]:
    """Return requests about pages of 1.5 MB; no two of :data:`PAGES` successive ones are about the same page."""
    random = np.random.default_rng(0)
    pages = []
    for _ in range(PAGES):
        stream = BytesIO()
        Image.fromarray(random.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)).save(stream, "PNG", compress_level=1)
        pages.append(data_url("image/png", stream.getvalue()))
    question = {"type": "text", "text": "What is the total?"}
    parts = [[{"type": "image_url", "image_url": {"url": page}}, question] for page in pages]
    bodies = [chat_body("mini", [{"role": "user", "content": content}], tokens) for content in parts]
    return [ChatRequest(str(number), bodies[number % PAGES], tokens) for number in range(count)]


def _part_of(process: psutil.Process) -> str:
    """Return the part that a process belongs to; its other children are Ray's."""
    command = " ".join(process.cmdline())
    return next((part for part, pattern in _PARTS if re.search(pattern, command)), "ray")


def processes_of(server: int) -> dict[psutil.Process, str]:
    """Return this process, the server's and all of their descendants with their parts."""
    parts = {psutil.Process(): "client"}
    for process in [psutil.Process(server), *psutil.Process(server).children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            parts[process] = _part_of(process)
    return parts


def _threads_by_core() -> list[list[int]]:
    """Return the hardware threads that this process may use, by physical core."""
    cores: dict[str, list[int]] = defaultdict(list)
    for cpu in sorted(os.sched_getaffinity(0)):
        cores[Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("utf-8")].append(cpu)
    return list(cores.values())


def _pin(processes: dict[psutil.Process, str], count: int) -> None:
    """Give the server's processes one thread each of ``count`` cores, and the client and the replicas other cores."""
    cores = _threads_by_core()
    server = [threads[0] for threads in cores[:count]]
    others = [thread for threads in cores[count:] for thread in threads]
    for process, part in processes.items():
        chosen = others if part in ("client", "replica") else server
        for thread in process.threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, chosen)


def cpu_seconds(processes: dict[psutil.Process, str]) -> dict[str, float]:
    """Return the CPU time so far of each part."""
    seconds: dict[str, float] = defaultdict(float)
    for process, part in processes.items():
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds[part] += times.user + times.system
    return seconds


def _level(
    url: str, server: int, count: int, *, tokens: int, senders: int, rate: float | None = None, width: int | None = None
) -> dict[str, Any]:
    """Send requests at a rate, or in a closed loop of ``width`` requests, and return the figures."""
    processes, requests = processes_of(server), _requests(count, tokens)
    before, children = cpu_seconds(processes), os.times()
    arrivals = None if rate is None else gamma_arrivals(rate, count, seed=0)
    result = run_level(
        Endpoint(url, "mini", timeout=120.0), requests, arrivals, max_concurrency=width, processes=senders
    )
    spent, ended = cpu_seconds(processes), os.times()
    spent["client"] += ended.children_user + ended.children_system - children.children_user - children.children_system
    answered = [outcome for outcome in result.exchanges if outcome.error is None]
    added = [1e3 * (outcome.tokens[0] - outcome.accepted - TTFT) for outcome in answered]
    return {
        "rate": rate,
        "answered": len(answered),
        "errors": Counter(outcome.error for outcome in result.exchanges if outcome.error is not None),
        "requests_per_s": round(len(answered) / (result.ended - result.started), 2),
        "added_ttft_ms": [round(float(np.percentile(added, percent)), 1) for percent in (50, 95)] if added else None,
        "cpu_ms_per_request": {part: round(1e3 * (spent[part] - before[part]) / count, 2) for part in sorted(spent)},
    }


def measure(replicas: int, *, cores: int, seconds: float, rate: float, senders: int, tokens: int) -> dict[str, Any]:
    """Start a server and return the figures of a closed loop and of an open one."""
    command = os.environ.get("CMD", "").split() or [
        sys.executable,
        "-m",
        "benchmarks.ingress",
        "--serve",
        str(replicas),
    ]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])  # for child processes
    variables = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as server:
        assert server.stdout is not None  # a pipe
        try:
            url = server.stdout.readline().strip()
            width = ceil(CLOSED_RATE * (TTFT + ITL * (tokens - 1))) * max(2, replicas)
            sent = {"senders": senders, "tokens": tokens}
            warm = _level(url, server.pid, width, **sent, width=width)
            if cores:
                _pin(processes_of(server.pid), cores)
            count = max(width, int(seconds * warm["requests_per_s"]))
            closed = _level(url, server.pid, count, **sent, width=width)
            opened = _level(url, server.pid, int(seconds * rate), **sent, rate=rate)
        finally:
            server.terminate()
            server.wait(60)
    opened["kept"] = not opened["errors"] and opened["added_ttft_ms"][1] < KEPT_MS
    return {"replicas": replicas, "closed": closed, "open": opened}


def run() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, metavar="REPLICAS", help="only serve; 0: one engine process without Ray")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[0, REPLICAS], help="numbers of replicas; 0: without Ray"
    )
    parser.add_argument("--cores", type=int, default=0, help="cores of the server's processes; 0: no limit")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a level")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second of the open loop")
    parser.add_argument("--senders", type=int, default=1, help="processes of the client")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer, each an event for the client")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    if options.serve is not None:
        raise SystemExit(serve(options.serve))
    if options.cores >= len(_threads_by_core()):
        parser.error("--cores must leave cores for the client and the replicas; 0 shares all of them")
    shape = {name: getattr(options, name) for name in ("cores", "seconds", "rate", "senders", "tokens")}
    servers = [measure(replicas, **shape) for replicas in options.replicas]
    record = {"stub": {"ttft_s": TTFT, "itl_s": ITL}, "shape": shape, "servers": servers, "environment": environment()}
    print(json.dumps(servers, indent=1))
    if options.record:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    run()
