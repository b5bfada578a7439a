"""Reading a run: typed decoding against what it replaced, side by side in one process.

The baseline is the reader of the versions before: ``json`` and a validator that checks each field with ``isinstance``,
reduced to the ``request`` and ``repeat`` lines that make up a run. Both read the same file of 20,000 requests in turn,
and find the same requests.

    python benchmarks/read_records.py [--requests 20000] [--tokens 128] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panscan.core.foreign import parse_json
from panscan.records.store import FILE_NAME, read_run

TARGET = 10.0
PER_REPEAT = 200
_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))
_LARGEST = 2**64
_STAMPS = ("preparing", "loaded", "preprocessed", "scheduled", "vision_start", "vision", "end")
_REPEAT = {"cell": str, "repeat": int}
_FIELDS: dict[str, dict[str, Any]] = {
    "request": {
        **_REPEAT,
        "batch": int,
        "request": str,
        "image": list,
        "image_sha256": list,
        "prompt_sha256": str,
        "views": int,
        "crops": int,
        "image_tokens": int,
        "prompt_tokens": int,
        "output_tokens": int,
        "finish_reason": _TEXT_OR_NONE,
        "stamps": dict,
        "error": _TEXT_OR_NONE,
    },
    "repeat": {**_REPEAT, "started": _NUMBER, "ended": _NUMBER, "warmup_s": _NUMBER},
}
_OPTIONAL: dict[str, Any] = {
    "image": [str],
    "image_sha256": [str],
    "image_size": [[_NUMBER]],
    "tags": {"*": [str]},
    "scores": {"*": _NUMBER},
}


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has a type, one of several, or elements or fields that fit."""
    if isinstance(shape, list):
        return isinstance(value, list | tuple) and all(_fits(element, shape[0]) for element in value)
    if isinstance(shape, dict) and isinstance(value, dict):
        fields = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
        return all(_fits(value.get(name, ...), kind) for name, kind in fields.items())
    if isinstance(shape, dict):
        return False
    if isinstance(shape, tuple):
        return any(_fits(value, kind) for kind in shape)
    if isinstance(value, bool):
        return shape is bool
    if isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
        return False
    return isinstance(value, shape)


def _integer(digits: str) -> int:
    if not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(digits)
    return number


def _check_line(record: dict[str, Any]) -> None:
    for name, kinds in _FIELDS[record["type"]].items():
        if name not in record or not _fits(record[name], kinds):
            raise ValueError(name)
    if record["type"] == "request":
        for name, shape in _OPTIONAL.items():
            if name in record and not _fits(record[name], shape):
                raise ValueError(name)
        stamps = record["stamps"]
        fits = _fits(stamps["accepted"], _NUMBER) and _fits(stamps["tokens"], [_NUMBER])
        if not fits or not all(_fits(stamps.get(name), (*_NUMBER, type(None))) for name in _STAMPS):
            raise ValueError("stamps")


def read_as_before(path: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the requests by cell and repeat, as the versions before read them."""
    in_flight: dict[tuple[str, int], dict[tuple[int, str], dict[str, Any]]] = defaultdict(dict)
    requests = {}
    for line in path.read_bytes().splitlines()[1:]:
        record = parse_json(line, parse_int=_integer)
        _check_line(record)
        key = record["cell"], record["repeat"]
        if record["type"] == "repeat":
            requests[key] = list(in_flight.pop(key).values())
        else:
            in_flight[key][record.get("replica", 0), record["request"]] = record
    return requests


def write_run(path: Path, requests: int, tokens: int) -> None:
    """Write the records of a run with repeats of 200 requests."""
    header: dict[str, Any] = {"type": "run", "schema": 3, "run_id": "r", "created": "", "command": [], "settings": {}}
    cells = [{"cell": "c", "settings": {"batch_size": 4}}]
    with path.open("w") as file:
        file.write(json.dumps({**header, "environment": {}, "cells": cells}) + "\n")
        for number in range(requests):
            repeat, start = number // PER_REPEAT, 1.7e9 + number * 0.37
            times = [start + 0.2 + 0.01234567 * index for index in range(tokens)]
            stages = {"loaded": start + 0.01, "preprocessed": start + 0.05, "scheduled": None, "vision_start": None}
            record = {
                "type": "request",
                "cell": "c",
                "repeat": repeat,
                "batch": number // 4,
                "request": f"q{number}",
                "image": [f"documents/page-{number % 97}.png"],
                "image_sha256": [f"{number % 97:064x}"],
                "image_size": [[1240, 1754]],
                "prompt_sha256": f"{number % 31:064x}",
                "views": 4,
                "crops": 3,
                "image_tokens": 1024,
                "prompt_tokens": 1102,
                "cached_tokens": 0,
                "output_tokens": tokens,
                "finish_reason": "length",
                "stamps": {"accepted": start, **stages, "vision": start + 0.1, "tokens": times, "end": times[-1]},
                "error": None,
                "tags": {"type": ["form"]},
                "scores": {"exact_match": 1.0, "anls": 0.75},
            }
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            if number % PER_REPEAT == PER_REPEAT - 1 or number == requests - 1:
                peaks = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes"))
                line = {"type": "repeat", "cell": "c", "repeat": repeat, "started": start, "ended": start + 9, **peaks}
                file.write(json.dumps({**line, "warmup_s": 1.0}) + "\n")


def seconds_of(read: Callable[[], object]) -> float:
    """Return the seconds of computation that one reading takes, whatever else the machine does."""
    start = time.process_time()
    read()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        write_run(path, options.requests, options.tokens)
        before, now = read_as_before(path), read_run(path).requests
        assert before.keys() == now.keys()
        assert all([r["request"] for r in before[key]] == [r.request for r in now[key]] for key in now)
        del before, now
        rounds = [
            (seconds_of(lambda: read_as_before(path)), seconds_of(lambda: read_run(path)))
            for _ in range(options.rounds)
        ]
        size = path.stat().st_size / 2**20
    old, new = (statistics.median(turn[side] for turn in rounds) for side in (0, 1))
    ratio = statistics.median(before / now for before, now in rounds)
    print(
        f"{options.requests:,} requests of {options.tokens} tokens, {size:.0f} MiB: {old:.2f} s of computation before,"
        f" {new:.2f} s now, {ratio:.1f}x faster (target: at least {TARGET:g}x)"
    )
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
