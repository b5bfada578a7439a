"""Fault injection for a cluster: real replicas on Ray Serve are killed, hung, overloaded and restarted under load.

    python -m benchmarks.faults                       # all faults, about ten minutes on two cores
    python -m benchmarks.faults --only kill_replica   # one of them; writes no record
    python -m benchmarks.faults --only kill_rank --server "--model tiny --device cpu --tensor-parallel-size 2"

Every request has one of five outcomes. Answered: complete. Refused: 429 or 503 with Retry-After. Unreachable: no
connection. Failed: another explicit error. Lost: anything else, such as a broken connection or a stream that ends
without an error event. An accepted non-streaming request must be answered. The record also has the latency before,
during and after each fault, and the recovery time until all replicas answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "serve-faults.json"
REPLICAS, SEQUENCES, QUEUED = 2, 8, 32
OPTIONS = f"--model mini --device cpu --max-num-seqs {SEQUENCES} --max-queued-requests {QUEUED}"
TOKENS = 40  # of each answer
STEADY = 10.0  # seconds of load before a fault, and after the recovery
START = 180.0  # seconds until a server is ready
RECOVERY = 180.0


class Server:
    """``panscan serve`` on Ray Serve, as a process.

    Args:
        log: file for its output.
        options: further options of the command.
        replicas: number of replicas.
        start_seconds: deadline for all replicas to answer.
    """

    def __init__(
        self,
        log: Path,
        options: str = OPTIONS,
        *,
        replicas: int = REPLICAS,
        start_seconds: float = START,
    ) -> None:
        self.log, self.options, self.replicas, self._start_seconds = log, options, replicas, start_seconds
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.family: set[psutil.Process] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None  # it was started
        return self._process

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; :meth:`ready` waits until it answers."""
        options = f"--replicas {self.replicas} --port {self.port} --drain-timeout 60 {self.options}"
        command = [sys.executable, "-m", "panscan", "serve", *options.split()]
        with self.log.open("a") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    async def ready(self) -> float:
        """Wait until all replicas answer, and return the elapsed seconds."""
        start = time.monotonic()
        async with httpx.AsyncClient(timeout=30) as client:
            while time.monotonic() - start < self._start_seconds:
                assert self.process.poll() is None, self.log.read_text()
                if len(await self.engines(client)) == self.replicas:
                    return time.monotonic() - start
                await asyncio.sleep(0.2)
        raise AssertionError(f"not ready within {self._start_seconds:g} s: {self.log.read_text()}")

    async def engines(self, client: httpx.AsyncClient) -> set[str]:
        """Return the names of the replicas that report statistics."""
        return {name for name in await self.metrics(client) if name.startswith("vllm:num_requests_running")}

    async def metrics(self, client: httpx.AsyncClient) -> dict[str, float]:
        """Return the server's metrics; empty while it cannot be reached."""
        try:
            text = (await client.get(f"{self.url}/metrics")).text
        except httpx.HTTPError:
            return {}
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs if name.startswith(("vllm:", "panscan:"))}

    def actors(self) -> list[psutil.Process]:
        """Return the processes of the replicas."""
        return self._running("EngineReplica")

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes of all replicas; none without tensor parallelism."""
        return self._running("panscan.engine.rank_worker")

    def _running(self, word: str) -> list[psutil.Process]:
        """Return the running processes of the server with a word in their command line."""
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self.family if _runs(process) and word in " ".join(_command(process))]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, int, float]:
        """Send a signal; return the exit code, the number of remaining processes, and the seconds until the exit."""
        self.actors()  # adds them to the family
        start = time.monotonic()
        self.process.send_signal(number)
        code = await asyncio.to_thread(self.process.wait, 120)
        seconds = time.monotonic() - start
        remaining = (await asyncio.to_thread(psutil.wait_procs, self.family, 30))[1]
        self.family.clear()
        return code, len(remaining), seconds


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


@dataclass(slots=True)
class Tally:
    """The outcomes of requests, with the start (``time.monotonic``) and duration of answered ones, in seconds."""

    ends: Counter[str] = field(default_factory=Counter)
    answered: list[tuple[float, float]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, end: str, start: float, reason: str = "") -> None:
        """Count one request."""
        self.ends["sent"] += 1
        self.ends[f"{kind}_{end}"] += 1
        if end == "answered":
            self.answered.append((start, time.monotonic() - start))
        elif reason:
            self.reasons[f"{kind} {end}: {reason}"] += 1

    def latency(self, since: float, until: float) -> dict[str, float] | None:
        """Return the median and 99th percentile latency, in seconds, of requests that started in an interval."""
        latencies = sorted(took for start, took in self.answered if since <= start < until)
        if not latencies:
            return None
        p99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
        return {"count": len(latencies), "p50_s": round(statistics.median(latencies), 3), "p99_s": round(p99, 3)}


async def ask(client: httpx.AsyncClient, tally: Tally, tokens: int = TOKENS) -> str:
    """Send one request; count and return its outcome."""
    start = time.monotonic()
    try:
        response = await client.post("/v1/chat/completions", json=_body(tokens))
    except httpx.HTTPError as error:
        end = "unreachable" if isinstance(error, httpx.ConnectError) else "lost"
        tally.add("plain", end, start, type(error).__name__)
        return end
    end, reason = _end_of(response.status_code, response.text, response.headers)
    if end == "answered" and response.json()["usage"]["completion_tokens"] != tokens:
        end, reason = "lost", "incomplete"
    tally.add("plain", end, start, reason)
    return end


async def read(
    client: httpx.AsyncClient, tally: Tally, tokens: int = TOKENS, *, pause: float = 0.0, kind: str = "stream"
) -> str:
    """Stream one request; count and return its outcome. ``pause``: seconds between two lines, for a slow reader."""
    start = time.monotonic()
    last = ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=_body(tokens, stream=True)) as response:
            if response.status_code != 200:
                end, reason = _end_of(response.status_code, (await response.aread()).decode(), response.headers)
                tally.add(kind, end, start, reason)
                return end
            async for line in response.aiter_lines():
                last = line or last
                await asyncio.sleep(pause)
    except httpx.HTTPError as error:
        end = "unreachable" if isinstance(error, httpx.ConnectError) else "lost"
        tally.add(kind, end, start, type(error).__name__)
        return end
    if last == "data: [DONE]":
        end, reason = "answered", ""
    elif '"error"' in last:
        end, reason = "failed", json.loads(last.removeprefix("data: "))["error"]["message"]
    else:
        end, reason = "lost", "the stream ended early"
    tally.add(kind, end, start, reason)
    return end


def _end_of(status: int, text: str, headers: httpx.Headers) -> tuple[str, str]:
    if status == 200:
        return "answered", ""
    explained = f"{status} {json.loads(text)['error']['message']}" if text.startswith('{"error"') else ""
    if status in (429, 503) and "retry-after" in headers and explained:
        return "refused", explained
    return ("failed", explained) if explained else ("lost", f"{status} without an explanation")


def _body(tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the total?"}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}


class Load:
    """A load of one client per slot, each sending one request after another; every fourth client streams."""

    def __init__(self, server: Server) -> None:
        self.tally = Tally()
        self._client = _client(server)
        self._stopped = False
        senders = [read if number % 4 == 0 else ask for number in range(server.replicas * SEQUENCES)]
        self._tasks = [asyncio.create_task(self._repeat(send)) for send in senders]

    async def _repeat(self, send: Callable[[httpx.AsyncClient, Tally], Awaitable[str]]) -> None:
        while not self._stopped:
            if await send(self._client, self.tally) != "answered":
                await asyncio.sleep(0.2)

    async def stop(self) -> Tally:
        """Stop sending, wait for all requests, and return their outcomes."""
        self._stopped = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()
        return self.tally


def _client(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=100)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)


async def _under_load(server: Server, harm: Callable[[psutil.Process], Awaitable[None]]) -> dict[str, Any]:
    """Harm a replica under load, and return the outcomes of the requests."""
    load = Load(server)
    before = time.monotonic()
    await asyncio.sleep(STEADY)
    async with httpx.AsyncClient(timeout=30) as client:
        retried = await _retried(server, client)
        actors = server.actors()
        fault = time.monotonic()
        await harm(actors[0])
        while time.monotonic() - fault < RECOVERY:
            restarted = len(server.actors()) == len(actors)
            if restarted and len(await server.engines(client)) == server.replicas:
                break
            await asyncio.sleep(0.2)
        recovered = time.monotonic()
        await asyncio.sleep(STEADY)
        tally = await load.stop()
        after = time.monotonic()
        retried = max(0, await _retried(server, client) - retried)
    return {
        **_ends(tally),
        "retried": retried,
        "recovered_s": round(recovered - fault, 1),
        "before": tally.latency(before, fault),
        "during": tally.latency(fault, recovered),
        "after": tally.latency(recovered, after),
    }


async def _retried(server: Server, client: httpx.AsyncClient) -> int:
    metrics = await server.metrics(client)
    return int(sum(value for name, value in metrics.items() if name.startswith("panscan:requests_retried")))


def _ends(tally: Tally) -> dict[str, Any]:
    return {**dict(sorted(tally.ends.items())), "reasons": dict(tally.reasons.most_common(5))}


async def _kill(victim: psutil.Process) -> None:
    victim.kill()
    while _runs(victim):
        await asyncio.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def kill_replica(server: Server) -> dict[str, Any]:
    """Kill a replica with SIGKILL."""
    return await _under_load(server, _kill)


async def kill_rank(server: Server) -> dict[str, Any]:
    """Kill one rank of a replica with SIGKILL: needs --tensor-parallel-size in the server's options."""

    async def harm(_actor: psutil.Process) -> None:
        rank = server.ranks()[0]
        actor = next(process for process in rank.parents() if process in server.actors())
        await _kill(rank)
        while _runs(actor):  # the replica ends with its ranks, and another one starts
            await asyncio.sleep(0.05)

    return await _under_load(server, harm)


