"""Tables of layouts of 27B over several GPUs: what the plan expects, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load_tables import LEVEL_HEADINGS, level_row
from benchmarks.markdown import days, table
from benchmarks.plan_points import replica_points
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
_LAYOUT_HEADINGS = ("replicas x cards", "weights", "GPU", "GB/card")
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
    layouts = [
        layout
        for layout in _planned("a100-40gb", 10, ("int8", None))
        if layout.variant.tensor_parallel_size in (1, 2, 4)
    ]
    note = (
        "Expected: `panscan plan --model 27b --gpu a100-40gb --count 10 --max-new-tokens 128`, with the range of the"
        " prediction and all requests at once. Measured: W1 (64 documents of four views, 1,102 prompt and 128 output"
        " tokens) on one and two H100s with `--gpu-memory-gb 40`, which are faster than A100s: the order of layouts"
        " counts. Pairs that hold more than 64 requests were not full. No A100 was measured."
    )
    columns: dict[str, Callable[[Layout], str]] = {"measured per card, H100": _small_card}
    served = [_behind_one_server(layout) for layout in layouts]
    if any(served):
        columns["behind one server"] = lambda layout: _per_card(_behind_one_server(layout))
        note += f" Behind one server: {_where(served)}"
    return _layout_table(layouts, columns, note)


def many_gpus() -> str:
    """Return the layouts of 27B on eight H100s as planned, and those that were measured on any number of GPUs."""
    layouts = [layout for layout in _planned("h100", 8, (None, "fp8", "int8")) if layout.kind[1] == "auto"]
    command = "panscan plan --model 27b --gpu h100 --count 8 --max-new-tokens 128"
    note = f"Expected: `{command}`, from records of one and two GPUs."
    parts = [_layout_table(layouts, {}, note), _measured_layouts(), _mixed_documents()]
    return "\n\n".join(filter(None, parts))


def _measured_layouts() -> str:
    """Return the table of measured layouts beside the plan's predictions; empty without records."""
    served, jobs = read_records("serve"), read_records("batch")
    alone = [job for job in jobs.values() if _same_engine(job, "serve", job["replicas"]) is None]
    if not served:
        return ""
    headings = [
        "requests/s",
        "planned",
        "of replicas x one",
        "server CPU ms/request",
        "`panscan batch`, requests/s",
        "batch: of replicas x one",
    ]
    rows = []
    for name, record in served.items():
        [point] = replica_points(name, RECORDS)
        job = _same_engine(record, "batch", record["replicas"])
        rows.append(
            [
                *_layout_cells(record),
                f"{_rate(record):.1f}",
                f"{record['replicas'] * point.predicted():.1f}",
                _of_replicas(record, "serve"),
                f"{median(turn['cpu_ms_per_request']['ingress'] for turn in record['w1']):.1f}",
                *_job_cells(job),
            ]
        )
    rows += [[*_layout_cells(job), *["-"] * 4, *_job_cells(job)] for job in alone]
    note = (
        f"{_where(served.values())} Planned: the plan's simulation of the same burst. Server CPU: of the process that"
        f" serves HTTP. `panscan batch`: as many of these pages as files, without HTTP{_where_jobs(jobs.values())}."
    )
    return f"Measured:\n\n{table([*_LAYOUT_HEADINGS, *headings], rows, text=(0, 1, 2))}\n\n{note}"


def _of_replicas(record: dict[str, Any], kind: str) -> str:
    """Return the rate of replicas as a share of that of one, times their number; a dash without a record of one."""
    one, replicas = _same_engine(record, kind, 1), record["replicas"]
    return "-" if one is None or replicas == 1 else f"{_rate(record) / (replicas * _rate(one)):.2f}"


def _job_cells(job: dict[str, Any] | None) -> list[str]:
    return ["-", "-"] if job is None else [f"{_rate(job):.1f}", _of_replicas(job, "batch")]


def _where_jobs(jobs: Iterable[dict[str, Any]]) -> str:
    gpus = sorted({f"{_gpu_name(job)}, {days([job['created']])}" for job in jobs})
    return f" ({'; '.join(gpus)})" if gpus else ""


