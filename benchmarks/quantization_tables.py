"""Tables about quantised weights: accuracy of the mini model, and speed on GPUs."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import accuracies, table
from panscan.analysis.accuracy import Accuracy
from panscan.core.weight_formats import weight_words
from panscan.records.intervals import wilson_interval

RECORDS = Path(__file__).parent / "records"
_W1 = re.compile(r"w1-27b(-tp2|-(fp8|int8|int4).*)?(-40gb|-24gb)?(-h100)?")
"""Records of W1 on the 27B shape: bf16 on one and two GPUs, and quantised ones once they are measured."""
_GPU_WORDS = re.compile(r"H\d+")  # of a driver's name such as NVIDIA H100 80GB HBM3


def _mini() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / "quantization-mini.json").read_text())
    return record


def quantization_mini() -> str:
    """Return accuracy and divergence of each kind of weights, paired by question with the unquantised model."""
    record = _mini()
    variants = record["variants"]
    base = variants["unquantised"]
    headings = [
        "weights",
        "MB",
        "accuracy (exact match)",
        "vs unquantised (95%)",
        "other answers",
        "KL answers",
        "KL images",
        "top-1",
    ]
    names = sorted(variants, key=lambda name: name if name.startswith("int4") else "")  # stable: others stay in order
    results = accuracies(variants, "unquantised")
    rows = [_mini_row(name, variants[name], base, results.get(name)) for name in names]
    facts = record["environment"]
    return (
        f"{table(headings, rows)}\n\n{len(base['answers'])} questions about {record['documents']} sample documents"
        f" (seed {record['seed']}), paired by question; float32 but for rows with bf16. KL: mean divergence in nats"
        f" from the float32 reference of the unquantised model, at {base['verdict']['answer']['positions']} answer and"
        f" {base['verdict']['image']['positions']:,} image positions. {facts['cpu']}, torch"
        f" {facts['packages']['torch']}, transformers {facts['packages']['transformers']}."
        f" Record: `benchmarks/records/quantization-mini.json`. Command: `{record['command']}`"
    )


def _mini_row(name: str, variant: dict[str, Any], base: dict[str, Any], result: Accuracy | None) -> list[str]:
    right, count = variant["exact_match"], len(variant["exact_match"])
    low, high = wilson_interval(sum(right) / count, count)
    verdict = variant["verdict"]
    row = [name, f"{variant['weight_bytes'] / 1e6:.1f}"]
    row.append(f"{100 * sum(right) / count:.1f}% ({100 * low:.1f}-{100 * high:.1f})")
    if result is None:
        row += ["-", "-"]
    else:
        changed = sum(ours != theirs for ours, theirs in zip(variant["answers"], base["answers"], strict=True))
        row += [result.short_text, f"{changed} of {count}"]
    top1 = verdict["top1"]
    return [
        *row,
        *(f"{verdict[kind]['kl']:.2g}" for kind in ("answer", "image")),
        f"{top1['agree']} of {top1['clear']}",
    ]


def quantization_products() -> str:
    """Return the milliseconds of a product on a CPU, by number of input rows."""
    record = _mini()
    products, facts = record["products"], record["environment"]
    rows = [
        [
            f"{timing['rows']:,}",
            f"{timing['float32_ms']:.1f}",
            f"{timing['int8_ms']:.1f}",
            f"{timing['float32_ms'] / timing['int8_ms']:.1f}x",
        ]
        for timing in products["times"]
    ]
    return (
        f"{table(['rows', 'float32 ms', 'int8 ms', 'int8 speedup'], rows)}\n\nOne product of {products['inputs']:,} x"
        f" {products['outputs']:,} weights (the 4B shape's MLP) including input quantisation; medians of"
        f" alternating runs; {facts['cpu']}, {products['threads']} threads, torch {facts['packages']['torch']}."
        " Record: `benchmarks/records/quantization-mini.json`."
    )


def vision_tower_weights(record: dict[str, Any]) -> str:
    """Return the times of the vision tower by weights, and the error of its features."""
    times, errors, gpu = record["ms_per_view"], record["relative_error"], record["environment"]["gpus"][0]
    numbers = [*next(iter(times.values()))]
    rows = []
    for name, measured in times.items():
        batches = (f"{int(views) * statistics.median(values):.1f}" for views, values in measured.items())
        rows.append([name, *batches, f"{errors[name]:.1e}"])
    headings = ["vision tower", *(f"{views} views, ms" for views in numbers), "error against float32"]
    return (
        f"{table(headings, rows)}\n\nSigLIP at its true shape, random weights, bf16 activations; in turns in one run,"
        f" medians. The error is that of the features, relative to their norm. {gpu['name']}, torch"
        f" {record['environment']['packages']['torch']}. Record: `benchmarks/records/vision-tower-weights.json`."
        f" Command: `{' '.join(record['command'])}`"
    )


def quantization_27b() -> str:
    """Return the results of W1 on the 27B shape, by kind of weights and memory limit, for all existing records."""
    records = {path.stem: json.loads(path.read_text()) for path in RECORDS.glob("w1-27b*.json")}
    w1_records = {name: record for name, record in records.items() if _W1.fullmatch(name)}
    headings = [
        "weights",
        "KV cache",
        "GPUs",
        "GB per GPU",
        "weights GB",
        "requests/s",
        "per GPU",
        "TTFT ms",
        "end to end ms",
        "decode step ms",
        "concurrent requests",
        "record",
    ]
    rows = [
        row
        for name in sorted(w1_records, key=lambda name: _order(w1_records[name]))
        for row in _w1_rows(name, w1_records[name])
    ]
    gpus = sorted({record["environment"]["gpus"][0]["name"] for record in w1_records.values()})
    return (
        f"{table(headings, rows)}\n\nW1: 27B shape with random weights, distinct documents of 4 views, 1,102 prompt and"
        " 128 output tokens; throughput with all requests in flight, latencies of a single request; medians. GB per"
        " GPU: limit set by `--gpu-memory-gb`; compute and bandwidth are those of the measured GPU."
        f" {', '.join(gpus)}."
    )


def _order(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a record: the larger GPU first, then by weights, GPUs, memory and KV cache."""
    settings, gpu = record["settings"], record["environment"]["gpus"][0]
    kinds = (None, "fp8", "int8", "int4")
    limit = settings.get("gpu_memory_gb") or float("inf")
    ranks = settings.get("tensor_parallel_size", 1)
    weights = kinds.index(settings.get("quantization"))
    return -gpu["memory_bytes"], weights, ranks, -limit, _kv_cache(record), *_parts(settings)


