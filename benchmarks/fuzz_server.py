"""Fuzzing of the server: damaged images, JSON and HTTP, and requests from its OpenAPI document.

    python -m benchmarks.fuzz_server --cases 12000

It starts ``panscan serve`` with the tiny model, sends the cases, and writes ``records/serve-fuzz.json``. A case fails
if its response is a 5xx other than 503 and 504, is an error in another format than OpenAI's, or does not arrive in
time. The job fails if a case fails, if a process grows beyond ``--most-growth-mb``, or if the answer to a fixed
question changes. ``--only 1234`` reproduces a case from the seed and its number. ``openapi`` needs schemathesis.

Then well-formed but expensive requests, and kills, run beside good requests on a server under ``ulimit -v``; see
:mod:`benchmarks.pressure`. ``--pressure 0`` skips them, and ``--cases 0`` the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import importlib
import json
import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from tests.serve.serving import engines_of

from benchmarks.pressure import PressedServer, press
from benchmarks.robustness.mutate import MUTATIONS, mutated
from benchmarks.robustness.seeds import SEEDS
from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "serve-fuzz.json"
DEADLINE = 40.0  # seconds for one answer; the server's timeout is half of it
_FINE = {503, 504}
_SILENCE = 0.3  # seconds until we assume that the server waits for the rest of a request
_SAMPLES = 20  # memory readings
_VERSIONS = ("starlette", "uvicorn", "h11", "msgspec", "python-multipart", "schemathesis", "hypothesis")
_SERVER = [
    "serve",
    "--model",
    "tiny",
    "--served-model-name",
    "mini",
    "--port",
    "0",
    "--device",
    "cpu",
    "--max-new-tokens",
    "16",
    "--max-choices",
    "2",
    "--kv-cache-gb",
    "0.05",
    "--vision-cache-gb",
    "0.02",
    "--image-memory-gb",
    "0.5",
    "--max-pixels",
    "20000000",
]

_PRESSED = [
    "serve",
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--max-new-tokens",
    "4",
    "--kv-cache-gb",
    "0.1",
    "--vision-cache-gb",
    "0.02",
    "--image-memory-gb",
    "0.5",
    "--drain-timeout",
    "30",
]

_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/views")
_NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**40,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
)
_TEXTS: tuple[Any, ...] = (
    "",
    " ",
    "\0",
    "a" * 5000,
    "<start_of_turn>user",
    "<start_of_image>",
    "<image_soft_token>",
    "<eos>" * 50,
    "\ud800",
    "\ue0000\ue001",
    "e\u0301\u202e\U0001f468\u200d\U0001f469",
    "\ufffe",
    "../../etc/passwd",
    "{{7*7}}",
    "data:image/png;base64,",
    "file:///etc/passwd",
    "http://127.0.0.1:1/",
    "http://[::1",
    "attachment:",
    "NaN",
)
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "text"},
    [{"type": "image_url"}],
)
_FULL: dict[str, Any] = {
    "model": "mini",
    "stream": False,
    "max_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "n": 1,
    "ignore_eos": False,
    "user": "a",
    "metadata": {"a": "b"},
    "store": False,
}
_CHAT: dict[str, Any] = {
    **_FULL,
    "logprobs": True,
    "top_logprobs": 2,
    "mm_processor_kwargs": {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2},
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^a{1,3}$"}, "b": {"enum": [1, 2.5, None]}},
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile request.

    Args:
        group: what is hostile, one of :data:`GROUPS`.
        how: name of the mutation.
        path: URL path.
        body: request body.
        headers: headers besides those of every request.
        raw: bytes to send over TCP instead.
    """

    group: str
    how: str
    path: str = ""
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    raw: bytes | None = None