async def hang_replica(server: Server) -> dict[str, Any]:
    """Stop a replica's process with SIGSTOP until the watchdog kills it."""

    async def harm(victim: psutil.Process) -> None:
        victim.suspend()
        while _runs(victim):
            await asyncio.sleep(0.2)

    return await _under_load(server, harm)


async def poisonous_request(server: Server) -> dict[str, Any]:
    """Kill every replica that computes one request, until that request fails."""
    tally, kills = Tally(), 0
    async with _client(server) as client:
        poison = asyncio.create_task(ask(client, tally, 5000))
        while not poison.done():
            running = [value for name, value in (await server.metrics(client)).items() if "requests_running" in name]
            if any(running):
                kills += 1
                for victim in server.actors():
                    await _kill(victim)
            await asyncio.sleep(0.2)
        seconds = await server.ready()
        after = await ask(client, tally)
    return {**_ends(tally), "rounds_of_kills": kills, "answers_afterwards": after, "recovered_s": round(seconds, 1)}


async def full_queue(server: Server) -> dict[str, Any]:
    """Send four times as many requests at once as may run or wait."""
    tally = Tally()
    async with _client(server) as client:
        await asyncio.gather(*[ask(client, tally) for _ in range(4 * (server.replicas * SEQUENCES + QUEUED))])
    return _ends(tally)


