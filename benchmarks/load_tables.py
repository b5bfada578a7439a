"""Tables about the load generator, from its records: the cross-check with guidellm, and replicas under load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import days, table
from panscan.analysis.levels import level_names
from panscan.records.load_runs import block_size, in_blocks, load_settings
from panscan.records.metrics import Metrics, metrics_of, window_seconds
from panscan.records.store import Run, read_run
from panscan.report.charts import attainment
from panscan.report.load import LoadReport
from panscan.report.table import measured

RECORDS = Path(__file__).parent / "records"


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return record


def _where(record: dict[str, Any], name: str, options: str = "") -> str:
    facts = record["environment"]
    return (
        f"{facts['cpu']}, {facts['cpu_count']} cores for the server and the client. Record:"
        f" `benchmarks/records/{name.replace('_', '-')}.json`. Command: `python -m benchmarks.{name}{options}`"
    )


def load_crosscheck() -> str:
    """Return the table of the same loads as measured by ``panscan load`` and by guidellm."""
    record = _record("load-crosscheck")
    rows = []
    for comparison in record["loads"].values():
        load, medians, ratios = comparison["load"], comparison["medians"], comparison["ratios"]
        ours, theirs = medians["panscan"], medians["guidellm"]
        shape = f"{load['rate']:g} req/s" if load["rate"] else f"{load['concurrency']} in flight"
        fake = f"fake, TTFT {load['ttft_ms']:g} ms, TPOT {load['itl_ms']:g} ms"
        rows.append(
            [
                fake if load["server"] == "fake" else "panscan serve, mini",
                shape,
                str(load["requests"]),
                f"{ours['requests_per_s']:.2f}",
                f"{theirs['requests_per_s']:.2f}",
                f"{100 * (ratios['requests_per_s'] - 1):+.1f}%",
                f"{ours['ttft_ms']:.1f}",
                f"{theirs['ttft_ms']:.1f}",
                f"{100 * (ratios['ttft_ms'] - 1):+.1f}%",
                f"{ours['tpot_ms']:.2f}",
                f"{theirs['tpot_ms']:.2f}",
            ]
        )
    headings = [
        "server",
        "load",
        "requests",
        "req/s",
        "guidellm",
        "difference",
        "TTFT ms",
        "guidellm",
        "difference",
        "TPOT ms",
        "guidellm",
    ]
    rounds = len(next(iter(record["loads"].values()))["rounds"]["panscan"])
    notes = (
        f"Medians; median of {rounds} rounds in which the clients take turns. guidellm {record['guidellm']},"
        f" {record['tokens']} output tokens, one document per request; "
        + _where(record, "load_crosscheck", " --guidellm PROGRAM")
    )
    return table(headings, rows) + "\n\n" + notes


def load_mixed() -> str:
    """Return the table of a 27B model on one GPU under mixed documents that arrive over time.

    Servers: panscan with its TPOT target and without, and vLLM.

    Raises:
        ValueError: the servers did not get the same requests at the same times.
    """
    sides = {"panscan": "panscan", "panscan, no TPOT target": "unpaced", "vLLM": "vllm"}
    runs = {name: read_run(RECORDS / f"w3-27b-{side}") for name, side in sides.items()}
    first = runs["panscan"]
    if len({_workload(run) for run in runs.values()}) > 1:
        raise ValueError("the runs of W3 had different workloads: measure them again")
    reports = {name: LoadReport(run) for name, run in runs.items()}
    rows = [
        [f"{recorded.settings['request_rate']:g}", name, *_mixed_row(run, cell, reports[name])]
        for cell, recorded in first.cells.items()
        for name, run in runs.items()
    ]
    headings = [
        "offered req/s",
        "server",
        "req/s",
        "TTFT ms",
        "TTFT p95",
        "TPOT ms",
        "TPOT p95",
        "TPOT p99",
        "E2E ms",
        "E2E p95",
        "within the limits",
    ]
    facts, load = first.header.machine, load_settings(first)
    seconds = [repeat.ended - repeat.started for run in runs.values() for repeat in run.repeats.values()]
    packages = facts.packages
    best = reports["panscan"]
    notes = (
        f"**panscan: {best.headline}** (offered), {_answered(best)} req/s answered. {load.num_prompts} requests per"
        f" rate, the same ones at the same times for all servers: {min(seconds):.0f} to {max(seconds):.0f} s a level,"
        f" of which ramp and drain are part. vLLM 0.26 with exact attention, CUDA graphs of its image encoder and four"
        f" API servers. {load.model}, {facts.gpus[0].name}, {facts.torch_threads} cores for each server and its client,"
        f" torch {packages['torch']}, transformers"
        f" {packages['transformers']}, {days(run.header.created for run in runs.values())}; ~ has too few samples for"
        " 99% confidence. Records: `benchmarks/records/w3-27b-panscan`, `w3-27b-unpaced`, `w3-27b-vllm`."
        " Command: `benchmarks/h200_w3.sh`"
    )
    return table(headings, rows) + "\n\n" + notes


def _workload(run: Run) -> tuple[str, str]:
    """Return what makes the loads of two runs equal, apart from pixels that keep images out of caches."""
    kept = {name: getattr(load_settings(run), name) for name in ("arrival", "seed", "num_prompts", "num_warmups")}
    return str(run.header.settings.workload_sha256), repr((kept, run.cells))


def _whole_level(run: Run, cell: str) -> Metrics | None:
    """Return the metrics of a level with its ramp and drain: levels of half a minute are little more."""
    repeats = run.repeats_of(cell)
    sizes = [block_size(requests, window_seconds(window)) for window, requests in repeats]
    blocks = [(window, in_blocks(requests, size)) for (window, requests), size in zip(repeats, sizes, strict=True)]
    return metrics_of(blocks, blocks=True)


def _answered(report: LoadReport) -> str:
    metrics = report.best and _whole_level(report.run, report.best.cell)
    return measured(metrics or None, "request_throughput").text


def _mixed_row(run: Run, cell: str, report: LoadReport) -> list[str]:
    [level] = [level for level in report.rows if level.name == level_names(run)[cell]]
    e2e = [1e3 * ((request.stamps.end or 0.0) - request.stamps.accepted) for request in run.requests[cell, 0]]
    level = replace(level, metrics=_whole_level(run, cell))
    metrics = ["request_throughput", *(f"{name}_ttft_ms" for name in ("median", "p95"))]
    metrics += [f"{name}_tpot_ms" for name in ("median", "p95", "p99")]
    return [
        *(measured(level.metrics, metric).text for metric in metrics),
        *(f"{np.percentile(e2e, q):,.0f}" for q in (50, 95)),
        f"{attainment(level).text}%",
    ]


def load_generator() -> str:
    """Return the table of what the load generator sustains, and what it adds to latencies."""
    record = _record("load-generator")
    rows = [
        [
            f"{level['rate']:,.0f}",
            f"{level['sent_per_s']:,.0f}",
            f"{level['answered_per_s']:,.0f}",
            str(level["requests"] - level["answered"]),
            f"{level['added_ttft_ms']['median']:.2f}",
            f"{level['added_ttft_ms']['p99']:.2f}",
        ]
        for name in ("sustained", "added_latency")
        for level in record[name]["rounds"]
    ]
    headings = ["offered req/s", "sent/s", "answered/s", "failed", "added TTFT ms", "added TTFT p99"]
    notes = (
        "Rounds of a short stream each, against a server with a set latency; two client processes at the higher rate. "
        + _where(record, "load_generator")
    )
    return table(headings, rows) + "\n\n" + notes


def level_row(level: dict[str, Any]) -> list[str]:
    """Return a row of :data:`LEVEL_HEADINGS` for the figures of a level."""

    def milliseconds(name: str, digits: int = 0) -> str:
        return "-" if level[name] is None else f"{level[name]:.{digits}f}"

    return [
        f"{level['offered_rate']:g}",
        f"{level['request_throughput'] or 0:.2f}",
        milliseconds("median_ttft_ms"),
        milliseconds("p95_ttft_ms"),
        milliseconds("median_tpot_ms", 1),
        milliseconds("p95_e2el_ms"),
        f"{100 * level['attainment']:.0f}%",
        f"{level['failed']:.0f}",
    ]


LEVEL_HEADINGS = [
    "offered req/s",
    "req/s",
    "TTFT ms",
    "TTFT p95",
    "TPOT ms",
    "E2E p95 ms",
    "within the limits",
    "failed",
]


def load_replicas() -> str:
    """Return the table of latency over throughput of two replicas."""
    record = _record("load-replicas")
    limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in record["limits_ms"].items())
    server, highest = record["server"], record["highest_rate"]
    best = "none" if highest["rate"] is None else f"{highest['rate']:g} req/s"
    notes = (
        f"Highest rate at which 95% of the requests meet the limits ({limits}): **{best}**, found in"
        f" {len(highest['levels'])} levels. {server['replicas']} replicas of the mini model,"
        f" {server['tokens']} output tokens; {_where(record, 'load_replicas')}"
    )
    return table(LEVEL_HEADINGS, [level_row(level) for level in record["curve"]]) + "\n\n" + notes


def load_kills() -> str:
    """Return the table of levels during which a replica is killed."""
    rows = []
    for level in _record("load-replicas")["kills"]:
        rows.append([f"{level['rate']:g} req/s", "undisturbed", *_counts(level["undisturbed"]), "-"])
        for name, phase in level["phases"].items():
            recovered = level["recovered_s"] if name == "during" else None
            recovery = "-" if recovered is None else f"{recovered:g}"
            rows.append(["", _PHASES[name], *_counts(phase), recovery])
    headings = ["rate", "requests due", "sent", "failed", "within the limits", "TTFT ms", "TTFT p95", "recovery, s"]
    return table(headings, rows)


_PHASES = {"before": "before the kill", "during": "until both replicas answer", "after": "after the recovery"}


def _counts(figures: dict[str, Any]) -> list[str]:
    if not figures["sent"]:
        return ["0", "-", "-", "-", "-"]
    times = ["-" if figures[name] is None else f"{figures[name]:.0f}" for name in ("median_ttft_ms", "p95_ttft_ms")]
    return [f"{figures['sent']:.0f}", f"{figures['failed']:.0f}", f"{100 * figures['attainment']:.0f}%", *times]
