"""Schema of a run's records: the required fields by type of record.

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
against the truth's), truths ``inputs`` (the comparison with Transformers' own processor), verdicts ``concluded`` (false
in a first line, which another one replaces), ``beyond`` (a ``TokenCheck``) and ``invariance`` (a list of
:class:`panscan.records.verdict.AxisCheck`). A run's ``environment`` may have ``bundled`` (by name of a bundled model,
the start of the SHA-256 of its weights). Records without them are read; a ``mini`` without a fingerprint had random
weights. Loads may have ``weights`` (weight format, such as ``int4, groups of 128``; null if unquantised) and
``base_model`` (the unquantised base of a quantised checkpoint).

Schema 3 added load runs, which measure an endpoint. Their ``settings`` have ``load`` (:data:`LOAD_SETTINGS`), their
cells are load levels (``request_rate`` in requests per second, null for unlimited; ``max_concurrency``;
``burstiness``), and their requests have

- ``chunks``: content chunks received. ``stamps.tokens`` has one time per chunk, not per token. Counts that the endpoint
  did not report (``views``, ``crops``, ``image_tokens``, ``prompt_tokens``) are null.
- ``due`` (when the arrival process sends the request), ``queued`` (seconds it waited for ``max_concurrency``),
  ``status`` (of HTTP) and ``error_kind``.

A ``cells`` record adds levels that a search found necessary, ``probe`` says how the endpoint counts image tokens,
``search`` the highest rate that meets the goodput. A repeat may have ``load`` (``client``: how busy the load generator
was).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panscan.core.ranges import shorten
from panscan.settings import axes

__all__ = [
    "ARRIVALS",
    "EXACT_MATCH",
    "LIMITED_TIMES",
    "LOAD_SETTINGS",
    "METRICS",
    "OUTCOMES",
    "SCHEMA",
    "SCHEMAS_READ",
    "TIMES",
    "VERDICTS",
    "Record",
    "problem_of",
]

SCHEMA = 3
SCHEMAS_READ = (1, 2, 3)
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

TIMES = ("ttft", "tpot", "itl", "e2el")
"""The times whose percentiles are shown."""
LIMITED_TIMES = ("ttft", "tpot", "e2el")
"""The times of one request that goodput can limit."""
ARRIVALS = ("poisson", "gamma", "constant", "ramp", "trace", "burst", "closed")
"""How the requests of a load level arrive; ``burst``: all at once, ``closed``: each when another one ends."""

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
    "cells": {"cells": list},  # as in the run line
    "probe": {
        "model": _TEXT_OR_NONE,
        "text_prompt_tokens": _COUNT_OR_NONE,
        "image_prompt_tokens": _COUNT_OR_NONE,
        "expected_image_tokens": _COUNT_OR_NONE,
        "warnings": list,
    },
    "search": {
        "rate": _NUMBER_OR_NONE,  # requests per second; None: no rate meets the goodput
        "attainment": _NUMBER_OR_NONE,
        "note": str,
        "levels": list,
    },
}

LOAD_SETTINGS: dict[str, Any] = {
    "endpoint": str,
    "server": _TEXT_OR_NONE,
    "model": str,
    "goodput": {"*": _NUMBER},  # milliseconds by name of LIMITED_TIMES
    "attainment": _NUMBER,  # share of requests that must meet them
    "arrival": str,
    "scenario": _TEXT_OR_NONE,
    "image_reuse": _NUMBER_OR_NONE,
    "num_prompts": int,
    "num_warmups": int,
    "seed": int,
    "metric_percentiles": [_NUMBER],
    "percentile_metrics": [str],
    "ignore_eos": bool,
}
"""The fields of ``settings.load`` of a load run."""
_UNKNOWN_COUNTS = ("views", "crops", "image_tokens", "prompt_tokens")
_LEVEL_SETTINGS = {"request_rate": _NUMBER_OR_NONE, "max_concurrency": _COUNT_OR_NONE, "burstiness": _NUMBER_OR_NONE}
_CLIENT: dict[str, Any] = {
    "processes": int,
    "lag_median_ms": _NUMBER_OR_NONE,
    "lag_p99_ms": _NUMBER_OR_NONE,
    "cpu_share": _NUMBER_OR_NONE,
    "limited": bool,
    "reason": str,
}

_DIVERGENCE: dict[str, Any] = {"positions": int, "kl": _NUMBER, "kl_max": _NUMBER, "noise": _NUMBER}
_DEPARTURE: dict[str, Any] = {
    "request": str,
    "position": int,
    "token": _COUNT_OR_NONE,
    "expected": _COUNT_OR_NONE,
    "found": str,
    "wanted": str,
    "margin": _NUMBER_OR_NONE,
    "clear": (bool, type(None)),
}
_CHECK: dict[str, Any] = {"requests": int, "first": (_DEPARTURE, type(None)), "note": str}
_TOKENS_OR_NONE = ({**_CHECK, "tokens": int, "departed": int, "equal": bool}, type(None))
_AXIS: dict[str, Any] = {**_CHECK, "axis": str, "differ": int, "own": bool}
_INPUTS: dict[str, Any] = {"requests": int, "views": int, "difference": _TEXT_OR_NONE, "note": str}

_OPTIONAL: dict[str, dict[str, Any]] = {
    "request": {
        "image": [str],
        "image_sha256": [str],
        "image_size": [[_NUMBER]],
        "tags": {"*": [str]},
        "scores": {"*": _NUMBER},
        "empty": bool,
        "replica": int,
        "chunks": int,
        "due": _NUMBER_OR_NONE,
        "queued": _NUMBER_OR_NONE,
        "status": _COUNT_OR_NONE,
        "error_kind": _TEXT_OR_NONE,
    },
    "load": {"cells": [str]},
    "repeat": {"tokens": _TOKENS_OR_NONE, "load": {"client": _CLIENT}},
    "probe": {"warnings": [str]},
    "truth": {"inputs": (_INPUTS, type(None))},
    "verdict": {
        **dict.fromkeys(("answer", "image"), (_DIVERGENCE, type(None))),
        "top1": ({"clear": int, "agree": int}, type(None)),
        "concluded": bool,
        "beyond": _TOKENS_OR_NONE,
        "invariance": ([_AXIS], type(None)),
    },
    "run's settings": {
        "quality_metric": _TEXT_OR_NONE,
        "dataset": _DICT_OR_NONE,
        "verify": bool,
        "load": LOAD_SETTINGS,
    },
}
"""Fields that may be missing, and what is inside of lists and objects."""
_SETTING = (str, int, float, bool, type(None))
_STAMPS = ("preparing", "loaded", "preprocessed", "scheduled", "vision_start", "vision", "end")
_MOST_CELLS = 100_000  # as many as a sweep may have measurements
_LARGEST = 2**64  # seconds, bytes, operations: far more than any machine has, and no arithmetic overflows

_REPLICA: dict[str, Any] = {"replica": int, "started": _NUMBER, "ended": _NUMBER, "device": str}


def problem_of(record: Mapping[str, Any], cells: Mapping[str, Any] | None = None) -> str | None:
    """Return why a record cannot be read; None if it can. With ``cells``, it must belong to one of them."""
    kind = record.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        return f"unknown type of record {shorten(kind)} (schema {SCHEMA} has {', '.join(_FIELDS)})"
    if cells is not None and kind == "run":
        return "a second run line"
    for name, types in _FIELDS[kind].items():
        if name in _UNKNOWN_COUNTS and "chunks" in record and record.get(name, ...) is None:
            continue
        if name not in record or not _fits(record[name], types):
            return f"a {kind} record needs {name!r}, got {shorten(record.get(name))}"
    if problem := _optional_problem(kind, record):
        return problem
    if kind in ("run", "cells"):
        return _cells_problem(record["cells"]) or (_settings_problem(record["settings"]) if kind == "run" else None)
    if cells is not None and "cell" in _FIELDS[kind] and record["cell"] not in cells:
        return f"the run has no cell {record['cell']!r}"
    for known, name, values in (("cell", "outcome", OUTCOMES), ("verdict", "verdict", VERDICTS)):
        if kind == known and record[name] not in values:
            return f"unknown {name} {shorten(record[name])} (one of {', '.join(values)})"
    if kind == "repeat":
        return _replicas_problem(record.get("replicas"))
    return _stamps_problem(record["stamps"]) if kind == "request" else None


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has a type, one of several, only elements that fit ``[shape]`` or ``{"*": shape}``,
    or fields that fit ``{"name": shape, ...}``."""
    if isinstance(shape, list):
        return isinstance(value, list | tuple) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, dict) and isinstance(value, dict):
        fields = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
        return all(_fits(value.get(name, ...), each) for name, each in fields.items())
    if isinstance(shape, dict):
        return False
    if isinstance(shape, tuple):
        return any(_fits(value, each) for each in shape)
    if isinstance(value, bool):  # a subclass of int
        return shape is bool
    if isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
        return False
    return isinstance(value, shape)


