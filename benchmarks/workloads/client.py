"""A server process, and an HTTP client that sends the engine's requests, with images as base64."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import httpx
import numpy as np

from benchmarks.workloads.common import say
from panscan.core import InputError, Request
from panscan.settings import Settings, axes

__all__ = ["Health", "as_files", "bodies", "post_all", "running_server", "stream_alone", "wait_for_replicas"]

_START_SECONDS = 300.0
_ANSWER_SECONDS = 600.0
_JSON = {"content-type": "application/json"}


def as_files(requests: Sequence[Request]) -> list[Request]:
    """Return requests whose pages are PNG files in memory, as a client would send them."""
    return [replace(request, images=[_png(image) for image in request.images]) for request in requests]


def bodies(requests: Sequence[Request], **fields: Any) -> list[bytes]:
    """Return the bodies of chat completions for requests from :func:`as_files`; equal files are encoded once."""
    encoded: dict[bytes, str] = {}
    found = []
    for request in requests:
        parts: list[dict[str, Any]] = []
        for file in request.images:
            if file not in encoded:
                encoded[file] = "data:image/png;base64," + base64.b64encode(file).decode()
            parts.append({"type": "image_url", "image_url": {"url": encoded[file]}})
        parts.append({"type": "text", "text": request.prompt})
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": request.sampling.max_new_tokens}
        found.append(json.dumps({**body, "ignore_eos": request.sampling.ignore_eos, **fields}).encode())
    return found


def post_all(url: str, contents: Sequence[bytes], *, max_concurrency: int) -> dict[str, Any]:
    """Send chat completions, at most ``max_concurrency`` at once, and return throughput and latencies.

    Raises:
        InputError: a request was not answered.
    """
    return asyncio.run(_post_all(url, contents, max_concurrency))


async def _post_all(url: str, contents: Sequence[bytes], max_concurrency: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    places = asyncio.Semaphore(max_concurrency)
    latencies: list[float] = []
    answers: list[dict[str, Any]] = []

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_ANSWER_SECONDS) as client:

        async def send(body: bytes) -> None:
            async with places:
                start = time.perf_counter()
                reply = await client.post("/v1/chat/completions", content=body, headers=_JSON)
                latencies.append(time.perf_counter() - start)
            if reply.status_code != 200:
                raise InputError(f"the server answered {reply.status_code}: {reply.text[:300]}")
            answers.append(reply.json())

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in contents:
                group.create_task(send(body))
        seconds = time.perf_counter() - start
    usage = [answer["usage"] for answer in answers]
    prompt_tokens = sum(each["prompt_tokens"] for each in usage)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    return {
        "requests": len(answers), "seconds": seconds, "requests_per_s": len(answers) / seconds,
        "output_tokens": sum(each["completion_tokens"] for each in usage),
        "cached_share": cached / prompt_tokens,
        "e2e_s": {"p50": float(np.percentile(latencies, 50)), "p99": float(np.percentile(latencies, 99))},
        "texts": [answer["choices"][0]["message"]["content"] for answer in answers],
    }  # fmt: skip


def stream_alone(url: str, contents: Sequence[bytes]) -> list[float]:
    """Stream completions one after another and return the seconds from sending each to its first token."""
    found = []
    with httpx.Client(base_url=url, timeout=_ANSWER_SECONDS) as client:
        for body in contents:
            start = time.perf_counter()
            first = None
            with client.stream("POST", "/v1/chat/completions", content=body, headers=_JSON) as reply:
                for line in reply.iter_lines():
                    if first is None and _has_text(line):
                        first = time.perf_counter() - start
            if first is None:
                raise InputError("a stream had no token")
            found.append(first)
    return found


class Health:
    """A thread that repeatedly times ``/health`` while the server is under load."""

    def __init__(self, url: str, interval: float = 0.01) -> None:
        self._url, self._interval = url, interval
        self._stop = threading.Event()
        self._seconds: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, float]:
        """Return the number of checks, and percentiles in milliseconds."""
        milliseconds = 1e3 * np.array(self._seconds)
        found = {f"p{rank}_ms": float(np.percentile(milliseconds, rank)) for rank in (50, 99)}
        return {"checks": len(self._seconds), **found, "max_ms": float(milliseconds.max())}

    def _watch(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30.0) as client:
            while not self._stop.wait(self._interval):
                start = time.perf_counter()
                client.get("/health").raise_for_status()
                self._seconds.append(time.perf_counter() - start)


@contextmanager
def running_server(settings: Settings, *options: str) -> Iterator[str]:
    """Run ``panscan serve`` with these settings and yield its URL.

    Raises:
        InputError: the server does not start.
    """
    words = [sys.executable, "-m", "panscan", "serve", "--port", "0", *_flags(settings), *options]
    say(" ".join(words[1:]))
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None  # it is a pipe
    lines = process.stderr
    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.start()
    try:
        url = None
        for line in lines:
            say(f"  {line.rstrip()}")
            if (match := re.search(r"Serving .* on (http://\S+)", line)) is not None:
                url = match[1]
                break
        timer.cancel()
        if url is None:
            raise InputError("panscan serve did not start")
        threading.Thread(target=_drain, args=(lines,), daemon=True).start()
        yield url
    finally:
        timer.cancel()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        process.wait()


def _has_text(line: str) -> bool:
    """Return whether a line of a stream is a chunk with text."""
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: ")).get("choices")
    return bool(choices and choices[0]["delta"].get("content"))


def wait_for_replicas(url: str, count: int) -> None:
    """Wait until this many replicas answer; a server is ready as soon as the first one does.

    Raises:
        InputError: the replicas do not start in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(base_url=url, timeout=30.0) as client:
        while time.monotonic() < deadline:
            found = re.findall(r'^vllm:num_requests_running\{engine="([^"]+)"', client.get("/metrics").text, re.M)
            if len(set(found)) >= count:
                return
            time.sleep(0.5)
    raise InputError(f"{count} replicas did not start")


def _drain(lines: Any) -> None:
    for line in lines:
        say(f"  {line.rstrip()}")


def _flags(settings: Settings) -> list[str]:
    """Return the command-line options of these settings."""
    return [f"--{axes()[name].flag}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in settings.changed().items()]  # fmt: skip


def _png(image: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