async def many_clients(server: Server) -> dict[str, Any]:
    """Run 500 clients at once, half of them streaming. A refused client retries until it is answered."""
    tally = Tally()

    async def persist(send: Callable[[httpx.AsyncClient, Tally], Awaitable[str]]) -> None:
        while await send(client, tally) == "refused":
            await asyncio.sleep(1.0)

    start = time.monotonic()
    async with _client(server) as client:
        await asyncio.gather(*[persist(ask if number % 2 else read) for number in range(500)])
    return {**_ends(tally), "seconds": round(time.monotonic() - start, 1)}


async def slow_readers(server: Server) -> dict[str, Any]:
    """Read eight streams at ten events per second, beside the usual load."""
    load = Load(server)
    start = time.monotonic()
    async with _client(server) as client:
        slow = [read(client, load.tally, 200, pause=0.05, kind="slow_stream") for _ in range(8)]
        await asyncio.gather(*slow)
    tally = await load.stop()
    tally.answered = [(sent, took) for sent, took in tally.answered if took < 10.0]  # excludes the slow streams
    return {**_ends(tally), "during": tally.latency(start, time.monotonic())}


async def restart_head(server: Server) -> dict[str, Any]:
    """Kill the whole server with SIGKILL and restart it; clients repeat lost requests."""
    tally, repeated, stopped = Tally(), 0, False

    async def persist() -> None:
        nonlocal repeated
        while not stopped:
            attempts = Tally()
            while await ask(client, attempts) != "answered":
                repeated += 1
                await asyncio.sleep(0.5)
            tally.add("plain", "answered", time.monotonic())

    async with _client(server) as client:
        clients = [asyncio.create_task(persist()) for _ in range(server.replicas * SEQUENCES)]
        await asyncio.sleep(STEADY)
        before = tally.ends["sent"]
        code, remaining, _ = await server.end(signal.SIGKILL)
        server.start()
        seconds = await server.ready()
        await asyncio.sleep(STEADY)
        stopped = True
        await asyncio.gather(*clients)
    ends = {"sent": tally.ends["sent"], "plain_answered": tally.ends["plain_answered"]}
    return {
        **ends,
        "answered_before": before,
        "repeated_by_clients": repeated,
        "exit_code": code,
        "processes_left": remaining,
        "recovered_s": round(seconds, 1),
    }


