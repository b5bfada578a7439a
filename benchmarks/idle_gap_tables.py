"""Table of the GPU's idle time per decode step, by model and mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORD = Path(__file__).parent / "records" / "idle-gap-h200.json"
_COLUMNS = [
    "model",
    "mode",
    "ms per token",
    "tokens/s",
    "profiled: ms per step",
    "GPU busy",
    "GPU idle",
    "launches per step",
    "idle while the host launches the forward pass",
    "idle between forward passes",
]
_TEXT = (0, 1)
_FORWARD = "panscan.decode"  # the range around the forward pass


def idle_gap() -> str:
    """Return one row per mode: speed without the profiler; step, busy and idle time with it."""
    record = json.loads(RECORD.read_text("utf-8"))
    rows = [_row(found) for modes in record["models"].values() for found in modes.values() if "error" not in found]
    facts = record["environment"]
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or facts["cpu"]
    packages = facts["packages"]
    where = (
        f"Random weights, one request, {record['output_tokens']} output tokens; {gpus}, torch {packages['torch']},"
        f" transformers {packages['transformers']}. Gemma 3n is the text decoder of E2B. The step is longer under the"
        f" profiler. Record: `benchmarks/records/{RECORD.name}`. Command: `{' '.join(record['command'])}`"
    )
    return f"{table(_COLUMNS, rows, _TEXT)}\n\n{where}"


def _row(found: Mapping[str, Any]) -> list[str]:
    facts, step = found["facts"], found["summary"]["steps"]
    plain = facts["without_profiler"]
    launches = step["kernel_launches"] + step["graph_launches"]
    forward = next(each["total_ms"] for each in step["fillers"] if each["name"] == _FORWARD)
    return [
        facts["model"],
        facts["label"],
        f"{plain['tpot_ms']:.2f}",
        f"{1e3 / plain['tpot_ms']:.0f}",
        f"{step['step_ms']:.2f}",
        f"{step['busy_ms']:.2f}",
        f"{step['idle_ms']:.2f}",
        f"{launches:,.0f}",
        f"{forward:.2f}",
        f"{step['idle_ms'] - forward:.2f}",
    ]
