"""Tables of verifications: faulty servers, and a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORDS = Path(__file__).parent / "records"
_COLUMNS = ["verdict", "diagnosis", "explains it", "KL, reference (nats)", "KL, diagnosis (nats)", "requests"]


def verify_faults() -> str:
    """Servers with deliberate faults, and what `panscan verify` found."""
    record = json.loads((RECORDS / "verify-faults.json").read_text())
    rows = [[name, *_figures(found)] for name, found in record["faults"].items()]
    return f"{table(['fault', *_COLUMNS], rows)}\n\n{_where(record, 'verify-faults')}"


def verify_vllm() -> str:
    """A real vLLM for CPUs, and what `panscan verify` found."""
    record = json.loads((RECORDS / "verify-vllm.json").read_text())
    rows = [[name, *_figures(found)] for name, found in record["verifications"].items()]
    return f"{table(['verified', *_COLUMNS], rows)}\n\n{_where(record, 'verify-vllm')}"


def _figures(found: Mapping[str, Any]) -> list[str]:
    evidence = {row["hypothesis"]: row["kl"] for row in found["evidence"]}
    named = found["diagnosis"] or {"hypothesis": "", "strength": ""}
    return [
        found["verdict"],
        named["hypothesis"].replace("+", " + "),
        named["strength"],
        _nats(evidence["reference"]),
        _nats(evidence.get(named["hypothesis"])),
        str(found["requests"]),
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
