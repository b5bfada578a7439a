"""Table of the GPU's idle time per decode step, by model and mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORD = Path(__file__).parent / "records" / "idle-gap-h100.json"
_COLUMNS = [
    "model",
    "mode",
    "ms per token",
    "tokens/s",
    "profiled: ms per step",
    "GPU busy",
    "GPU idle",
    "launches per step",
    "idle in the forward pass",
    "in `prepare_inputs_for_generation`",
    "elsewhere",
]
_TEXT = (0, 1)
_FILLERS = ("panscan.decode", "prepare_inputs_for_generation")  # the first is the range around the forward pass
_SLOWED = 1.5  # times; longer steps under the profiler are marked


def idle_gap() -> str:
    """Return one row per mode: speed without the profiler; step, busy and idle time with it."""
    record = json.loads(RECORD.read_text("utf-8"))
    profiles = [profile for modes in record["models"].values() for profile in modes.values() if "error" not in profile]
    rows = list(map(_row, profiles))
    compiled = any(profile["facts"]["mode"] in ("compiled", "cuda-graphs") for profile in profiles)
    facts = record["environment"]
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or facts["cpu"]
    packages = facts["packages"]
    notes = [
        f"Random weights, one request, {record['output_tokens']} output tokens; {gpus}, torch {packages['torch']},"
        f" transformers {packages['transformers']}. Gemma 3n is the text decoder of E2B."
        " In milliseconds; -: too little to be among the functions that the record lists.",
        f"\\*: the profiler makes the step more than {_SLOWED} times as long."
        if any("*" in row[4] for row in rows)
        else "",
        "" if compiled else "The record has no compiled modes.",
        f"Record: `benchmarks/records/{RECORD.name}`. Command: `{' '.join(record['command'])}`",
    ]
    return f"{table(_COLUMNS, rows, _TEXT)}\n\n{' '.join(filter(None, notes))}"


def _row(profile: Mapping[str, Any]) -> list[str]:
    facts, step = profile["facts"], profile["summary"]["steps"]
    plain = facts["without_profiler"]
    launches = step["kernel_launches"] + step["graph_launches"]
    idle_ms = {filler["name"]: filler["total_ms"] for filler in step["fillers"]}
    fillers = [idle_ms.get(name) for name in _FILLERS]  # None: not among the longest, which the record has
    mark = " \\*" if step["step_ms"] > _SLOWED * plain["tpot_ms"] else ""
    return [
        facts["model"],
        facts["label"],
        f"{plain['tpot_ms']:.2f}",
        f"{1e3 / plain['tpot_ms']:.0f}",
        f"{step['step_ms']:.2f}{mark}",
        f"{step['busy_ms']:.2f}",
        f"{step['idle_ms']:.2f}",
        f"{launches:,.0f}",
        *("-" if filler is None else f"{filler:.2f}" for filler in fillers),
        f"{step['idle_ms'] - sum(filter(None, fillers)):.2f}",
    ]
