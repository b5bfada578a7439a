"""Forced tokens: JSON answers of the mini model on a CPU, with and without them, in turns in one process.

    python -m benchmarks.workloads.forced

Two engines share the weights. Each answers the same questions without images, one at a time and 32 at once, so that the
time of decoding is compared. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from panscan import Engine, Request, Result, Sampling
from panscan.engine.options import EngineOptions
from panscan.model.load import load_for
from panscan.records.environment import environment
from panscan.settings import settings_from

RECORD = Path(__file__).parents[1] / "records" / "forced-tokens-cpu.json"
ROUNDS = 2
SETTINGS = {"model": "mini", "dtype": "fp32", "device": "cpu", "runner": "engine"}
LINE = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit_price": {"type": "number", "minimum": 0, "maximum": 99},
    },
    "required": ["description", "quantity", "unit_price"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "merchant": {"type": "string", "maxLength": 12},
        "currency": {"enum": ["USD", "EUR"]},
        "lines": {"type": "array", "minItems": 1, "maxItems": 2, "items": LINE},
        "is_paid": {"type": "boolean"},
    },
    "required": ["merchant", "currency", "lines", "is_paid"],
    "additionalProperties": False,
}


def answer(engine: Engine, requests: Sequence[Request], *, at_once: bool) -> tuple[float, list[Result]]:
    """Return output tokens per second, and the results."""
    start = time.perf_counter()
    groups = [requests] if at_once else [[request] for request in requests]
    results = [result for group in groups for result in engine.generate(group)]
    seconds = time.perf_counter() - start
    return sum(result.output_tokens for result in results) / seconds, results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare the tokens, write the record to the path in ``argv``, or to the committed one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads.forced", description="JSON answers with and without forced tokens."
    )
    parser.add_argument("output", nargs="?", type=Path, default=RECORD, help="The record, as JSON.")
    output: Path = parser.parse_args(argv).output
    settings = settings_from(SETTINGS)
    loaded = load_for(settings)
    sampling = Sampling(max_new_tokens=150, json_schema=json.dumps(SCHEMA))
    requests = [Request(f"What does receipt {number} say?", sampling=sampling) for number in range(32)]
    engines = {
        name: Engine(loaded, replace(EngineOptions.of(settings), force_tokens=name == "on"), settings)
        for name in ("on", "off")
    }
    speeds: dict[str, dict[str, list[float]]] = {}
    share = 0.0
    for batch in (1, 32):
        batch_requests = requests[:2] if batch == 1 else requests
        speeds[str(batch)] = {name: [] for name in engines}
        for turn in range(ROUNDS + 1):
            tokens = []
            for name, engine in engines.items():
                speed, results = answer(engine, batch_requests, at_once=batch > 1)
                tokens.append([result.token_ids for result in results])
                if turn:  # the first warms up, and fills the caches
                    speeds[str(batch)][name].append(speed)
                if name == "on":
                    share = sum(item.forced_tokens for item in results) / sum(item.output_tokens for item in results)
            if tokens[0] != tokens[1]:
                raise SystemExit("the tokens differ: no record is written")
        pairs = zip(speeds[str(batch)]["on"], speeds[str(batch)]["off"], strict=True)
        ratio = statistics.median(on / off for on, off in pairs)
        print(f"batch {batch}: {ratio:.2f} times the output tokens/s; {share:.0%} of them forced")
    record = {"output_tokens_per_s": speeds, "forced_share": share, "environment": environment(), **SETTINGS}
    output.write_text(json.dumps(record, indent=1) + "\n")
    for engine in engines.values():
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