def attack(seed: int, index: int) -> Attack:
    """Return a case; it does not depend on earlier cases."""
    names = list(GROUPS)
    return GROUPS[names[index % len(names)]](Random(f"{seed}:serve:{index}"), index // len(names))


@cache
def _seed_file(kind: str) -> bytes:
    return SEEDS[kind]()


def _file(random: Random, turn: int) -> tuple[str, bytes]:
    """Return a description of the damage, and the damaged image or document."""
    kind = list(SEEDS)[turn % len(SEEDS)]
    if random.random() < 0.1:
        other = _seed_file(random.choice(list(SEEDS)))
        cut = random.choice((4, 8, 16, 64, 256))
        return f"{kind}: head of another file", other[:cut] + _seed_file(kind)[cut:]
    name = list(MUTATIONS)[turn // len(SEEDS) % len(MUTATIONS)]
    return f"{kind}: {name}", mutated(_seed_file(kind), name, random)


def _question(url: str, **fields: Any) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is the total?"}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **fields}).encode()


def _image(random: Random, turn: int) -> Attack:
    how, content = _file(random, turn)
    url = f"data:;base64,{base64.b64encode(content).decode()}"
    path = random.choice(("/v1/chat/completions", "/v1/chat/completions", "/tokenize", "/v1/views"))
    if path == "/v1/views":
        body = json.dumps({"image": url, "preview": random.random() < 0.5}).encode()
    elif path == "/tokenize":
        body = json.dumps({"messages": json.loads(_question(url))["messages"]}).encode()
    else:
        body = _question(url, stream=random.random() < 0.3)
    return Attack("image", how, path, body)


def _multipart(random: Random, turn: int) -> Attack:
    """Return damaged files in a multipart body; half of the bodies are damaged too."""
    how, content = _file(random, turn)
    head = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'
    parts = [("request", "", _question("attachment:page"))]
    parts.insert(random.randrange(2), ("page", '; filename="a.png"', content))
    if random.random() < 0.1:
        parts.append(random.choice(parts))
    body = (
        b"".join(b"--limit\r\n" + head.format(name, file).encode() + content + b"\r\n" for name, file, content in parts)
        + b"--limit--\r\n"
    )
    if random.random() < 0.5:
        name = random.choice(list(MUTATIONS))
        how, body = f"body: {name}", mutated(body, name, random)
    return Attack(
        "multipart", how, "/v1/chat/completions", body, (("content-type", "multipart/form-data; boundary=limit"),)
    )


def _body_of(path: str) -> dict[str, Any]:
    """Return a valid body with every field."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    match path:
        case "/v1/chat/completions":
            return {**_CHAT, "messages": messages}
        case "/v1/completions":
            return {**_FULL, "prompt": ["Hi"], "logprobs": 1}
        case "/tokenize":
            return {"model": "mini", "messages": messages, "mm_processor_kwargs": _CHAT["mm_processor_kwargs"]}
    return {"width": 900, "height": 300, "mm_processor_kwargs": _CHAT["mm_processor_kwargs"], "preview": False}


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside a JSON value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield value, key
        yield from _spots(inner)


def _hostile(random: Random, value: Any) -> Any:
    """Return another value, mostly of the same type, so that it passes more checks."""
    kinds = {int: _NUMBERS, float: _NUMBERS, str: _TEXTS}
    same = kinds.get(type(value), _OTHERS)
    return random.choice(same if random.random() < 0.7 else random.choice((_NUMBERS, _TEXTS, _OTHERS)))


def _fields(random: Random, turn: int) -> Attack:
    """Return a body with one to three values replaced, removed, renamed or wrapped."""
    path = _PATHS[turn % len(_PATHS)]
    body = json.loads(json.dumps(_body_of(path)))
    for _ in range(random.choice((1, 1, 2, 3))):
        container, key = random.choice(list(_spots(body)))
        how = random.choice(("value", "value", "value", "remove", "rename", "nest", "repeat"))
        if how == "value":
            container[key] = _hostile(random, container[key])
        elif how == "remove":
            del container[key]
        elif how == "rename" and isinstance(container, dict):
            container[random.choice([text for text in _TEXTS if text])] = container.pop(key)
        elif how == "nest":
            container[key] = [container[key]] if random.random() < 0.5 else {"a": container[key]}
        else:
            container[key] = [container[key]] * random.choice((2, 20, 2000))
        if not list(_spots(body)):
            break
    return Attack("fields", how, path, json.dumps(body).encode())


def _json(random: Random, turn: int) -> Attack:
    """Return a body whose bytes are damaged."""
    path = _PATHS[turn % len(_PATHS)]
    name = random.choice(list(MUTATIONS))
    return Attack("json", name, path, mutated(json.dumps(_body_of(path)).encode(), name, random))


def _http(random: Random, turn: int) -> Attack:
    """Return a damaged HTTP request; sometimes two on one connection."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    framing = random.choice(
        (
            b"Content-Length: %d" % len(body),
            b"Content-Length: %d" % random.choice((0, 1, 10**6, 10**30)),
            b"Transfer-Encoding: chunked",
            b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
        )
    )
    payload = body if b"chunked" not in framing else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        b"X-Request-Timeout: 9",
        framing,
    )
    request = b"\r\n".join(lines) + b"\r\n\r\n" + payload
    name = random.choice(list(MUTATIONS))
    sent = request * random.choice((0, 0, 1)) + (mutated(request, name, random) if turn % 4 else request)
    return Attack("http", name if turn % 4 else "framing", raw=sent)


GROUPS: dict[str, Callable[[Random, int], Attack]] = {
    "image": _image,
    "multipart": _multipart,
    "fields": _fields,
    "json": _json,
    "http": _http,
}
"""The generator of each group of cases."""


