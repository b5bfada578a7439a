"""How often `panscan load --verify` finds a server that swaps two images while more than four requests are in flight.

    python -m benchmarks.load_verify [--runs 20] [--output RECORD.json]

The tiny model answers 16 requests about different pages, 8 at a time; every answer is computed again. The server swaps
images only where two of them are in one pass, and counts the swaps: runs without a swap are no runs of the fault, and
are counted apart. As a control, a server without a fault is measured as often, which must never be called different.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import noise

from benchmarks.verify_faults import served
from benchmarks.verify_tables import found_in
from panscan.core import now
from panscan.load.chat import Endpoint
from panscan.load.content import Content, RequestMix
from panscan.load.generator import run_level
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.variants import VariantImage
from panscan.model.load import load_for
from panscan.records.environment import environment
from panscan.settings import Settings
from panscan.verify.traffic import TrafficSample, verify_traffic
from panscan.workload.requests import DocumentFile, Item

_REQUESTS, _TOKENS = 16, 24
_SETTINGS = Settings(model="tiny", dtype="fp32", device="cpu", do_pan_and_scan=False)


def different_pages(run: int) -> RequestMix:
    """Return questions about noise: requests about one document could be mixed up without a change."""
    images = {f"{run}-{number}": noise(128, 128, _REQUESTS * run + number) for number in range(_REQUESTS)}
    items = [Item(name, (DocumentFile(name, 128, 128, name),), "What is it?") for name in images]
    return RequestMix(items, open_image=lambda document: VariantImage(images[document.name]))


def measure(fault: str, runs: int) -> dict[str, Any]:
    """Return the verdicts on a server, and the numbers of swaps and of wrong answers of each run.

    A server with a fault is measured until so many runs had it, at most three times as often.
    """
    loaded, rows = load_for(_SETTINGS), list[dict[str, Any]]()
    with tempfile.NamedTemporaryFile() as log:
        os.environ["FAULT_LOG"] = log.name
        with served(fault, "--model", "tiny", "--dtype", "fp32", "--no-pan-and-scan") as url:
            while len(rows) < 3 * runs and sum(row["swaps"] > 0 or fault == "none" for row in rows) < runs:
                started, run, before = now(), len(rows), Path(log.name).stat().st_size
                options = LoadOptions(num_prompts=_REQUESTS, max_tokens=_TOKENS, seed=run, max_concurrencies=(8,))
                requests = Content(different_pages(run), options, "tiny").requests(_REQUESTS)
                chats, sample = [request.chat for request in requests], TrafficSample(_REQUESTS, run)
                result = run_level(Endpoint(url, "tiny"), chats, None, max_concurrency=8)
                swaps = Path(log.name).stat().st_size - before
                sample.add(LoadLevel(max_concurrency=8), requests, result.exchanges)
                verdict = verify_traffic(url, ("tiny", "panscan"), _SETTINGS, sample, loaded=loaded)
                row = {"verdict": verdict.word, "swaps": swaps, "wrong": len(verdict.wrong), "seconds": now() - started}
                rows.append({**row, "power": verdict.not_visible[0]})
                sys.stderr.write(f"{fault} {run + 1}, {swaps} swaps: {verdict.message}\n")
    return {"runs": rows}


def main() -> int:
    """Return 0 if every run with the fault was found, and no other was called different."""
    parser = argparse.ArgumentParser(description="Runs of load --verify that find a fault of concurrency.")
    parser.add_argument("--runs", type=int, default=20, help="Runs against each server.")
    parser.add_argument("--output", type=Path, help="Also write a record, as JSON.")
    options = parser.parse_args()
    servers = {fault: measure(fault, options.runs) for fault in ("swapped", "none")}
    if options.output is not None:
        record = {"environment": environment(), "command": "python -m benchmarks.load_verify", "servers": servers}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    runs = servers["swapped"]["runs"] + servers["none"]["runs"]
    different, swapped = found_in(runs, swapped=True)
    wrong, right = found_in(runs, swapped=False)
    sys.stdout.write(f"different: {different} of {swapped} runs with swapped images, {wrong} of {right} runs without\n")
    return int(different < swapped or swapped < options.runs or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
