"""Tables about quantised weights: their price in answers on the mini model, and their speed on GPUs."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from panscan.analysis.significance import p_text, paired_difference, points_text
from panscan.records.intervals import wilson_interval

__all__ = ["quantization_27b", "quantization_mini", "quantization_products"]

RECORDS = Path(__file__).parent / "records"
_W1 = re.compile(r"w1-27b(-tp2|-(fp8|int8|int4).*)?(-40gb|-24gb)?")
"""Records of W1 on the 27B shape: bf16 on one and two GPUs, and quantised ones once they are measured."""


def _mini() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / "quantization-mini.json").read_text())
    return found


def quantization_mini() -> str:
    """Accuracy of each kind of weights against the unquantised float32 model, paired by question; divergences."""
    record = _mini()
    variants = record["variants"]
    base = variants["unquantised"]
    headings = [
        "weights", "MB", "accuracy (exact match)", "vs unquantised, points (95%)", "p-value", "other answers",
        "KL answers", "KL images", "top-1",
    ]  # fmt: skip
    names = sorted(variants, key=lambda name: name if name.startswith("int4") else "")  # stable: others stay in order
    rows = [_mini_row(name, variants[name], base) for name in names]
    facts = record["environment"]
    return (
        f"{table(headings, rows)}\n\n{len(base['answers'])} questions about {record['documents']} sample documents"
        f" (seed {record['seed']}), paired by question; float32 but for the bf16 row. KL: mean divergence in nats from"
        f" the float32 truth of the unquantised model, at {base['verdict']['answer']['positions']} answer and"
        f" {base['verdict']['image']['positions']:,} image positions. {facts['cpu']}, torch"
        f" {facts['packages']['torch']}, transformers {facts['packages']['transformers']}."
        f" Record: `benchmarks/records/quantization-mini.json`. Command: `{record['command']}`"
    )


def _mini_row(name: str, variant: dict[str, Any], base: dict[str, Any]) -> list[str]:
    right, count = variant["exact_match"], len(variant["exact_match"])
    low, high = wilson_interval(sum(right) / count, count)
    verdict = variant["verdict"]
    row = [name, f"{variant['weight_bytes'] / 1e6:.1f}"]
    row.append(f"{100 * sum(right) / count:.1f}% ({100 * low:.1f}-{100 * high:.1f})")
    if variant is base:
        row += ["-", "-", "-"]
    else:
        found = paired_difference([ours - theirs for ours, theirs in zip(right, base["exact_match"], strict=True)])
        changed = sum(ours != theirs for ours, theirs in zip(variant["answers"], base["answers"], strict=True))
        row += [
            f"{points_text(found.value)} ({points_text(found.low)} to {points_text(found.high)})",
            p_text(found.p_value).removeprefix("p ").removeprefix("= "),
            f"{changed} of {count}",
        ]
    top1 = verdict["top1"]
    return [
        *row,
        *(f"{verdict[kind]['kl']:.2g}" for kind in ("answer", "image")),
        f"{top1['agree']} of {top1['clear']}",
    ]


def quantization_products() -> str:
    """Milliseconds of a product on a CPU, by rows of inputs."""
    record = _mini()
    found, facts = record["products"], record["environment"]
    rows = [
        [f"{each['rows']:,}", f"{each['float32_ms']:.1f}", f"{each['int8_ms']:.1f}",
         f"{each['float32_ms'] / each['int8_ms']:.1f}x"]
        for each in found["times"]
    ]  # fmt: skip
    return (
        f"{table(['rows', 'float32 ms', 'int8 ms', 'int8 is faster'], rows)}\n\nOne product of {found['inputs']:,} x"
        f" {found['outputs']:,} weights (the 4B shape's MLP) with the quantisation of its inputs, medians, both in"
        f" turn; {facts['cpu']}, {found['threads']} threads, torch {facts['packages']['torch']}."
        " Record: `benchmarks/records/quantization-mini.json`."
    )


def quantization_27b() -> str:
    """W1 on the 27B shape by kind of weights: every record that exists."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("w1-27b*.json"))}
    records = {name: record for name, record in records.items() if _W1.fullmatch(name)}
    headings = [
        "weights", "GPUs", "GB per GPU", "weights GB", "requests/s", "TTFT ms", "end to end ms",
        "decode step ms", "requests at once", "record",
    ]  # fmt: skip
    rows = [_w1_row(name, record) for name, record in sorted(records.items(), key=lambda each: _order(each[1]))]
    gpus = sorted({record["environment"]["gpus"][0]["name"] for record in records.values()})
    return (
        f"{table(headings, rows)}\n\nW1: 27B shape with random weights, distinct documents of 4 views, 1,102 prompt and"
        " 128 output tokens; throughput with all requests in flight, latency and decode step of one request alone,"
        " medians. GB per GPU: the limit set by `--gpu-memory-gb`. Requests at once: those that the KV cache holds."
        f" {', '.join(gpus)}."
    )


def _order(record: dict[str, Any]) -> tuple[Any, ...]:
    settings = record["settings"]
    kinds = (None, "fp8", "int8", "int4")
    limit = settings.get("gpu_memory_gb") or float("inf")
    return kinds.index(settings.get("quantization")), settings.get("tensor_parallel_size", 1), -limit


def _at_once(record: dict[str, Any], measured: list[int]) -> str:
    """Requests that the KV cache holds, by the size that the engine logged; else at least those decoded at once."""
    for line in record["measured"]["engine"]["decisions"]:
        if found := re.match(r"KV cache: .* ([\d,]+) tokens in global layers", line):
            tokens = int(found[1].replace(",", ""))
            return f"{tokens // (record['work']['prompt_tokens'] + record['work']['output_tokens']):,}"
    return f"{max(measured)} or more" if measured else "-"


def _w1_row(name: str, record: dict[str, Any]) -> list[str]:
    settings, found = record["settings"], record["measured"]["engine"]
    alone, limit = found["alone"], settings.get("gpu_memory_gb")
    kind, size = settings.get("quantization") or "bf16", settings.get("quantization_group_size")
    steps = [each for each in found["decode"] if each["ms_per_step"] is not None]
    single = next((each["ms_per_step"] for each in steps if each["batch"] == 1), None)
    throughput = statistics.median(turn["requests_per_s"] for turn in found["throughput"])
    return [
        f"int4, groups of {size or 128}" if kind == "int4" else kind,
        str(settings.get("tensor_parallel_size", 1)),
        "-" if limit is None else f"{limit:g}",
        f"{record['model']['weight_bytes'] / 1e9:.1f}",
        f"{throughput:.2f}",
        f"{statistics.median(alone['ttft_ms']['all']):.0f}",
        f"{statistics.median(alone['e2e_ms']['all']):,.0f}",
        "-" if single is None else f"{single:.1f}",
        _at_once(record, [each["batch"] for each in steps]),
        f"`{name}.json`",
    ]