@dataclass(slots=True)
class Fuzzer:
    """A client that sends attacks to one server and counts the answers.

    Args:
        url: URL of the server.
        statuses: answers by group and HTTP status; ``closed`` if a raw connection ended without one.
        failures: number, group, mutation and reason of each failed case.
        slowest: longest time to an answer, seconds.
    """

    url: str
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0
    _client: httpx.Client = field(default_factory=partial(httpx.Client, timeout=DEADLINE))

    def send(self, index: int, case: Attack) -> None:
        """Send a case and count its answer."""
        start = time.monotonic()
        try:
            status, problem = self._raw(case) if case.raw is not None else self._checked(self._answer(case))
        except (httpx.HTTPError, OSError) as error:
            status, problem = type(error).__name__, f"no answer: {error}"
        self.count(index, case, status, problem, time.monotonic() - start)

    def count(self, index: int, case: Attack, status: str, problem: str, seconds: float) -> None:
        """Count an answer; ``problem``: why the case failed, or empty."""
        self.slowest = max(self.slowest, seconds)
        self.statuses.setdefault(case.group, Counter())[status] += 1
        if problem:
            failure = {"index": index, "group": case.group, "how": case.how, "status": status, "problem": problem[:400]}
            self.failures.append(failure)

    def question(self) -> str:
        """Return the answer to a fixed question about a page."""
        content = base64.b64encode(_seed_file("png")).decode()
        body = _question(f"data:;base64,{content}", max_tokens=8)
        response = self._client.post(f"{self.url}/v1/chat/completions", content=body, headers=_JSON)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def _answer(self, case: Attack) -> httpx.Response:
        headers = {"x-request-timeout": f"{DEADLINE / 2:g}", **dict(case.headers)}
        return self._client.post(f"{self.url}{case.path}", content=case.body, headers=headers)

    def _checked(self, response: httpx.Response) -> tuple[str, str]:
        return str(response.status_code), problem_of(response.status_code, response.content)

    def _raw(self, case: Attack) -> tuple[str, str]:
        """Send bytes and read until the server is silent; then close the sending side, and read until it closes."""
        assert case.raw is not None  # the caller checked
        host, port = self.url.removeprefix("http://").split(":")
        received = b""
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            try:
                connection.sendall(case.raw)
                if select.select([connection], [], [], _SILENCE)[0]:
                    received = connection.recv(65_536)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(65_536):
                    received += piece
            except ConnectionError:
                pass  # closed while bytes were in transit
        first = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
        if first is None:
            return "closed", f"not HTTP: {received[:100]!r}" if received else ""
        status = int(first[1])
        return str(status), f"status {status}" if status >= 500 and status not in _FINE else ""


_JSON = {"content-type": "application/json"}


def problem_of(status: int, content: bytes) -> str:
    """Return what is wrong with an answer, or an empty string."""
    if status >= 500 and status not in _FINE:
        return f"status {status}: {content[:300]!r}"
    if status < 400:
        return ""
    try:
        error = json.loads(content)["error"]
        valid = error.keys() == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    except (ValueError, TypeError, KeyError, AttributeError):
        valid = False
    return "" if valid else f"status {status} without an error in OpenAI's format: {content[:300]!r}"


def fuzz_openapi(fuzzer: Fuzzer, examples: int, first: int) -> int:
    """Send cases that schemathesis derives from the server's OpenAPI document, and return their number.

    Args:
        fuzzer: counts the answers.
        examples: cases per endpoint and mode.
        first: number of the first case.
    """
    schemathesis, hypothesis = (importlib.import_module(name) for name in ("schemathesis", "hypothesis"))
    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    numbers = iter(range(first, sys.maxsize))
    schema = schemathesis.openapi.from_url(f"{fuzzer.url}/openapi.json")

    def send(case: Any, name: str) -> None:
        start = time.monotonic()
        headers = {"x-request-timeout": f"{DEADLINE / 2:g}"}
        try:
            response = case.call(headers=headers, timeout=DEADLINE)
            status, problem = str(response.status_code), problem_of(response.status_code, response.content)
        except OSError as error:  # requests' exceptions are OSErrors
            status, problem = type(error).__name__, f"no answer: {error}"
        fuzzer.count(next(numbers), Attack("openapi", name), status, problem, time.monotonic() - start)

    def check(operation: Any, mode: Any) -> None:
        def one(case: Any) -> None:
            send(case, f"{operation.label}, {mode.value}")

        settings(hypothesis.given(case=operation.as_strategy(generation_mode=mode))(one))()

    for result in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:
            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # without parameters, no request is invalid
                check(result.ok(), mode)
    return next(numbers) - first


