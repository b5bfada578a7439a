"""Well-formed but expensive requests to a server under limits of memory and descriptors, beside good requests.

:mod:`benchmarks.fuzz_server` runs it. The server runs under ``ulimit -v 8000000`` and ``ulimit -n 1024``. During each
part, which another process sends, clients send good requests: every one must be answered, with a 99th percentile of at
most three times that just before the part. The server must survive, stay within its memory, and be idle afterwards.
Then processes are killed under load: no request may end without an answer or an error.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
from tests.serve.serving import engines_of

from benchmarks.faults import Tally, ask, read
from benchmarks.robustness.bombs import RECIPES, bomb
from benchmarks.robustness.seeds import SEEDS

ADDRESS_SPACE_KB, DESCRIPTORS = 8_000_000, 1024
MOST_MB = 2500  # resident memory of each process
MOST_RATIO = 3.0  # of the 99th percentiles of good requests
_START_SECONDS = 180.0
_IDLE_SECONDS = 40.0  # until nothing works for the requests of a part any more
_TIMEOUT = 60.0
_GOOD_CLIENTS, _PAUSE = 3, 0.05
_ATTACK_PAUSE = 0.1  # seconds between two requests of a hostile client
_PATH = "/v1/chat/completions"
_LIMITED = f'ulimit -v {ADDRESS_SPACE_KB} && ulimit -n {DESCRIPTORS} && exec "$@"'


class PressedServer:
    """``panscan serve`` under limits, on a fixed port.

    Args:
        options: command line after ``panscan``.
        log: file for its output.
    """

    def __init__(self, options: list[str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._options, self.log = options, log
        self.process: subprocess.Popen[bytes] | None = None
        self.number = 0
        self.bombs: list[bytes] = []
        log.unlink(missing_ok=True)

    def address(self) -> PressedServer:
        """Return a copy that another process can use to send requests."""
        other = copy(self)
        other.process, other.number = None, self.pid
        return other

    @property
    def pid(self) -> int:
        """Process id of the HTTP server."""
        return self.number if self.process is None else self.process.pid

    def start(self) -> None:
        """Start the process; :meth:`ready` waits until it answers."""
        command = [sys.executable, "-m", "panscan", *self._options, "--port", str(self.port)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(["bash", "-c", _LIMITED, "bash", *command], stdout=output, stderr=output)

    def processes(self) -> dict[str, psutil.Process]:
        """Return the server's process, the engine's and all decoding processes by name."""
        processes = {"server": psutil.Process(self.pid), "engine": self.engine()}
        for child in processes["server"].children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if "panscan.images.decoder" in " ".join(child.cmdline()):
                    processes[f"decoder {child.pid}"] = child
        return processes

    def engine(self) -> psutil.Process:
        """Return the engine's process.

        Raises:
            psutil.NoSuchProcess: it is being restarted.
        """
        if not (engines := engines_of(self.pid)):
            raise psutil.NoSuchProcess(self.pid)
        return engines[0]

    async def ready(self) -> None:
        """Wait until the server can answer.

        Raises:
            RuntimeError: it ended, or is not ready in time.
        """
        end = time.monotonic() + _START_SECONDS
        async with httpx.AsyncClient(timeout=5) as client:
            while time.monotonic() < end:
                if self.process is None or self.process.poll() is not None:
                    raise RuntimeError(f"the server ended; see {self.log}")
                with suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)
        raise RuntimeError(f"the server is not ready; see {self.log}")

    def client(self) -> httpx.AsyncClient:
        """Return a client without limits on connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        return httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT, limits=limits)

    async def connect(self, head: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection on which ``head`` was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head)
        return reader, writer


def _head(length: int, kind: str = "application/json") -> bytes:
    lines = (f"POST {_PATH} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {kind}", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def _question(content: bytes, **fields: Any) -> bytes:
    url = f"data:;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is the total?"}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **fields}).encode()


