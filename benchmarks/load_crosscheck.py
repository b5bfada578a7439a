"""``panscan load`` compared with guidellm: both measure the same load on the same server, in turn.

    python -m venv guidellm && guidellm/bin/pip install guidellm==0.8.1
    python -m benchmarks.load_crosscheck --guidellm guidellm/bin/guidellm
    python -m benchmarks.load_crosscheck --guidellm guidellm/bin/guidellm --only fake-rate

The second command replaces the part of one load in the record.

Two servers: a fake one with set TTFT and ITL, and ``panscan serve`` with the mini model on the CPU. Two loads: a
constant rate and a constant concurrency. Both clients send the same documents with the same questions, one document
per request, and ask for the same number of output tokens. Each round draws other documents, so that no cache helps the
client that comes second, and starts with the other client. The record holds the figures that each tool reports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.load.fake_server import fake_server

from benchmarks.workloads.client import running_server
from benchmarks.workloads.common import say
from panscan.images.encode import data_url
from panscan.records.environment import environment
from panscan.settings import settings_from
from panscan.workload.request_sets import request_row
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "load-crosscheck.json"
ROUNDS = 3
TIMEOUT = 900.0  # seconds of one run of a client
TOLERANCE = 0.05
TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What both clients send.

    Args:
        server: "fake" or "serve".
        requests: number of requests, each with a different document.
        rate: requests per second at equal intervals; None: closed loop.
        concurrency: requests in flight in a closed loop.
        ttft_ms: of the fake server.
        itl_ms: of the fake server.
    """

    server: str
    requests: int
    rate: float | None = None
    concurrency: int | None = None
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


LOADS = {
    "fake-rate": Load("fake", 200, rate=10.0, ttft_ms=50.0, itl_ms=5.0),
    "fake-concurrency": Load("fake", 120, concurrency=8, ttft_ms=500.0, itl_ms=40.0),
    "serve-rate": Load("serve", 60, rate=2.0),
    "serve-concurrency": Load("serve", 60, concurrency=4),
}


@contextmanager
def server(load: Load) -> Iterator[str]:
    """Run the server of a load and yield its URL."""
    if load.server == "fake":
        with fake_server(ttft_ms=load.ttft_ms, itl_ms=load.itl_ms, tokens=TOKENS) as url:
            yield url
    else:
        settings = settings_from({"model": "mini", "device": "cpu", "max_new_tokens": TOKENS})
        with running_server(settings) as url:
            yield url


def write_content(folder: Path, count: int, seed: int) -> tuple[Path, Path]:
    """Write documents with one question each, as a panscan dataset and as a guidellm request set."""
    questions = write_samples(folder, count=count, seed=seed)
    rows = [json.loads(line) for line in questions.read_text("utf-8").splitlines()]
    first = [next(group) for _, group in groupby(rows, key=lambda row: row["image"])]
    dataset, requests = folder / "dataset.jsonl", folder / "guidellm.jsonl"
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in first), "utf-8")
    with requests.open("w", encoding="utf-8") as file:
        for row in first:
            media_type = "image/jpeg" if row["image"].endswith(".jpg") else "image/png"
            url = data_url(media_type, (folder / row["image"]).read_bytes())
            file.write(json.dumps(request_row("guidellm", url, row["question"], TOKENS)) + "\n")
    return dataset, requests


def panscan_command(url: str, load: Load, dataset: Path, folder: Path) -> list[str]:
    """Return the arguments of panscan that measure a load, with run directories in ``folder``."""
    shape = ["--request-rate", f"{load.rate:g}", "--arrival", "constant"] if load.rate else []
    shape += ["--max-concurrency", str(load.concurrency)] if load.concurrency else []
    return [
        "load",
        url,
        "--dataset",
        str(dataset),
        *shape,
        "--num-prompts",
        str(load.requests),
        "--max-tokens",
        str(TOKENS),
        "--ignore-eos",
        "--save-result",
        "--output-dir",
        str(folder),
    ]


def guidellm_command(url: str, load: Load, requests: Path, output: Path) -> list[str]:
    """Return the arguments of guidellm that measure a load and write the file ``output``."""
    profile = f"kind=constant,rate={load.rate:g}" if load.rate else f"kind=concurrent,streams={load.concurrency}"
    return [
        "run",
        "--backend",
        f"kind=openai_http,target={url}",
        "--profile",
        profile,
        "--data",
        f"kind=json_file,path={requests}",
        "--constraint",
        f"kind=max_requests,count={load.requests}",
        "--output",
        f"kind=json,path={output}",
        "--disable-console",
    ]