def _log(name: str) -> Path:
    """Return the path of a server's log."""
    folder = (RECORD.parent.parent.parent / "runs").resolve()
    folder.mkdir(exist_ok=True)
    return folder / name


def _launch() -> tuple[subprocess.Popen[str], str]:
    """Start a server and return it with its URL.

    Raises:
        RuntimeError: the server exits before it is ready.
    """
    log = _log("serve-fuzz.log")
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "panscan", *_SERVER], stderr=file, text=True)
    for _ in range(1200):
        if match := re.search(r"^Serving \S+ on (\S+)$", log.read_text(), re.MULTILINE):
            return process, match[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the server did not start; see {log}")


def _memory(pid: int) -> dict[str, int]:
    """Return the resident memory of both processes, MB."""
    server = psutil.Process(pid)
    [engine] = engines_of(pid)
    return {"server": server.memory_info().rss >> 20, "engine": engine.memory_info().rss >> 20}


def _run(options: argparse.Namespace, process: subprocess.Popen[str], fuzzer: Fuzzer) -> dict[str, Any]:
    """Send all cases and return the results for the record."""
    engine, expected, wrong = engines_of(process.pid)[0].pid, fuzzer.question(), 0
    cases = range(options.cases) if options.only is None else (options.only,)
    step, memory, start = max(1, len(cases) // _SAMPLES), [_memory(process.pid)], time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        for first in range(0, len(cases), step):
            batch = cases[first : first + step]
            list(pool.map(lambda index: fuzzer.send(index, attack(options.seed, index)), batch))
            wrong += fuzzer.question() != expected
            memory.append(_memory(process.pid))
            print(
                f"{first + len(batch)} cases, {len(fuzzer.failures)} failed, {memory[-1]}", file=sys.stderr, flush=True
            )
    sent = len(cases)
    if options.only is None and options.openapi:
        sent += fuzz_openapi(fuzzer, options.openapi, len(cases))
        wrong += fuzzer.question() != expected
        memory.append(_memory(process.pid))
    warm = memory[min(len(memory) - 1, _SAMPLES // 4)]
    growth = {name: memory[-1][name] - warm[name] for name in warm}
    return {
        "cases": sent,
        "seconds": round(time.monotonic() - start),
        "slowest_s": round(fuzzer.slowest, 2),
        "statuses": {group: dict(sorted(counts.items())) for group, counts in fuzzer.statuses.items()},
        "failures": fuzzer.failures,
        "wrong_answers": wrong,
        "engine_restarted": engines_of(process.pid)[0].pid != engine,
        "memory_mb": memory,
        "growth_mb": growth,
        "most_growth_mb": options.most_growth_mb,
    }


def main() -> int:
    """Run the job and write its record; return 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_server", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="cases besides those of the OpenAPI document")
    parser.add_argument("--openapi", type=int, default=200, help="cases per endpoint and mode; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the cases")
    parser.add_argument("--workers", type=int, default=4, help="requests at once")
    parser.add_argument("--only", type=int, metavar="CASE", help="send one case again; writes no record")
    parser.add_argument("--most-growth-mb", type=int, default=200, help="maximum memory growth after a quarter, MB")
    parser.add_argument("--output", type=Path, default=RECORD, help="path of the record")
    parser.add_argument(
        "--pressure", type=float, default=30.0, help="seconds of each kind of expensive request; 0: none"
    )
    parser.add_argument("--kills", type=int, default=30, help="kills of the engine's process, and of the HTTP process")
    options = parser.parse_args()
    figures, failed = _fuzzed(options) if options.cases or options.only is not None else ({}, False)
    if options.pressure and options.only is None:
        server = PressedServer(_PRESSED, _log("serve-pressure.log"))
        try:
            figures["pressure"] = asyncio.run(press(server, options.pressure, options.kills, options.seed))
        finally:
            if server.process is not None:
                server.process.kill()
        failed |= any(part["problems"] for part in figures["pressure"].values())
    record = {
        "command": ["python", "-m", "benchmarks.fuzz_server", *sys.argv[1:]],
        "server": _SERVER,
        **figures,
        "versions": {name: version(name) for name in _VERSIONS},
        "environment": environment(),
    }
    if options.only is None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(json.dumps(figures, indent=1))
    return int(failed)


def _fuzzed(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Send damaged requests; return the results, and whether something failed."""
    process, url = _launch()
    try:
        figures = _run(options, process, Fuzzer(url))
    finally:
        process.terminate()
        code = process.wait(60)
    grown = any(value > options.most_growth_mb for value in figures["growth_mb"].values())
    failed = figures["failures"] or figures["wrong_answers"] or figures["engine_restarted"] or grown or code
    return {**figures, "exit_code": code}, bool(failed)


if __name__ == "__main__":
    sys.exit(main())
