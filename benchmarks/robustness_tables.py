"""Tables about the robustness job, from its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORD = Path(__file__).parent / "records" / "robustness.json"
_CALLED = {
    "files": "damaged images and PDFs",
    "bombs": "expensive pages",
    "commands": "hostile command lines",
    "kills": "jobs killed and resumed",
    "enospc": "jobs on a full disk, resumed",
    "checkpoints": "hostile checkpoints",
    "endpoints": "hostile endpoints",
}


def _parts() -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))["parts"]
    return {name: parts[name] for name in _CALLED if name in parts}


def robustness_parts() -> str:
    """Return the table of the parts: cases, outcomes, failures, lost results, the slowest case and the largest."""
    headings = ["inputs", "cases", "outcomes", "failed", "results lost", "slowest s", "peak MB"]
    rows = []
    for name, part in _parts().items():
        outcomes: dict[str, int] = {}
        for counts in part["groups"].values():
            for outcome, count in counts.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        text = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
        figures = (part["cases"], part["failed"], part["lost"], part["slowest_s"], part["peak_mb"])
        cases, *others = (f"{figure:,}" for figure in figures)
        rows.append([_CALLED[name], cases, part["skipped"] or text, *others])
    return f"{table(headings, rows)}\n\n{_where()}"


def _where() -> str:
    parts = _parts()
    facts = next(iter(parts.values()))["environment"]
    seeds = sorted({part["seed"] for part in parts.values()})
    return (
        f"{facts['cpu']}, {facts['cpu_count']} cores, Python {facts['python']}, torch {facts['packages']['torch']},"
        f" transformers {facts['packages']['transformers']}, pillow {facts['packages']['pillow']}; seed"
        f" {', '.join(map(str, seeds))}. Record: `benchmarks/records/robustness.json`."
        " Command: `python -m benchmarks.robustness`"
    )


def robustness_cases(name: str, key: str) -> Callable[[], str]:
    """Return the writer of a part's table: outcomes by what was damaged (``groups``) or by the damage (``ways``)."""

    def write() -> str:
        part = _parts()[name]
        outcomes = sorted({outcome for counts in part[key].values() for outcome in counts})
        rows = [[row, *(f"{counts.get(outcome, 0):,}" for outcome in outcomes)] for row, counts in part[key].items()]
        return table([_CALLED[name], *outcomes], rows)

    return write
