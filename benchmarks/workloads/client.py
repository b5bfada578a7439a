"""A server process, and the engine's requests as chat completions, with images as base64."""

from __future__ import annotations

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
from panscan.load.chat import ChatRequest, Endpoint, chat_body, data_url
from panscan.load.generator import LevelResult, run_level
from panscan.settings import Settings, axes

_START_SECONDS = 300.0
_ANSWER_SECONDS = 600.0
MODEL = "measured"  # the name of any model in the API


def as_files(requests: Sequence[Request]) -> list[Request]:
    """Return requests whose pages are PNG files in memory, as a client would send them."""
    return [replace(request, images=[_png(image) for image in request.images]) for request in requests]


def chat_requests(requests: Sequence[Request]) -> list[ChatRequest]:
    """Return chat completions for requests from :func:`as_files`; equal files are encoded once."""
    encoded: dict[bytes, bytes] = {}
    chats = []
    for request in requests:
        parts: list[dict[str, Any]] = []
        for file in request.images:
            url = encoded.setdefault(file, data_url("image/png", file))
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": request.prompt})
        tokens = request.sampling.max_new_tokens
        messages = [{"role": "user", "content": parts}]
        body = chat_body(MODEL, messages, tokens, temperature=None, ignore_eos=request.sampling.ignore_eos)
        chats.append(ChatRequest(request.id, body, tokens))
    return chats


def send_all(url: str, requests: Sequence[Request], *, max_concurrency: int) -> LevelResult:
    """Stream chat completions, at most ``max_concurrency`` at once, and return their outcomes.

    Raises:
        InputError: a request was not answered.
    """
    endpoint = Endpoint(url, MODEL, timeout=_ANSWER_SECONDS)
    result = run_level(endpoint, chat_requests(requests), None, max_concurrency=max_concurrency)
    for exchange in result.exchanges:
        if exchange.error is not None:
            raise InputError(f"request {exchange.id}: {exchange.error}")
    return result


def requests_per_s(result: LevelResult) -> float:
    """Return the throughput of a level."""
    return len(result.exchanges) / (result.ended - result.started)


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
        percentiles = {f"p{rank}_ms": float(np.percentile(milliseconds, rank)) for rank in (50, 99)}
        return {"checks": len(self._seconds), **percentiles, "max_ms": float(milliseconds.max())}

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
    words = [sys.executable, "-m", "panscan", "serve", "--port", "0", "--served-model-name", MODEL]
    words += [*_flags(settings), *options]
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


def wait_for_replicas(url: str, count: int) -> None:
    """Wait until this many replicas answer; a server is ready as soon as the first one does.

    Raises:
        InputError: the replicas do not start in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(base_url=url, timeout=30.0) as client:
        while time.monotonic() < deadline:
            engines = re.findall(r'^vllm:num_requests_running\{engine="([^"]+)"', client.get("/metrics").text, re.M)
            if len(set(engines)) >= count:
                return
            time.sleep(0.5)
    raise InputError(f"{count} replicas did not start")


def _drain(lines: Any) -> None:
    for line in lines:
        say(f"  {line.rstrip()}")


def _flags(settings: Settings) -> list[str]:
    """Return the command-line options of these settings."""
    return [
        f"--{axes()[name].flag}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in settings.changed().items()
    ]


def _png(image: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