def run_panscan(url: str, load: Load, dataset: Path, folder: Path) -> dict[str, float]:
    """Measure with ``panscan load`` and return its figures."""
    _run([sys.executable, "-m", "panscan", *panscan_command(url, load, dataset, folder)])
    [path] = folder.glob("*/vllm-*.json")
    result = json.loads(path.read_text("utf-8"))
    return {
        "completed": result["completed"],
        "requests_per_s": result["request_throughput"],
        "ttft_ms": result["median_ttft_ms"],
        "tpot_ms": result["median_tpot_ms"],
        "e2e_ms": result["median_e2el_ms"],
    }


def run_guidellm(program: str, url: str, load: Load, requests: Path, folder: Path) -> dict[str, float]:
    """Measure with guidellm and return its figures. Its ITL is what panscan and vLLM call TPOT."""
    output = folder / "guidellm.json"
    _run([program, *guidellm_command(url, load, requests, output)], HF_HUB_OFFLINE="1")
    [benchmark] = json.loads(output.read_text("utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]

    def figure(name: str, statistic: str) -> float:
        return float(metrics[name]["successful"][statistic])

    return {
        "completed": metrics["request_totals"]["successful"],
        "requests_per_s": figure("requests_per_second", "mean"),
        "ttft_ms": figure("time_to_first_token_ms", "median"),
        "tpot_ms": figure("inter_token_latency_ms", "median"),
        "e2e_ms": 1e3 * figure("request_latency", "median"),
    }


def _run(command: Sequence[str], **variables: str) -> None:
    environment = {**os.environ, **variables}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}")


def measure(name: str, load: Load, program: str, rounds: int) -> dict[str, Any]:
    """Run both clients in each round, and return their figures and the ratios of the medians."""
    results: dict[str, list[dict[str, float]]] = {"panscan": [], "guidellm": []}
    with server(load) as url, tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds + 1):
            folder = Path(temporary) / str(number)
            dataset, requests = write_content(folder / "documents", load.requests, 1000 + number)
            if number == 0:  # warms the server up
                run_panscan(url, load, dataset, folder / "runs")
                continue
            for client in sorted(results, reverse=number % 2 == 0):
                if client == "panscan":
                    figures = run_panscan(url, load, dataset, folder / "runs")
                else:
                    figures = run_guidellm(program, url, load, requests, folder)
                say(f"{name}, round {number}, {client}: {figures}")
                results[client].append(figures)
    medians = {
        client: {key: statistics.median(figures[key] for figures in all_rounds) for key in all_rounds[0]}
        for client, all_rounds in results.items()
    }
    ratios = {key: medians["panscan"][key] / medians["guidellm"][key] for key in medians["panscan"]}
    agrees = all(abs(ratios[key] - 1) <= TOLERANCE for key in ("requests_per_s", "ttft_ms"))
    commands = {
        "panscan": shlex.join(["panscan", *panscan_command("URL", load, Path("dataset.jsonl"), Path("runs"))]),
        "guidellm": shlex.join(["guidellm", *guidellm_command("URL", load, Path("requests.jsonl"), Path("out.json"))]),
    }
    return {
        "load": asdict(load),
        "commands": commands,
        "rounds": results,
        "medians": medians,
        "ratios": ratios,
        "agrees": agrees,
    }


def main() -> None:
    """Measure all loads and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True, metavar="PROGRAM", help="guidellm's command")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only", choices=LOADS, action="append", help="run this load only; the record keeps the others"
    )
    options = parser.parse_args()
    version = subprocess.run([options.guidellm, "--version"], capture_output=True, text=True, check=True).stdout
    kept = json.loads(RECORD.read_text("utf-8"))["loads"] if options.only and RECORD.exists() else {}
    for name in options.only or LOADS:
        kept[name] = measure(name, LOADS[name], options.guidellm, options.rounds)
        say(f"{name}: ratios {kept[name]['ratios']}, agrees: {kept[name]['agrees']}")
        record = {
            "guidellm": version.split()[-1],
            "python": platform.python_version(),
            "tokens": TOKENS,
            "tolerance": TOLERANCE,
            "loads": {load_name: kept[load_name] for load_name in LOADS if load_name in kept},
            "environment": environment(),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