def _parts(settings: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the head and the vision tower are quantised."""
    return bool(settings.get("quantize_head")), bool(settings.get("quantize_vision"))


def _kv_cache(record: dict[str, Any]) -> str:
    dtype = record["settings"].get("kv_cache_dtype", "auto")
    return "bf16" if dtype == "auto" else str(dtype)


def _w1_rows(name: str, record: dict[str, Any]) -> list[list[str]]:
    """Return the row of a record, and one for each lower memory limit in it."""
    settings = record["settings"]
    measured = record["measured"].get("engine", record["measured"])
    limit = settings.get("gpu_memory_gb")
    rows = [_w1_row(name, record, measured, "-" if limit is None else f"{limit:g}")]
    for key, part in record.items():
        if match := re.fullmatch(r"measured_(.+)gb", key):
            rows.append(_w1_row(name, record, part, match[1]))
    return rows


def _w1_row(name: str, record: dict[str, Any], measured: dict[str, Any], limit: str) -> list[str]:
    settings = record["settings"]
    kind, size = settings.get("quantization") or "bf16", settings.get("quantization_group_size")
    gpus = settings.get("tensor_parallel_size", 1)
    throughput = statistics.median(turn["requests_per_s"] for turn in measured["throughput"])
    weights = f"int4, groups of {size or 128}" if kind == "int4" else kind
    row = [
        ", ".join(weight_words(weights, settings.get("quantize_head"), settings.get("quantize_vision"))),
        _kv_cache(record),
        f"{gpus} x {_GPU_WORDS.findall(record['environment']['gpus'][0]['name'])[0]}",
        limit,
        f"{record['model']['weight_bytes'] / 1e9:.1f}",
        f"{throughput:.2f}",
        f"{throughput / gpus:.2f}",
    ]
    if "alone" in measured:
        ttft, e2e = (statistics.median(measured["alone"][latency]["all"]) for latency in ("ttft_ms", "e2e_ms"))
        step = (e2e - ttft) / (record["work"]["output_tokens"] - 1)
        row += [f"{ttft:.0f}", f"{e2e:,.0f}", f"{step:.1f}"]
    else:
        row += ["-", "-", "-"]
    return [*row, _at_once(record, measured), f"`{name}.json`"]


def _at_once(record: dict[str, Any], measured: dict[str, Any]) -> str:
    """Return how many requests ran concurrently: counted, in the largest decode step, or as the KV cache allows."""
    if "most_at_once" in measured:
        return str(measured["most_at_once"])
    steps = measured.get("decode", ())  # none in brief records
    largest = max((step["batch"] for step in steps if step["ms_per_step"] is not None), default=0)
    if largest >= record["work"]["requests"]:
        return str(largest)
    for line in measured["decisions"]:
        if match := re.match(r"KV cache: .* ([\d,]+) tokens in global layers", line):
            tokens = int(match[1].replace(",", ""))
            return f"{tokens // (record['work']['prompt_tokens'] + record['work']['output_tokens']):,}"
    return "-"