async def sigterm_under_load(server: Server) -> dict[str, Any]:
    """Send SIGTERM under load: accepted requests are answered, others refused; exit code 0, no remaining process."""
    load = Load(server)
    await asyncio.sleep(STEADY)
    ending = asyncio.create_task(server.end())
    with suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=30) as client:
            while (await client.get(f"{server.url}/ready")).status_code == 200:
                await asyncio.sleep(0.05)
    tally = await load.stop()
    code, remaining, seconds = await ending
    return {**_ends(tally), "exit_code": code, "processes_left": remaining, "ended_s": round(seconds, 1)}


async def second_signal(server: Server) -> dict[str, Any]:
    """Send a second SIGTERM during a long answer: the server exits without waiting for it."""
    tally = Tally()
    async with _client(server) as client:
        reading = asyncio.create_task(read(client, tally, 10_000))
        await asyncio.sleep(2.0)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(2.0)
        waited = server.process.poll() is None
        code, remaining, seconds = await server.end()
        await reading
    return {
        **_ends(tally),
        "waited_for_the_first": waited,
        "exit_code": code,
        "processes_left": remaining,
        "ended_s": round(seconds, 1),
    }


async def deploy_config(server: Server) -> dict[str, Any]:
    """Check that the printed configuration answers when Ray's own command runs it (no fault)."""
    command = [sys.executable, "-m", "panscan", "serve", "--model", "mini", "--device", "cpu", "--print-config"]
    printed = subprocess.run([*command, "--port", "8129"], capture_output=True, text=True, check=True).stdout
    config = server.log.with_name("serve.yaml")
    config.write_text(printed, "utf-8")
    tally = Tally()
    ray_serve = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(config)]
    with server.log.with_name("deploy.log").open("w") as output:
        variables = {**os.environ, "RAY_ADDRESS": "local"}  # not a cluster that somebody else has started here
        deployed = subprocess.Popen(ray_serve, stdout=output, stderr=output, start_new_session=True, env=variables)
    try:
        deadline = time.monotonic() + START
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8129", timeout=60) as client:
            while time.monotonic() < deadline and not await _is_ready(client):
                assert deployed.poll() is None, server.log.with_name("deploy.log").read_text()
                await asyncio.sleep(0.5)
            await asyncio.gather(*[ask(client, tally) for _ in range(4)])
    finally:
        family = psutil.Process(deployed.pid).children(recursive=True)
        deployed.kill()  # Ray's processes exit with it
        deployed.wait()
        await asyncio.to_thread(psutil.wait_procs, family, 30)
    return _ends(tally)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


FAULTS: tuple[Callable[[Server], Awaitable[dict[str, Any]]], ...] = (
    full_queue,
    many_clients,
    slow_readers,
    kill_replica,
    hang_replica,
    poisonous_request,
    restart_head,
    sigterm_under_load,
    second_signal,
    deploy_config,
)


async def run(names: Sequence[str], options: str = OPTIONS, **more: Any) -> dict[str, Any]:
    """Inject the named faults, one after another, and return the outcome of each. Options: see :class:`Server`."""
    outcomes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", options, **more)
        try:
            for fault in (*FAULTS, kill_rank):
                if fault.__name__ in names:
                    if fault is not deploy_config:
                        if not server.running:
                            server.start()
                        await server.ready()
                    outcomes[fault.__name__] = await fault(server)
                    print(fault.__name__, json.dumps(outcomes[fault.__name__], indent=1), flush=True)
        finally:
            if server.running:
                await server.end(signal.SIGKILL)
    return outcomes


def main() -> None:
    """Run the faults and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.__name__ for fault in FAULTS]
    only = [*names, kill_rank.__name__]
    parser.add_argument("--only", choices=only, action="append", help="inject this fault only; writes no record")
    parser.add_argument("--server", default=OPTIONS, help="options of panscan serve; default: %(default)s")
    options = parser.parse_args()
    outcomes = asyncio.run(run(options.only or names, options.server))
    if options.only is None and options.server == OPTIONS:
        shape = {"replicas": REPLICAS, "max_num_seqs": SEQUENCES, "max_queued_requests": QUEUED, "tokens": TOKENS}
        record = {"server": shape, "faults": outcomes, "environment": environment()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
