"""Tables of layouts of 27B over several GPUs: what the plan expects, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load_tables import LEVEL_HEADINGS, level_row
from benchmarks.markdown import days, table
from panscan.engine.options import EngineOptions
from panscan.model.shapes import SHAPES
from panscan.plan.gpus import gpu_named
from panscan.plan.layouts import Layout, PlanInputs, find_layouts
from panscan.plan.mix import mix_of_views

RECORDS = Path(__file__).parent / "records"
_COLUMNS = (
    "replicas x cards",
    "weights",
    "KV cache",
    "KV cache GB/card",
    "requests at once",
    "expected requests/s",
)
_TEXT_COLUMNS = (0, 1, 2)
_LATER = "not measured"
_SMALL_CARDS: dict[tuple[str | None, int, str], tuple[str, str]] = {
    ("int8", 1, "auto"): ("int8-40gb", "{}"),
    ("int8", 1, "int8"): ("int8-40gb-head-int8kv", "{} with `--quantize-head int8`"),
    ("int8", 2, "auto"): ("int8-tp2-40gb", "{}"),
    ("int8", 2, "int8"): ("int8-tp2-40gb-head-int8kv", "{} with `--quantize-head int8`"),
    (None, 2, "auto"): ("bf16-tp2-40gb", "{}"),
    (None, 2, "int8"): ("bf16-tp2-40gb-int8kv", "{}"),
}
"""Record of W1 on one or two H100s with 40 GB each, by weights, tensor parallel size and KV cache."""


def ten_a100() -> str:
    """Return the layouts of 27B on ten A100 40 GB: planned, and as measured on H100s limited to 40 GB."""
    chosen = [
        layout
        for layout in _planned("a100-40gb", 10, ("int8", None))
        if layout.variant.tensor_parallel_size in (1, 2, 4)
    ]
    note = (
        "Expected: `panscan plan --model 27b --gpu a100-40gb --count 10 --max-new-tokens 128`. Measured: W1 (four"
        " views, 1,102 prompt and 128 output tokens) on one and two H100s with `--gpu-memory-gb 40`, which are faster"
        " than A100s: the order of layouts counts. No A100 was measured."
    )
    columns: dict[str, Callable[[Layout], str]] = {"measured per card, H100": _small_card}
    served = [_several(layout, memory=40) for layout in chosen]
    if any(served):
        columns["behind one server"] = lambda layout: _per_card(_several(layout, memory=40))
        note += f" Behind one server: {_where(served)}"
    return _layout_table(chosen, columns, note)


def many_gpus() -> str:
    """Return the layouts of 27B on eight GPUs: planned, and as measured behind one server, where a record exists."""
    found = read_records("serve")
    count = max((_gpus(record) for record in found), default=8)
    gpu = "h200" if found and all("H200" in _gpu_name(record) for record in found) else "h100"
    chosen = [layout for layout in _planned(gpu, count, (None, "fp8", "int8")) if layout.kind[1] == "auto"]
    note = (
        f"Expected: `panscan plan --model 27b --gpu {gpu} --count {count} --max-new-tokens 128`, from records of one"
        " and two GPUs."
    )
    columns: dict[str, Callable[[Layout], str]] = {}
    served = [_several(layout) for layout in chosen]
    if any(served):
        columns = {
            "measured requests/s": lambda layout: _rate_cell(_several(layout)),
            "of replicas x one": _scaling,
            "server CPU ms/request": lambda layout: _server_cpu(_several(layout)),
            "without HTTP": lambda layout: _rate_cell(_several(layout, "batch")),
        }
        note += (
            f" Measured: {_where(served)} Server CPU: of the process that serves HTTP. Without HTTP:"
            " `panscan batch --replicas`."
        )
    return _layout_table(chosen, columns, note) + _mixed_documents(found)


def _mixed_documents(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of mixed documents at rising rates, after a sentence; empty without such a record."""
    rows = [
        [
            f"{record['replicas']} x {record['settings'].get('tensor_parallel_size', 1)}",
            *_kinds(record),
            *level_row(level),
        ]
        for record in records
        for level in record.get("w3", ())
    ]
    if not rows:
        return ""
    headings = ["replicas x cards", "weights", "GB/card", *LEVEL_HEADINGS]
    return f"\n\nMixed documents that arrive over time, at shares of that rate:\n\n{table(headings, rows, text=(0, 1))}"


def _kinds(record: dict[str, Any]) -> tuple[str, str]:
    """Return the weights of a record and its memory limit."""
    limit = record["settings"].get("gpu_memory_gb")
    return record["settings"].get("quantization") or "bf16", "all" if limit is None else f"{limit:g}"


def _planned(gpu: str, count: int, kinds: Sequence[str | None]) -> list[Layout]:
    shape = SHAPES["27b"]
    mix = mix_of_views("4", shape, text_tokens=42, output_tokens=(128, 128))
    inputs = PlanInputs(
        shape=shape, gpu=gpu_named(gpu), count=count, mix=mix, options=EngineOptions(), kinds=tuple(kinds)
    )
    return [layout for layout in find_layouts(inputs) if layout.fits]