def _optional_problem(kind: str, record: Mapping[str, Any]) -> str | None:
    for name, shape in _OPTIONAL.get(kind, {}).items():
        if name in record and not _fits(record[name], shape):
            return f"a {kind} has an unexpected {name!r}: {shorten(record[name])}"
    return None


def _cells_problem(cells: list[Any]) -> str | None:
    if len(cells) > _MOST_CELLS:
        return f"{len(cells):,} cells, at most {_MOST_CELLS:,}"
    for cell in cells:
        settings = cell.get("settings") if isinstance(cell, dict) else None
        if not isinstance(settings, dict) or not isinstance(cell.get("cell"), str):
            return f"each cell of a run needs an id and settings, got {shorten(cell)}"
        shapes = {**dict.fromkeys(axes(), _SETTING), **_LEVEL_SETTINGS}
        for name in shapes.keys() & settings.keys():  # those of other versions may be anything
            if not _fits(settings[name], shapes[name]):
                return f"cell {cell['cell']} has an unexpected {name!r}: {shorten(settings[name])}"
    return None


def _settings_problem(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings of a run, those of a load run included."""
    if problem := _optional_problem("run's settings", settings):
        return problem
    load = settings.get("load")
    if load is None:
        return None
    percentiles = [value for value in load["metric_percentiles"] if not 0 < value < 100]
    for name, wrong in (
        ("arrival", {load["arrival"]} - set(ARRIVALS)),
        ("goodput", load["goodput"].keys() - set(LIMITED_TIMES)),
        ("percentile_metrics", set(load["percentile_metrics"]) - set(TIMES)),
        ("metric_percentiles", set(percentiles)),
    ):
        if wrong:
            return f"a load run has an unexpected {name!r}: {shorten(min(wrong))}"
    return None


def _replicas_problem(replicas: Any) -> str | None:
    if replicas is None:
        return None
    for each in replicas if isinstance(replicas, list) else [replicas]:
        for name, types in _REPLICA.items():
            if not isinstance(each, dict) or not _fits(each.get(name), types):
                return f"each of a repeat's replicas needs {name!r}, got {shorten(each)}"
        if not _fits(each.get("tokens"), _TOKENS_OR_NONE):
            return f"a replica has an unexpected 'tokens': {shorten(each['tokens'])}"
    return None


def _stamps_problem(stamps: Record) -> str | None:
    if not _fits(stamps.get("accepted"), _NUMBER):
        return f"stamps need a time 'accepted', got {shorten(stamps.get('accepted'))}"
    if unknown := stamps.keys() - {"accepted", "tokens", "waits", *_STAMPS}:
        return f"unknown stamp {shorten(min(unknown))}"
    for name in _STAMPS:
        if not _fits(stamps.get(name), _NUMBER_OR_NONE):
            return f"stamps need a time or nothing for {name!r}, got {shorten(stamps[name])}"
    if not _fits(stamps.get("tokens"), [_NUMBER]):
        return "stamps need a list of times 'tokens'"
    waits = stamps.get("waits", [])
    if not isinstance(waits, list) or not all(_is_interval(wait) for wait in waits):
        return "stamps need a list of [start, end] 'waits'"
    return None


def _is_interval(times: Any) -> bool:
    return _fits(times, [_NUMBER]) and len(times) == 2