@dataclass(slots=True)
class Good:
    """Good requests beside a part, and probes of ``/health``: latencies in seconds, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Return counts and latencies for the record."""
        return {
            "answered": len(self.seconds),
            "p50_s": _quantile(self.seconds, 50),
            "p99_s": _quantile(self.seconds, 99),
            "health_p99_s": _quantile(self.health, 99),
            "problems": dict(self.problems),
        }


def _quantile(values: list[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 4) if values else None


@asynccontextmanager
async def good_requests(server: PressedServer) -> AsyncIterator[Good]:
    """Send good requests until the context ends; those in flight are finished."""
    good, stopped = Good(), asyncio.Event()
    body = _question(SEEDS["png"]())

    async def repeat(client: httpx.AsyncClient, path: str, into: list[float]) -> None:
        while not stopped.is_set():
            start = time.monotonic()
            try:
                sent = client.post(path, content=body, headers=_JSON) if path == _PATH else client.get(path)
                response = await sent
                if response.status_code == 200:
                    into.append(time.monotonic() - start)
                else:
                    good.problems[f"{path} {response.status_code} {response.text[:100]}"] += 1
            except httpx.HTTPError as error:
                good.problems[f"{path} {type(error).__name__}"] += 1
            await asyncio.sleep(_PAUSE)

    async with server.client() as client:
        tasks = [asyncio.create_task(repeat(client, _PATH, good.seconds)) for _ in range(_GOOD_CLIENTS)]
        tasks.append(asyncio.create_task(repeat(client, "/health", good.health)))
        try:
            yield good
        finally:
            stopped.set()
            await asyncio.gather(*tasks)


_JSON = {"content-type": "application/json"}

Part = Callable[[PressedServer, float, Random], Coroutine[Any, Any, Counter[str]]]


async def _send_all(
    server: PressedServer, seconds: float, width: int, case: Callable[[], tuple[bytes, dict[str, str]]]
) -> Counter[str]:
    """Send bodies from several clients for some time, and return the statuses. A status of 500 must not occur."""
    statuses: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def repeat(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            body, headers = case()
            try:
                response = await client.post(_PATH, content=body, headers={**headers, "x-request-timeout": "20"})
                statuses[str(response.status_code)] += 1
                if len(response.content) > 20_000_000 or (response.status_code >= 400 and len(response.content) > 2000):
                    statuses["too long"] += 1
            except httpx.HTTPError as error:
                statuses[type(error).__name__] += 1
            await asyncio.sleep(_ATTACK_PAUSE)

    async with server.client() as client:
        await asyncio.gather(*[repeat(client) for _ in range(width)])
    return statuses


async def json_names(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Send thousands of names, the last one repeated; long names; deep and wide values; 59 kB that count most."""

    def repeated(count: int, field: str) -> bytes:
        names = ",".join(f'"k{index}":""' for index in (*range(count), count - 1))
        return f'{{"messages":[{{"role":"user","content":"Hi"}}],"{field}":{{{names}}}}}'.encode()

    opening = b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
    bodies = (
        repeated(20_000, "metadata"),
        repeated(3500, "metadata"),
        b'{"' + b"k" * 10_000_000 + b'":0}',
        repeated(20_000, "schema").replace(b'"schema":', opening) + b"}}",
        b'{"x":' + b"[[]," * 200_000,
        b'{"messages":[' + b",".join([b"{}"] * 19_000) + b"]}",
        b'{"x":"' + b'\\"' * 3_000_000,
        b'{"metadata":{' + b",".join(b'"%d":0' % index for index in range(40_000)) + b"}}",
    )
    return await _send_all(server, seconds, 4, lambda: (random.choice(bodies), _JSON))


async def log_probabilities(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Ask for as many log-probabilities as the server allows, and for more."""

    def case() -> tuple[bytes, dict[str, str]]:
        fields = {
            "n": 2,
            "top_logprobs": 20,
            "max_tokens": random.choice((16, 16, 200, 2000, 16_000)),
            "ignore_eos": True,
        }
        message = {"role": "user", "content": "Hi"}
        body = {"messages": [message], "logprobs": True, "stream": random.random() < 0.5, **fields}
        return json.dumps(body).encode(), _JSON

    return await _send_all(server, seconds, 2, case)


async def multipart(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Send large uploads, many parts, many headers, and near boundaries; none may reach the disk."""
    page = b'\r\n--limit\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n'
    tail = (
        b'\r\n--limit\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
        + json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "attachment:a"}}]}]}
        ).encode()
        + b"\r\n--limit--\r\n"
    )
    contents = (
        bytes(12_000_000),
        b"\r\n--limi" * 1_000_000,
        b"\r\n" * 4_000_000,
        b"\r\n--limit" * 1_000_000,
        b"\r\n--limit\r\nX: " + b"y" * 10_000_000,
        (page % b"b") * 100_000,
        SEEDS["png"](),
    )
    headers = {"content-type": "multipart/form-data; boundary=limit"}
    statuses = await _send_all(server, seconds, 2, lambda: ((page % b"a") + random.choice(contents) + tail, headers))
    temporary = [file.path for file in psutil.Process(server.pid).open_files() if file.path.startswith("/tmp")]
    statuses["files on disk"] += len([path for path in temporary if Path(path) != server.log])
    return +statuses


async def slow_bodies(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Open more connections than there are slots, each of which sends its body at one byte a second."""
    statuses: Counter[str] = Counter()

    async def drip(length: int) -> None:
        try:
            reader, writer = await server.connect(_head(length))
            answer = asyncio.ensure_future(reader.read(15))
            end = time.monotonic() + max(seconds, 15.0)
            while not answer.done() and time.monotonic() < end:
                writer.write(b" ")
                await asyncio.sleep(1.0)
            statuses[answer.result()[9:12].decode() if answer.done() else "open"] += 1
            answer.cancel()
            writer.close()
        except OSError:
            statuses["closed"] += 1

    await asyncio.gather(*[drip(random.choice((100, 10**6))) for _ in range(384)])
    return statuses


async def disconnects(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Close connections in the middle of a head, of a body, of the work, and of an answer."""
    sent: Counter[str] = Counter()
    question = _question(SEEDS["pdf, images"](), max_tokens=1000, ignore_eos=True, stream=True)
    request = _head(len(question)) + question
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cut = random.choice((20, 90, len(request) // 2, len(request) - 1, len(request)))
        _, writer = await server.connect(request[:cut])
        await asyncio.sleep(random.choice((0.0, 0.01, 0.1)))
        writer.transport.abort() if random.random() < 0.5 else writer.close()
        sent["cut"] += 1
    return sent


async def idle_connections(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Open more connections than the server may have descriptors, and leave them idle or with half a head."""
    heads = (b"", b"GET / HTTP/1.1\r\nHost: ")
    opened = [await server.connect(random.choice(heads)) for _ in range(DESCRIPTORS + 100)]
    await asyncio.sleep(seconds)
    for _, writer in opened:
        writer.close()
    return Counter(opened=len(opened))


async def bombs(server: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Send pages that are small as files and expensive to open."""
    return await _send_all(server, seconds, 4, lambda: (random.choice(server.bombs), _JSON))


PARTS: tuple[Part, ...] = (
    json_names,
    log_probabilities,
    multipart,
    slow_bodies,
    disconnects,
    idle_connections,
    bombs,
)
"""The parts, in order."""


async def _peak(server: PressedServer, peaks: Counter[str]) -> None:
    """Keep the peaks of resident memory in MB until cancelled."""
    while True:
        with suppress(psutil.Error):
            for name, process in server.processes().items():
                kind = name.partition(" ")[0]
                peaks[kind] = max(peaks[kind], process.memory_info().rss >> 20)
        await asyncio.sleep(0.2)


async def _until_idle(server: PressedServer) -> bool:
    """Return whether the server has stopped all work of a part in time."""
    end = time.monotonic() + _IDLE_SECONDS
    async with server.client() as client:
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                lines = (await client.get("/metrics")).text.splitlines()
                names = ("panscan:http_requests_active{", "vllm:num_requests_running{", "vllm:num_requests_waiting{")
                if not any(float(line.split()[-1]) for line in lines if line.startswith(names)):
                    return True
            await asyncio.sleep(0.2)
    return False


def _sent(part: Part, address: PressedServer, seconds: float, random: Random) -> Counter[str]:
    """Send a part. Runs in another process, so that it does not delay the good requests."""
    _raise_descriptor_limit()
    return asyncio.run(part(address, seconds, random))


def _raise_descriptor_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _part(server: PressedServer, part: Part, seconds: float, random: Random) -> dict[str, Any]:
    """Run one part beside good requests."""
    engine = server.engine().pid
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        await loop.run_in_executor(pool, _raise_descriptor_limit)  # starts the process
        async with good_requests(server) as before:
            await asyncio.sleep(seconds)
        async with good_requests(server) as good:
            start = time.monotonic()
            statuses = await loop.run_in_executor(pool, _sent, part, server.address(), seconds, random)
            elapsed = time.monotonic() - start
    summary, without = good.summary(), before.summary()
    ratio = round((summary["p99_s"] or _TIMEOUT) / (without["p99_s"] or _TIMEOUT), 2)
    problems = [f"good requests: {name}" for name in good.problems]
    problems += [f"{name}: {count}" for name, count in statuses.items() if name in ("500", "too long", "files on disk")]
    if statuses and ratio > MOST_RATIO:
        problems.append(f"the p99 of good requests is {ratio} times that without")
    if not await _until_idle(server):
        problems.append("work went on after the last request")
    if server.engine().pid != engine:
        problems.append("the engine's process was replaced")
    return {
        "seconds": round(elapsed, 1),
        "statuses": dict(sorted(statuses.items())),
        "good": summary,
        "without": without,
        "ratio": ratio,
        "problems": problems,
    }


Sender = Callable[[httpx.AsyncClient, Tally, int], Awaitable[str]]


async def _ask_about_page(client: httpx.AsyncClient, tally: Tally, tokens: int) -> str:
    """Ask about a PDF, which decoding processes open; count and return the outcome."""
    start = time.monotonic()
    response = await client.post(_PATH, content=_question(SEEDS["pdf, images"](), max_tokens=tokens), headers=_JSON)
    end = "answered" if response.status_code == 200 else "failed" if "SIGKILL" in response.text else "lost"
    tally.add("page", end, start, "" if end == "answered" else response.text[:200])
    return end


async def _loaded(
    server: PressedServer, kill: Callable[[], Awaitable[None]], kills: int, senders: Sequence[Sender] = (ask, ask)
) -> dict[str, Any]:
    """Kill processes under load, and count how requests end."""
    tally, stopped = Tally(), False

    async def repeat(send: Sender) -> None:
        async with server.client() as client:
            while not stopped:
                if await send(client, tally, 60) != "answered":
                    await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(repeat(send)) for send in (ask, ask, read, read, *senders)]
    for _ in range(kills):
        await server.ready()
        answered = len(tally.answered)
        while len(tally.answered) < answered + 4:  # so that deaths do not count as consecutive
            await asyncio.sleep(0.05)
        await kill()
    await server.ready()
    stopped = True
    await asyncio.gather(*tasks)
    silent = [reason for reason in tally.reasons if reason.endswith(("incomplete", "early", "without an explanation"))]
    ends = {"kills": kills, **dict(sorted(tally.ends.items())), "reasons": dict(tally.reasons.most_common(6))}
    return {**ends, "problems": [f"lost silently: {reason}" for reason in silent]}


async def engine_kills(server: PressedServer, kills: int) -> dict[str, Any]:
    """Kill the engine's process, every third time again while it restarts. No request may be lost."""
    number = 0

    async def kill() -> None:
        nonlocal number
        number += 1
        engine = server.engine()
        engine.kill()
        if number % 3 == 0:
            while not (others := [child for child in engines_of(server.pid) if child.pid != engine.pid]):
                await asyncio.sleep(0.02)
            others[0].kill()

    result = await _loaded(server, kill, kills)
    if result.get("plain_lost") or result.get("plain_failed"):
        result["problems"].append("accepted requests were not answered")
    if result.get("stream_lost"):
        result["problems"].append("streams ended without an error")
    return result


async def decoder_kills(server: PressedServer, kills: int) -> dict[str, Any]:
    """Kill decoding processes of the server and of the engine. Only pages that they are opening fail."""
    random = Random(0)

    async def kill() -> None:
        with suppress(psutil.Error):
            decoders = [process for name, process in server.processes().items() if name.startswith("decoder")]
            if decoders:
                random.choice(decoders).kill()

    result = await _loaded(server, kill, kills, [_ask_about_page] * 3)
    if result.get("page_lost") or result.get("plain_failed") or result.get("plain_lost") or result.get("stream_failed"):
        result["problems"].append("requests without a killed page failed, or ended without an answer or an error")
    return result


async def server_kills(server: PressedServer, kills: int) -> dict[str, Any]:
    """Kill the HTTP process. Clients see a broken connection, and the engine's process ends too."""
    survivors: list[psutil.Process] = []

    async def kill() -> None:
        children = psutil.Process(server.pid).children(recursive=True)
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None  # it was started
        await asyncio.to_thread(server.process.wait)
        survivors.extend((await asyncio.to_thread(psutil.wait_procs, children, 20))[1])
        server.start()

    result = await _loaded(server, kill, kills)
    if survivors:
        result["problems"].append(f"{len(survivors)} processes outlived the server")
    return result


async def second_signal(server: PressedServer) -> dict[str, Any]:
    """Send SIGTERM twice during long answers, whole and streamed, a slow body and a slow page."""
    tally = Tally()
    assert server.process is not None  # it was started
    async with server.client() as client:
        tasks = [asyncio.create_task(send(client, tally, 10_000)) for send in (ask, read, read)]
        slow = await server.connect(_head(1000) + b"{")
        await asyncio.sleep(2.0)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        code = await asyncio.to_thread(server.process.wait, 60)
        await asyncio.gather(*tasks)
        first = await slow[0].read(12)
    seconds, log = round(time.monotonic() - start, 1), server.log.read_text(errors="replace")
    problems = [f"exit code {code}"] if code else []
    problems += [f"lost: {reason}" for reason in tally.reasons if " lost: " in reason]
    problems += ["a traceback in the log"] if "Traceback" in log else []
    problems += [f"it took {seconds} s"] if seconds > 12 else []
    problems += [f"a slow body got {first!r}"] if first[9:12] != b"503" else []
    return {**dict(tally.ends), "reasons": dict(tally.reasons), "ended_s": seconds, "problems": problems}


async def press(server: PressedServer, seconds: float, kills: int, seed: int) -> dict[str, Any]:
    """Run all parts and return their results; ``problems`` of a part say what failed.

    Args:
        server: server that is not running; it is started, and stopped at the end.
        seconds: time of each part.
        kills: kills of the engine's process, and of the HTTP process.
        seed: random seed.
    """
    server.bombs = [_question(bomb(seed, index)[1]) for index in range(2 * len(RECIPES))]
    server.start()
    await server.ready()
    peaks: Counter[str] = Counter()
    watching = asyncio.create_task(_peak(server, peaks))
    results: dict[str, Any] = {}
    async with good_requests(server):  # the first requests are slower
        await asyncio.sleep(min(5.0, seconds))
    for part in PARTS:
        results[part.__name__] = await _part(server, part, seconds, Random(f"{seed}:{part.__name__}"))
        _show(part.__name__, results)
    for kill in (engine_kills, decoder_kills, server_kills):
        results[kill.__name__] = await kill(server, kills)
        _show(kill.__name__, results)
    results["second_signal"] = await second_signal(server)
    _show("second_signal", results)
    watching.cancel()
    grown = [f"{name}: {peak} MB" for name, peak in peaks.items() if peak > MOST_MB]
    results["memory"] = {"peak_mb": dict(peaks), "most_mb": MOST_MB, "problems": grown}
    return results


def _show(name: str, results: dict[str, Any]) -> None:
    print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
