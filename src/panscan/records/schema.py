"""What a line of a run's records looks like: the fields that a reader relies on, by type of record.

Times are seconds since the Unix epoch. A repeat's ``started`` and ``ended`` enclose its measured requests only: the
warm-up (``warmup_s``, seconds) comes before ``started``. Fields beyond these are kept and not looked at.

Schema 2 added ``load`` (what was loaded for some cells, and the machine's two ceilings), ``truth``, ``verdict``, and
in requests ``image_size`` (``[[width, height], ...]``), ``scores`` (by name, 0 to 1) and ``replica``, and in repeats
``replicas``: what each of several processes did, with the common window in ``started`` and ``ended``. Schema 1 is read.

Requests may also have ``tags`` (``{"type": [...], "kind": [...]}``: what the dataset says of the question),
``empty`` (the answer was), and in their stamps ``preparing`` and ``waits``; a run's ``settings`` may have
``quality_metric`` (the name of the score that is its quality) and ``dataset`` (fields of
:class:`panscan.quality.datasets.DatasetFacts`: where its questions came from, and how many were used); its cells may
have ``aliases`` (further cells that lead to the same work, so that one was measured for all of them). Repeats (and each
of their replicas) may have ``tokens`` (fields of :class:`panscan.records.verdict.TokenCheck`: the measured tokens
against the truth's), truths ``inputs`` (the comparison with Transformers' own processor), verdicts ``beyond`` (a
``TokenCheck``) and ``invariance`` (a list of :class:`panscan.records.verdict.AxisCheck`). A run's ``environment`` may
have ``bundled`` (by name of a bundled model, the start of the SHA-256 of its weights). Records without them are read; a
``mini`` without a fingerprint had random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["EXACT_MATCH", "METRICS", "OUTCOMES", "SCHEMA", "SCHEMAS_READ", "VERDICTS", "Record", "problem_of"]

SCHEMA = 2
SCHEMAS_READ = (1, 2)
OUTCOMES = ("skipped", "failed", "oom", "done")
VERDICTS = ("exact", "close", "different", "unverified")

EXACT_MATCH = "exact_match"
METRICS = {
    EXACT_MATCH: "exact match",
    "anls": "ANLS",
    "relaxed_accuracy": "relaxed accuracy",
    "contains_answer": "contains answer",
    "vqa_accuracy": "VQA accuracy",
}
"""The names of all metrics, and what people call them."""

Record = dict[str, Any]

_NUMBER = (int, float)
_COUNT_OR_NONE = (int, type(None))
_NUMBER_OR_NONE = (*_NUMBER, type(None))
_TEXT_OR_NONE = (str, type(None))
_DICT_OR_NONE = (dict, type(None))
_CELL: dict[str, Any] = {"cell": str}
_REPEAT: dict[str, Any] = {**_CELL, "repeat": int}
_FIELDS: dict[str, dict[str, Any]] = {
    "run": {
        "schema": int,
        "run_id": str,
        "created": str,
        "command": list,
        "settings": dict,
        "environment": dict,
        "cells": list,
    },
    "cell": {**_CELL, "outcome": str, "reason": _TEXT_OR_NONE, "repeat": _COUNT_OR_NONE},
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
    "repeat": {
        **_REPEAT,
        "started": _NUMBER,
        "ended": _NUMBER,
        "warmup_s": _NUMBER,
        "peak_allocated_bytes": _COUNT_OR_NONE,
        "peak_reserved_bytes": _COUNT_OR_NONE,
        "peak_rss_bytes": _COUNT_OR_NONE,
    },
    "load": {
        "cells": list,  # ids of the cells that this model serves
        "seconds": _NUMBER,
        "shape": _DICT_OR_NONE,  # fields of panscan.model.shapes.Shape
        "device": str,
        "dtype": str,
        "weight_bytes": int,
        "flops_per_s": _NUMBER_OR_NONE,  # of a large product, in dtype
        "bytes_per_s": _NUMBER_OR_NONE,  # of a large copy, read and written
    },
    "truth": {
        "truth": str,
        "source": str,  # computed, or reference
        "file": str,
        "model": str,
        "requests": int,
        "tokens": int,
        "image_positions": int,
        "seconds": _NUMBER,
    },
    "verdict": {
        "cell": str,
        "verdict": str,
        "reason": _TEXT_OR_NONE,
        "truth": _TEXT_OR_NONE,
        "answer": _DICT_OR_NONE,  # positions, kl, kl_max, noise: nats
        "image": _DICT_OR_NONE,  # the same at image positions
        "top1": _DICT_OR_NONE,  # clear, agree: positions
        "equal_tokens": (bool, type(None)),
        "seconds": _NUMBER,
    },
}

_DEPARTURE: dict[str, Any] = {
    "request": str,
    "position": int,
    "token": _COUNT_OR_NONE,
    "expected": _COUNT_OR_NONE,
    "texts": (list, tuple),  # both tokens as text
    "margin": _NUMBER_OR_NONE,
    "clear": (bool, type(None)),
}
_CHECK: dict[str, Any] = {"requests": int, "first": _DICT_OR_NONE, "note": str}
_TOKENS: dict[str, Any] = {**_CHECK, "tokens": int, "departed": int, "equal": bool}
_AXIS: dict[str, Any] = {**_CHECK, "axis": str, "differ": int, "own": bool}
_REPLICA: dict[str, Any] = {"replica": int, "started": _NUMBER, "ended": _NUMBER, "device": str}


def problem_of(record: Mapping[str, Any], cells: Mapping[str, Any] | None = None) -> str | None:
    """What keeps a record from being read (None if nothing does). With ``cells``, it must belong to one of them."""
    kind = record.get("type")
    if kind not in _FIELDS:
        return f"unknown type of record {kind!r} (schema {SCHEMA} has {', '.join(_FIELDS)})"
    if cells is not None and kind == "run":
        return "a second run line"
    for name, types in _FIELDS[kind].items():
        if name not in record or not isinstance(record[name], types):
            return f"a {kind} record needs {name!r}, got {record.get(name)!r}"
    if cells is not None and "cell" in _FIELDS[kind] and record["cell"] not in cells:
        return f"the run has no cell {record['cell']!r}"
    for known, name, values in (("cell", "outcome", OUTCOMES), ("verdict", "verdict", VERDICTS)):
        if kind == known and record[name] not in values:
            return f"unknown {name} {record[name]!r} (one of {', '.join(values)})"
    if kind == "repeat":
        return _replicas_problem(record.get("replicas")) or _check_problem(record.get("tokens"), _TOKENS)
    if kind == "truth":
        return _inputs_problem(record.get("inputs"))
    if kind == "verdict":
        axes = record.get("invariance")
        if not isinstance(axes, (list, type(None))):
            return f"a verdict's 'invariance' is a list, got {axes!r}"
        checks = [(record.get("beyond"), _TOKENS), *((axis, _AXIS) for axis in axes or ())]
        return next((found for each in checks if (found := _check_problem(*each)) is not None), None)
    return _stamps_problem(record["stamps"]) if kind == "request" else None


def _replicas_problem(replicas: Any) -> str | None:
    if replicas is None:
        return None
    for each in replicas if isinstance(replicas, list) else [replicas]:
        for name, types in _REPLICA.items():
            if not isinstance(each, dict) or not isinstance(each.get(name), types):
                return f"each of a repeat's replicas needs {name!r}, got {each!r}"
        if (found := _check_problem(each.get("tokens"), _TOKENS)) is not None:
            return found
    return None


def _check_problem(check: Any, fields: Mapping[str, Any]) -> str | None:
    """What is wrong with a comparison of tokens; None is none."""
    if check is None:
        return None
    if (found := _missing("a comparison of tokens", check, fields)) is not None or check["first"] is None:
        return found
    found = _missing("a departure", check["first"], _DEPARTURE)
    if found is None and [isinstance(text, str) for text in check["first"]["texts"]] != [True, True]:
        return f"a departure needs two 'texts', got {check['first']['texts']!r}"
    return found


def _inputs_problem(inputs: Any) -> str | None:
    fields = {"requests": int, "views": int, "difference": _TEXT_OR_NONE, "note": str}
    return None if inputs is None else _missing("a truth's inputs", inputs, fields)


def _missing(what: str, value: Any, fields: Mapping[str, Any]) -> str | None:
    if not isinstance(value, dict):
        return f"{what} must be an object, got {value!r}"
    bad = next((name for name, types in fields.items() if not isinstance(value.get(name, ...), types)), None)
    return None if bad is None else f"{what} needs {bad!r}, got {value.get(bad)!r}"


def _stamps_problem(stamps: Record) -> str | None:
    if not isinstance(stamps.get("accepted"), _NUMBER):
        return f"stamps need a time 'accepted', got {stamps.get('accepted')!r}"
    for name in ("preparing", "loaded", "preprocessed", "scheduled", "vision_start", "vision", "end"):
        if not isinstance(stamps.get(name), (*_NUMBER, type(None))):
            return f"stamps need a time or nothing for {name!r}, got {stamps[name]!r}"
    tokens = stamps.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(time, _NUMBER) for time in tokens):
        return "stamps need a list of times 'tokens'"
    waits = stamps.get("waits", [])
    if not isinstance(waits, list) or not all(_is_interval(wait) for wait in waits):
        return "stamps need a list of [start, end] 'waits'"
    return None


def _is_interval(times: Any) -> bool:
    return isinstance(times, list | tuple) and len(times) == 2 and all(isinstance(time, _NUMBER) for time in times)
