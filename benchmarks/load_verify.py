"""How often `panscan load --verify` finds a server that swaps two images while more than four requests are in flight.

    python -m benchmarks.load_verify [--runs 20] [--output RECORD.json]

The tiny model answers 16 requests at a time or fewer; every answer is computed again. As a control, a server without a
fault is measured as often, which must never be called different.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.verify_faults import served
from panscan.core import now
from panscan.load.chat import Endpoint
from panscan.load.content import Content, mix_of_scenario
from panscan.load.generator import run_level
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.scenario import load_scenario
from panscan.model.load import load_for
from panscan.records.environment import environment
from panscan.settings import Settings
from panscan.verify.traffic import TrafficSample, verify_traffic

_TOKENS = 24
_SETTINGS = Settings(model="tiny", dtype="fp32", device="cpu", do_pan_and_scan=False)


def measure(fault: str, runs: int) -> dict[str, Any]:
    """Return the verdicts on a server, and the number of wrong answers of each run."""
    loaded, rows = load_for(_SETTINGS), []
    with served(fault, "--model", "tiny", "--dtype", "fp32", "--no-pan-and-scan") as url:
        for run in range(runs):
            started = now()
            options = LoadOptions(num_prompts=16, max_tokens=_TOKENS, seed=run, max_concurrencies=(8,))
            content = Content(mix_of_scenario(load_scenario("mixed-documents"), run), options, "tiny", salt=1000 * run)
            requests, sample = content.requests(16), TrafficSample(16, run)
            chats = [request.chat for request in requests]
            result = run_level(Endpoint(url, "tiny"), chats, None, max_concurrency=8)
            sample.add(LoadLevel(max_concurrency=8), requests, result.exchanges)
            found = verify_traffic(url, ("tiny", "panscan"), _SETTINGS, sample, loaded=loaded)
            rows.append({"verdict": found.word, "wrong": len(found.wrong), "seconds": now() - started})
            sys.stderr.write(f"{fault} {run + 1}: {found.message}\n")
    return {"different": sum(row["verdict"] == "different" for row in rows), "runs": rows}


def main() -> int:
    """Return 0 if every run found the fault, and no control did."""
    parser = argparse.ArgumentParser(description="Runs of load --verify that find a fault of concurrency.")
    parser.add_argument("--runs", type=int, default=20, help="Runs against each server.")
    parser.add_argument("--output", type=Path, help="Also write a record, as JSON.")
    chosen = parser.parse_args()
    found = {fault: measure(fault, chosen.runs) for fault in ("swapped", "none")}
    for fault, row in found.items():
        sys.stdout.write(f"{fault}: different in {row['different']} of {chosen.runs} runs\n")
    if chosen.output is not None:
        record = {"environment": environment(), "command": "python -m benchmarks.load_verify", "servers": found}
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")
    return int((found["swapped"]["different"], found["none"]["different"]) != (chosen.runs, 0))


if __name__ == "__main__":
    sys.exit(main())
