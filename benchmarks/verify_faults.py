"""`panscan verify` against `panscan serve` with deliberate faults: python -m benchmarks.verify_faults [FAULT]...

Serves the mini model on the CPU with each fault of `tests/verify/faulty_server.py`, and records the verdict and the
diagnosis. Without arguments all faults are served. Faults that are named replace their part of the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.verify.faulty_server import FAULTS, ROOT, command

from panscan.model.runtime import quiet_libraries
from panscan.records.environment import environment
from panscan.settings import Settings
from panscan.verify.endpoint import VerifyOptions
from panscan.verify.run import as_json, verify_endpoint

RECORD = ROOT / "benchmarks" / "records" / "verify-faults.json"
REQUESTS = 11
PLAIN = ("crops",)  # faults that show only if a request turns pan and scan off


@contextmanager
def served(fault: str, *options: str) -> Iterator[str]:
    """Serve a model with a fault and yield the endpoint's URL."""
    process = subprocess.Popen(command(fault, *options), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None  # a pipe
    try:
        url = next((match[1] for line in process.stderr if (match := re.match(r"Serving \S+ on (\S+)", line))), None)
        if url is None:
            sys.exit(f"{fault}: the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait(120)


def verified(fault: str) -> dict[str, Any]:
    """Return the verdict on a server with a fault."""
    settings = Settings(model="mini", device="cpu", dtype="fp32", do_pan_and_scan=fault not in PLAIN)
    began = time.perf_counter()
    with served(fault, "--dtype", "fp32") as url:
        verification = as_json(verify_endpoint(VerifyOptions(url, settings, max_requests=REQUESTS)))
    kept = ("verdict", "message", "diagnosis", "noise", "evidence", "hypotheses_compared", "not_visible", "requests")
    seconds = round(time.perf_counter() - began)
    return {"expected": FAULTS[fault][0], **{name: verification[name] for name in kept}, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    if unknown := set(args.faults) - FAULTS.keys():
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet_libraries()
    faults = json.loads(args.output.read_text())["faults"] if args.output.exists() else {}
    for fault in args.faults:
        faults[fault] = verified(fault)
        print(f"{fault}: {faults[fault]['message'][:150]}", flush=True)
        record = {
            "about": "panscan verify against panscan serve with deliberate faults, mini model, float32 on a CPU",
            "command": "python -m benchmarks.verify_faults",
            "environment": environment(),
            "faults": {name: faults[name] for name in FAULTS if name in faults},
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
