"""The load generator against a fake endpoint on the same machine: sustained rate and added latency.

    python -m benchmarks.load_generator

The endpoint streams short answers and reports when it received each request and sent each chunk, on the clock of the
client. Added latency: the TTFT that the client measures, minus the endpoint's own time from receipt to first chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from msgspec import to_builtins
from tests.load.fake_server import fake_server

from panscan.core import from_perf_counter
from panscan.load.chat import ChatRequest, Endpoint, chat_body
from panscan.load.generator import run_level
from panscan.load.options import gamma_arrivals
from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "load-generator.json"
TTFT_MS, ITL_MS, TOKENS = 20.0, 2.0, 3
FAST, PROCESSES = 2000.0, 2
SLOW = 100.0


def build_requests(count: int) -> list[ChatRequest]:
    """Return requests of one short message."""
    body = chat_body("fake", [{"role": "user", "content": "What is the total?"}], TOKENS)
    return [ChatRequest(str(number), body, TOKENS) for number in range(count)]


def measure(url: str, server: psutil.Process, rate: float, seconds: float, processes: int, seed: int) -> dict[str, Any]:
    """Return the figures of one level of Poisson arrivals."""
    count = int(rate * seconds)
    before, load = server.cpu_times(), os.getloadavg()[0]
    result = run_level(
        Endpoint(url, "fake", timeout=60.0),
        build_requests(count),
        gamma_arrivals(rate, count, seed=seed),
        processes=processes,
    )
    after = server.cpu_times()
    answered = [exchange for exchange in result.exchanges if exchange.error is None and exchange.error_kind is None]
    added = []
    for exchange in answered:
        received, sent = (from_perf_counter(float(stamp)) for stamp in exchange.text.split()[:2])
        added.append(1e3 * (exchange.tokens[0] - exchange.accepted - (sent - received)))
    last = max(exchange.accepted for exchange in result.exchanges)
    duration = result.ended - result.started
    return {
        "rate": rate,
        "requests": count,
        "answered": len(answered),
        "errors": Counter(exchange.error for exchange in result.exchanges if exchange.error is not None),
        "sent_per_s": count / (last - result.started),
        "answered_per_s": len(answered) / duration,
        "added_ttft_ms": dict(zip(("median", "p90", "p99"), np.percentile(added, (50, 90, 99)).tolist(), strict=True)),
        "client": to_builtins(result.client),
        "server_cpu_share": (after.user + after.system - before.user - before.system) / duration,
        "load_average_before": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the load generator against a fake endpoint.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds, each with both rates")
    parser.add_argument("--seconds", type=float, default=10.0, help="Duration of each level")
    parser.add_argument("--output", type=Path, default=RECORD, help="Record to write")
    options = parser.parse_args()
    fast, slow = [], []
    with fake_server(ttft_ms=TTFT_MS, itl_ms=ITL_MS) as url:
        (server,) = (
            process for process in psutil.Process().children() if "tests.load.fake_server" in process.cmdline()
        )
        measure(url, server, SLOW, 1.0, 1, 0)  # warm-up
        for seed in range(options.rounds):
            fast.append(measure(url, server, FAST, options.seconds, PROCESSES, seed))
            slow.append(measure(url, server, SLOW, options.seconds, 1, seed))
            print(
                f"{fast[-1]['answered_per_s']:.0f} of {FAST:.0f} req/s, {fast[-1]['answered']} of"
                f" {fast[-1]['requests']} answered; added TTFT at {SLOW:.0f} req/s: median"
                f" {slow[-1]['added_ttft_ms']['median']:.2f} ms; load average {slow[-1]['load_average_before']:.1f}"
            )
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.orig_argv),
        "seconds": options.seconds,
        "endpoint": {"ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "output_tokens": TOKENS},
        "sustained": {
            "target_per_s": FAST,
            "answered_per_s": statistics.median(level["answered_per_s"] for level in fast),
            "failed": sum(level["requests"] - level["answered"] for level in fast),
            "rounds": fast,
        },
        "added_latency": {
            "rate": SLOW,
            "target_ms": 1.0,
            "rounds": slow,
            "median_ms": statistics.median(level["added_ttft_ms"]["median"] for level in slow),
        },
        "environment": environment(),
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
