"""Tables of verifications: faulty servers, and a real vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORDS = Path(__file__).parent / "records"
_MEASURING_TIME = re.compile(r"(\d+%) of the measuring time")
_COLUMNS = ["verdict", "diagnosis", "explains it", "KL, reference (nats)", "KL, diagnosis (nats)", "requests"]


def verify_faults() -> str:
    """Return the table of servers with deliberate faults, and what `panscan verify` found."""
    record = json.loads((RECORDS / "verify-faults.json").read_text())
    rows = [[name, *_figures(verification)] for name, verification in record["faults"].items()]
    return f"{table(['fault', *_COLUMNS], rows)}\n\n{_where(record, 'verify-faults')}"


def verify_vllm() -> str:
    """Return the table of a real vLLM for CPUs, and what `panscan verify` found."""
    record = json.loads((RECORDS / "verify-vllm.json").read_text())
    rows = [[name, *_figures(verification)] for name, verification in record["verifications"].items()]
    return f"{table(['verified', *_COLUMNS], rows)}\n\n{_where(record, 'verify-vllm')}"


def load_verify() -> str:
    """Return the table of servers with and without swapped images, and how often they were called different."""
    record = json.loads((RECORDS / "load-verify.json").read_text())
    runs = [run for server in record["servers"].values() for run in server["runs"]]
    rows = []
    for name, swapped in (("two images swapped", True), ("no image swapped", False)):
        different, count = found_in(runs, swapped=swapped)
        rows.append([name, str(count), str(different), str(count - different)])
    return f"{table(['server, in a run', 'runs', 'different', 'close'], rows)}\n\n{_where(record, 'load-verify')}"


def rare_faults() -> str:
    """Return the table of simulated runs with a fault in 1% of 300 requests, and how often the replay found it."""
    record = json.loads((RECORDS / "rare-faults.json").read_text())
    rows = [
        [fault, dtype, str(counts["runs"]), str(counts["with the fault"]), f"{counts['found']} ({_share(counts)})"]
        for dtype, row in record["precisions"].items()
        for fault, counts in row["faults"].items()
    ]
    header = ["fault, in 1% of the requests", "precision", "runs", "runs that have it", "found in (of all runs)"]
    shares = {dtype: _MEASURING_TIME.findall(row["printed"])[0] for dtype, row in record["precisions"].items()}
    costs = " and ".join(f"{share} ({dtype})" for dtype, share in shares.items())
    cost = (
        f"Replaying all {record['requests']} answers took {costs} of the measuring time, more than the default of"
        " `--verify-budget` allows."
    )
    return f"{table(header, rows)}\n\n{cost} {_where(record, 'rare-faults')}"


def _share(counts: Mapping[str, int]) -> str:
    return f"{counts['found'] / counts['runs']:.1%}"


def found_in(runs: list[dict[str, Any]], *, swapped: bool) -> tuple[int, int]:
    """Return how many of the runs with swaps, or of those without, were different, and their number."""
    chosen = [run for run in runs if (run["swaps"] > 0) == swapped]
    return sum(run["verdict"] == "different" for run in chosen), len(chosen)


def _figures(verification: Mapping[str, Any]) -> list[str]:
    evidence = {row["hypothesis"]: row["kl"] for row in verification["evidence"]}
    diagnosis = verification["diagnosis"] or {"hypothesis": "", "strength": ""}
    return [
        verification["verdict"],
        diagnosis["hypothesis"].replace("+", " + "),
        diagnosis["strength"],
        _nats(evidence["reference"]),
        _nats(evidence.get(diagnosis["hypothesis"])),
        str(verification["requests"]),
    ]


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _where(record: Mapping[str, Any], name: str) -> str:
    facts = record["environment"]
    packages = facts["packages"]
    return (
        f"On {facts['cpu']}, torch {packages['torch']}, transformers {packages['transformers']}."
        f" Record: `benchmarks/records/{name}.json`. Command: `{record['command']}`"
    )