def _mixed_documents() -> str:
    """Return the table of mixed documents at rising rates, after a sentence; empty without such a record."""
    rows = [
        [*_layout_cells(record), *level_row(level)]
        for record in read_records("serve").values()
        for level in record.get("w3", ())
        if level["median_ttft_ms"] is not None  # answers without text have no latencies
    ]
    if not rows:
        return ""
    title = (
        "Mixed documents that arrive for 6 to 12 seconds at shares of these rates; requests/s include the time until"
        " the last answer:"
    )
    return f"{title}\n\n{table([*_LAYOUT_HEADINGS, *LEVEL_HEADINGS], rows, text=(0, 1, 2))}"


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
def read_records(kind: str) -> dict[str, dict[str, Any]]:
    """Return the records of a kind of job of :mod:`benchmarks.many_gpus` by name, those with more replicas first.

    Jobs that were cut off before a measurement are left out.
    """
    records = {path.name: json.loads(path.read_bytes()) for path in sorted(RECORDS.glob(f"{kind}-27b-*x*.json"))}
    measured = [(name, record) for name, record in records.items() if _turns(record)]
    return dict(sorted(measured, key=lambda item: -item[1]["replicas"]))


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    return list(record.get("w1", record.get("batch", [])))


def _engine(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the replicas of a record have in common: weights, KV cache, ranks, memory, head, and the GPU."""
    names = {
        "quantization": None,
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "gpu_memory_gb": None,
        "quantize_head": None,
    }
    return *(record["settings"].get(name, default) for name, default in names.items()), _gpu_name(record)


def _same_engine(record: dict[str, Any], kind: str, replicas: int) -> dict[str, Any] | None:
    """Return the record with this number of the same replicas; None if there is none."""
    others = read_records(kind).values()
    return next(
        (other for other in others if other["replicas"] == replicas and _engine(other) == _engine(record)), None
    )


def _behind_one_server(layout: Layout) -> dict[str, Any] | None:
    """Return the record of a layout on cards with 40 GB with the most replicas, two at least; None if none."""
    weights, cache = layout.kind
    engine = (weights, cache, layout.variant.tensor_parallel_size, 40)
    records = read_records("serve").values()
    return next((record for record in records if record["replicas"] > 1 and _engine(record)[:4] == engine), None)


def _rate(record: dict[str, Any]) -> float:
    return float(median(turn["requests_per_s"] for turn in _turns(record)))


def _gpu_name(record: dict[str, Any]) -> str:
    return str(record["environment"]["gpus"][0]["name"])


def _layout_cells(record: dict[str, Any]) -> list[str]:
    weights, cache, size, limit, head, _ = _engine(record)
    kind = (weights or "bf16") + (", int8 head" if head else "") + ("" if cache == "auto" else f", {cache} KV cache")
    gpu = _gpu_name(record).removeprefix("NVIDIA ").split()[0]
    return [f"{record['replicas']} x {size}", kind, gpu, "all" if limit is None else f"{limit:g}"]


def _per_card(record: dict[str, Any] | None) -> str:
    if record is None:
        return _LATER
    size = record["settings"].get("tensor_parallel_size", 1)
    head = " with `--quantize-head int8`" if record["settings"].get("quantize_head") else ""
    return f"{_rate(record) / (size * record['replicas']):.2f}/s ({record['replicas']} x {size}){head}"


def _where(served: Iterable[dict[str, Any] | None]) -> str:
    """Return how and where records were measured."""
    records = [record for record in served if record is not None]
    machines = {f"{_gpu_name(record)}, {record['environment']['cpu']}" for record in records}
    created = days(record["created"] for record in records)
    return (
        "`panscan serve --replicas` under `panscan load` on the same machine,"
        f" {records[0]['pages_per_replica']} of W1's pages per replica at once; {'; '.join(sorted(machines))};"
        f" {created}. Command: `benchmarks/many_gpus.sh FOLDER`."
    )
