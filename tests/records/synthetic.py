"""Runs with known stamps, for tests of everything that reads records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panscan.records.store import FILE_NAME, AnyRecord, Run, parse_record, parse_run, read_run


def header(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    run = {"type": "run", "schema": 2, "run_id": "r", "created": "2026-01-02T03:04:05+00:00"}
    listed = [{"cell": cell, "settings": settings} for cell, settings in cells.items()]
    return {**run, "command": ["panscan", "bench"], "settings": {}, "environment": {}, "cells": listed}


def stamps(accepted: float, tokens: Sequence[float], **others: Any) -> dict[str, Any]:
    missing = dict.fromkeys(("loaded", "preprocessed", "vision_start", "vision", "end"))
    return {"accepted": accepted, "tokens": list(tokens), **missing, **others}


def request(
    cell: str, request: str, accepted: float, tokens: Sequence[float], *, repeat: int = 0, batch: int = 0, **others: Any
) -> dict[str, Any]:
    asked = {"type": "request", "cell": cell, "repeat": repeat, "batch": batch, "request": request}
    page = {"image": ["page.png"], "image_sha256": ["00"], "prompt_sha256": "00", "views": 3, "crops": 2}
    counts = {"image_tokens": 12, "prompt_tokens": 20, "output_tokens": len(tokens)}
    ended = {"finish_reason": "length", "stamps": stamps(accepted, tokens), "error": None}
    return {**asked, **page, **counts, **ended, **others}


def repeat(cell: str, repeat: int, started: float, ended: float, **others: Any) -> dict[str, Any]:
    times = {"started": started, "ended": ended, "warmup_s": 0.5}
    peaks = {"peak_allocated_bytes": None, "peak_reserved_bytes": None, "peak_rss_bytes": 2**30}
    return {"type": "repeat", "cell": cell, "repeat": repeat, **times, **peaks, **others}


def outcome(cell: str, outcome: str, reason: str | None = None) -> dict[str, Any]:
    return {"type": "cell", "cell": cell, "outcome": outcome, "reason": reason, "repeat": None, "time": 9.0}


def scored(records: Sequence[dict[str, Any]], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Requests with an exact match each; every one is a question of its own."""
    left = iter(scores)
    return [
        record | {"scores": {"exact_match": next(left)}, "prompt_sha256": record["request"]}
        if record["type"] == "request"
        else record
        for record in records
    ]


def load(cells: Sequence[str], shape: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    model = {"shape": shape, "device": "cuda:0", "dtype": "bfloat16", "weight_bytes": 3 * 2**30}
    rates = {"flops_per_s": 4e12, "bytes_per_s": 2e9}
    return {"type": "load", "cells": list(cells), "seconds": 2.5, **model, **rates, **others}


def truth(name: str = "t", **others: Any) -> dict[str, Any]:
    source = {"type": "truth", "truth": name, "source": "computed", "file": "truth.npz", "model": "tiny"}
    return {**source, "requests": 5, "tokens": 77, "image_positions": 1234, "seconds": 12.5, **others}


def verdict(cell: str, word: str, answer: float | None, image: float | None = None, **others: Any) -> dict[str, Any]:
    """A verdict whose divergences are so many times a noise of a thousandth of a nat."""

    def divergence(ratio: float | None, positions: int) -> dict[str, Any] | None:
        return ratio and {"positions": positions, "kl": ratio * 1e-3, "kl_max": ratio * 1e-2, "noise": 1e-3}

    figures = {"answer": divergence(answer, 77), "image": divergence(image, 1234)}
    tokens = {"top1": answer and {"clear": 80, "agree": 79}, "equal_tokens": None}
    judged = {"type": "verdict", "cell": cell, "verdict": word, "reason": None, "truth": "t"}
    return {**judged, **figures, **tokens, "seconds": 1.5, **others}


def batches_of(
    cell: str, latencies: Sequence[float], size: int = 1, tokens: int = 3, **others: Any
) -> list[dict[str, Any]]:
    """One repeat of batches one after the other from time 0: half of each latency to the first token.

    ``others`` are fields of its requests.
    """
    records, start = [], 0.0
    for batch, latency in enumerate(latencies):
        times = [start + latency / 2 * (1 + i / (tokens - 1)) for i in range(tokens)]
        records += [request(cell, f"q{batch}.{i}", start, times, batch=batch, **others) for i in range(size)]
        start += latency
    return [*records, repeat(cell, 0, 0.0, start), outcome(cell, "done")]


def record_of(line: dict[str, Any]) -> AnyRecord:
    """The record of a line that :func:`write_run` would write."""
    return parse_record(json.dumps(line).encode())


def records_of(lines: Sequence[dict[str, Any]]) -> list[AnyRecord]:
    return [record_of(line) for line in lines]


def write_run(directory: Path, records: Sequence[dict[str, Any]]) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_run(directory)


def in_memory(records: Sequence[dict[str, Any]], name: str = "run") -> Run:
    """A run as :func:`panscan.records.store.read_run` would read it, without a file."""
    return parse_run(Path(name) / FILE_NAME, "".join(json.dumps(record) + "\n" for record in records).encode())


def run_of(*records: dict[str, Any], cells: dict[str, dict[str, Any]] | None = None) -> Run:
    """A run of one cell unless others are given with their settings."""
    return in_memory([header({"c": {}} if cells is None else cells), *records])