def _layout_table(layouts: Sequence[Layout], columns: dict[str, Callable[[Layout], str]], note: str) -> str:
    rows = []
    for layout in layouts:
        weights, cache = layout.kind
        rate = layout.speed.requests_per_s
        rows.append(
            [
                f"{layout.replicas} x {layout.variant.tensor_parallel_size}",
                weights or "bf16",
                "bf16" if cache == "auto" else cache,
                f"{layout.memory.kv_bytes / 1e9:.1f}",
                str(layout.replicas * layout.running),
                f"{rate.value:.1f} ({rate.low:.1f}-{rate.high:.1f})",
                *(cell(layout) for cell in columns.values()),
            ]
        )
    text = (*_TEXT_COLUMNS, *range(len(_COLUMNS), len(_COLUMNS) + len(columns)))
    return f"{table([*_COLUMNS, *columns], rows, text=text)}\n\n{note}"


def _small_card(layout: Layout) -> str:
    """Return W1's requests per second and card on H100s with 40 GB."""
    weights, cache = layout.kind
    size = layout.variant.tensor_parallel_size
    if (weights, size, cache) not in _SMALL_CARDS:
        return _LATER
    name, words = _SMALL_CARDS[weights, size, cache]
    record = json.loads((RECORDS / f"w1-27b-{name}-h100.json").read_bytes())
    rate = median(turn["requests_per_s"] for turn in record["measured"]["engine"]["throughput"])
    return words.format(f"{rate / size:,.2f}/s (`w1-27b-{name}-h100`)")


@cache
def read_records(kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind of job of :mod:`benchmarks.many_gpus`, those with more replicas first."""
    found = [json.loads(path.read_bytes()) for path in sorted(RECORDS.glob(f"{kind}-27b-*x*.json"))]
    return sorted((record for record in found if _turns(record)), key=lambda record: -record["replicas"])


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured turns; none if the job was ended before."""
    return list(record.get("w1", record.get("batch", [])))


def _matching(layout: Layout, kind: str, memory: float | None) -> list[dict[str, Any]]:
    """Return the records with a layout's weights, KV cache, GPUs per replica and memory limit."""
    weights, cache = layout.kind
    due = (weights, cache, layout.variant.tensor_parallel_size, memory)
    names = {"quantization": None, "kv_cache_dtype": "auto", "tensor_parallel_size": 1, "gpu_memory_gb": None}
    return [
        record
        for record in read_records(kind)
        if due == tuple(record["settings"].get(name, default) for name, default in names.items())
    ]


def _several(layout: Layout, kind: str = "serve", memory: float | None = None) -> dict[str, Any] | None:
    """Return the record of a layout with the most replicas, at least two; None if there is none."""
    return next((record for record in _matching(layout, kind, memory) if record["replicas"] > 1), None)


def _rate(record: dict[str, Any]) -> float:
    return float(median(turn["requests_per_s"] for turn in _turns(record)))


def _gpus(record: dict[str, Any]) -> int:
    return int(record["replicas"] * record["settings"].get("tensor_parallel_size", 1))


def _gpu_name(record: dict[str, Any]) -> str:
    return str(record["environment"]["gpus"][0]["name"])


def _rate_cell(record: dict[str, Any] | None) -> str:
    return _LATER if record is None else f"{_rate(record):.1f} ({record['replicas']} replicas)"


def _per_card(record: dict[str, Any] | None) -> str:
    if record is None:
        return _LATER
    size = record["settings"].get("tensor_parallel_size", 1)
    return f"{_rate(record) / _gpus(record):.2f}/s ({record['replicas']} x {size})"


def _scaling(layout: Layout) -> str:
    """Return the throughput of several replicas over that of as many single ones."""
    several = _several(layout)
    one = next((record for record in _matching(layout, "serve", None) if record["replicas"] == 1), None)
    if several is None or one is None:
        return "-"
    return f"{_rate(several) / (several['replicas'] * _rate(one)):.2f}"


def _server_cpu(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    return f"{median(turn['cpu_ms_per_request']['ingress'] for turn in record['w1']):.1f}"


def _where(served: Sequence[dict[str, Any] | None]) -> str:
    """Return how and where records were measured."""
    records = [record for record in served if record is not None]
    machines = {f"{_gpu_name(record)}, {record['environment']['cpu']}" for record in records}
    created = days(record["created"] for record in records)
    return (
        "`panscan serve --replicas` under `panscan load` on the same machine,"
        f" {records[0]['pages_per_replica']} of W1's pages per replica at once; {'; '.join(sorted(machines))};"
        f" {created}. Command: `benchmarks/many_gpus.sh FOLDER`."
    )
