"""Tables about the server, from its records: HTTP compared with the engine, replicas, faults, fuzzing."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

RECORDS = Path(__file__).parent / "records"
_FAULTS = {
    "kill_replica": "`kill -9` of a replica",
    "kill_rank": "`kill -9` of a rank",
    "hang_replica": "a replica that hangs (SIGSTOP)",
    "full_queue": "full queue, clients do not retry",
    "many_clients": "500 clients at once, clients retry",
    "slow_readers": "clients that read slowly",
    "sigterm_under_load": "SIGTERM under load",
    "restart_head": "`kill -9` of the server and restart, clients retry",
}


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return record


def _where(record: dict[str, Any], name: str) -> str:
    facts = record["environment"]
    gpus = (
        f"{len(facts['gpus'])} x {facts['gpus'][0]['name']}, " if record["model"]["device"].startswith("cuda") else ""
    )
    packages = facts["packages"]
    return (
        f"{gpus}{facts['cpu']}, {facts['cpu_count']} cores, torch {packages['torch']}, transformers"
        f" {packages['transformers']}, {record['created'][:10]}. Record: `benchmarks/records/{name}.json`. Command:"
        f" `{record['command']}`"
    )


def client_outcomes() -> str:
    """Return the table of tests/clients: what passed by client, and in short why tests are excused."""
    record = _record("clients")
    rows = []
    for outcome in record["clients"].values():
        reasons = Counter(re.split("[.:;]", reason)[0] for reason in outcome["excused"].values())
        rows.append(
            [
                ", ".join(f"{package} {version}" for package, version in outcome["versions"].items()),
                *(str(outcome["passed"]), str(len(outcome["failed"])), str(len(outcome["excused"]))),
                "; ".join(f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.items()) or "-",
            ]
        )
    return (
        table(["client", "passed", "failed", "excused", "why excused"], rows, (0, 4))
        + "\n\n"
        + _where(record, "clients")
    )


def serving_over_http() -> str:
    """Return the table that compares the server with direct calls of the engine."""
    rows, notes = [], []
    for name in ("serving-27b", "serving-mini"):
        record = _record(name)
        engine, server, work = record["engine"], record["server"], record["work"]
        rates = [side["requests_per_s"]["median"] for side in (engine, server)]
        ttft = [side["ttft_ms"]["median"] for side in (engine, server)]
        rows.append(
            [
                record["model"]["name"],
                str(record["max_concurrency"]),
                f"{rates[0]:.2f}",
                f"{rates[1]:.2f}",
                f"{rates[1] / rates[0]:.3f}x",
                f"{ttft[0]:.0f}",
                f"{ttft[1] - ttft[0]:+.1f}",
                f"{server['health']['p99_ms']:.1f}",
                "yes" if record["same_texts"] else "no",
            ]
        )
        notes.append(
            f"{record['model']['name']}: {work['requests']} requests of {work['views']} views and"
            f" {work['output_tokens']} output tokens, bodies of {server['body_mb']:.2f} MB, {_where(record, name)}"
        )
    headings = [
        "model",
        "in flight",
        "engine req/s",
        "server req/s",
        "ratio",
        "engine TTFT ms",
        "added TTFT ms",
        "/health p99 ms",
        "same answers",
    ]
    return table(headings, rows) + "\n\n" + "\n\n".join(notes)


def serving_replicas() -> str:
    """Return the table that compares two replicas with one, and cache hits by routing policy."""
    record = _record("replicas-4b")
    speed = {count: figures["requests_per_s"]["median"] for count, figures in record["throughput"].items()}
    hits = record["cache_hits"]
    labels = {"1": "1 replica", "2": "2 replicas", "1, its share": "1 replica, half of the requests"}
    rows = [[f"{labels[name]}, distinct documents", f"{rate:.1f}", "-"] for name, rate in speed.items()]
    names = {"one engine": "one engine", "affinity": "2 replicas, affinity", "random": "2 replicas, random routing"}
    rows += [
        [
            f"{names[name]}, follow-up questions",
            f"{hits[name]['requests_per_s']:.1f}",
            f"{100 * hits[name]['cached_share']:.0f}%",
        ]
        for name in names
    ]
    work = record["work"]
    follow_ups = record["follow_ups"]
    notes = (
        f"{record['model']['name']}: {work['requests']} requests of {work['views']} views and"
        f" {work['output_tokens']} output tokens, all at once; {follow_ups['requests']} questions, four about each"
        f" document, {follow_ups['max_concurrency']} in flight, 16 output tokens; {_where(record, 'replicas-4b')}"
    )
    return table(["", "req/s", "cached prompt tokens"], rows) + "\n\n" + notes


def batch_replicas() -> str:
    """Return the table of ``panscan batch`` in one process, on one replica and on two, on a CPU."""
    record = json.loads((RECORDS / "batch-replicas.json").read_text("utf-8"))
    labels = {"engine": "one process", "1": "1 replica", "2": "2 replicas"}
    rows = []
    for layout, runs in record["runs"].items():
        ratios = record["ratios"].get(layout)
        ratio = "-" if ratios is None else f"{statistics.median(ratios):.2f}x"
        seconds = statistics.median(run["seconds"] for run in runs)
        driver = statistics.median(run["driver_cpu_s"] for run in runs)
        parts = ("driver_cpu_s", "replicas_cpu_s", "ray_cpu_s")
        cores = statistics.median(sum(run[part] for part in parts) / run["seconds"] for run in runs)
        rows.append([labels[layout], f"{record['pages'] / seconds:.2f}", f"{driver:.1f}", f"{cores:.2f}", ratio])
    facts, packages = record["environment"], record["environment"]["packages"]
    notes = (
        f"{record['settings']['model']} model, {record['pages']} pages, one thread per engine, median of"
        f" {len(record['runs']['2'])} rounds; {facts['cpu']}, {facts['cpu_count']} cores, torch {packages['torch']},"
        f" transformers {packages['transformers']}, {record['created'][:10]}. Record:"
        f" `benchmarks/records/batch-replicas.json`. Command: `{record['command']}`. Busy cores: CPU time of all"
        " processes over the time; two replicas cannot double what one does on more than one of two cores."
    )
    return table(["", "pages/s", "driver CPU s", "busy cores", "2 replicas against this"], rows) + "\n\n" + notes


def serving_routing() -> str:
    """Return the table of cache hits of follow-up questions by routing policy, on CPUs."""
    record = _record("replicas-mini")
    hits, follow_ups = record["cache_hits"], record["follow_ups"]
    one = hits["one engine"]["cached_share"]
    names = {"one engine": "one engine", "affinity": "2 replicas, affinity", "random": "2 replicas, random routing"}
    rows = [
        [label, f"{100 * hits[name]['cached_share']:.1f}%", f"{hits[name]['cached_share'] / one:.3f}x"]
        for name, label in names.items()
    ]
    notes = (
        f"{record['model']['name']} on a CPU: {follow_ups['requests']} questions, four about each document,"
        f" {follow_ups['max_concurrency']} in flight; {_where(record, 'replicas-mini')}"
    )
    return table(["follow-up questions", "cached prompt tokens", "times one engine"], rows) + "\n\n" + notes


_FAULT_HEADINGS = [
    "fault",
    "sent",
    "answered",
    "retried",
    "refused (429)",
    "failed (error event)",
    "lost",
    "recovery, s",
    "p99 before, s",
    "p99 after, s",
]


def _fault_rows(faults: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a row for each fault of a record: how the requests ended."""
    rows = []
    for name, label in _FAULTS.items():
        if (outcome := faults.get(name)) is None:
            continue

        def count(*kinds: str, outcome: dict[str, Any] = outcome) -> str:
            ends = tuple(f"_{kind}" for kind in kinds)
            return f"{sum(value for key, value in outcome.items() if key.endswith(ends)):,}"

        answered = count("answered") if name != "restart_head" else f"{outcome['plain_answered']:,}"
        rows.append(
            [
                label,
                f"{outcome['sent']:,}",
                answered,
                str(outcome.get("retried", "-")),
                count("refused"),
                count("failed"),
                count("lost"),
                _seconds(outcome.get("recovered_s")),
                _seconds(outcome.get("before", {}).get("p99_s")),
                _seconds(outcome.get("after", {}).get("p99_s")),
            ]
        )
    return rows


def serving_faults() -> str:
    """Return the table of requests answered, retried, refused, failed and lost under each fault."""
    record = _record("serve-faults")
    server, facts = record["server"], record["environment"]
    notes = (
        f"{server['replicas']} replicas of the mini model on a CPU, streaming and non-streaming requests;"
        f" {facts['cpu']}, {facts['cpu_count']} cores that both replicas, Ray and the clients share. Record:"
        " `benchmarks/records/serve-faults.json`. Command: `python -m benchmarks.faults`"
    )
    return table(_FAULT_HEADINGS, _fault_rows(record["faults"])) + "\n\n" + notes


def rank_faults() -> str:
    """Return the tables of kills in layouts of several replicas and ranks: the records of benchmarks/many_gpus.py."""
    parts = []
    for path in sorted(RECORDS.glob("faults-*.json")):
        record = json.loads(path.read_bytes())
        facts, size = record["environment"], record["settings"].get("tensor_parallel_size", 1)
        shape = record["settings"].get("model_shape") or record["settings"].get("model")
        where = facts["gpus"][0]["name"] if facts["gpus"] else f"{facts['cpu']}, {facts['cpu_count']} cores"
        notes = (
            f"{record['replicas']} replicas of {size} ranks, {shape}, on {where}; {record['created'][:10]}. Record:"
            f" `benchmarks/records/{path.name}`. Command: `{record['command']}`"
        )
        parts.append(table(_FAULT_HEADINGS, _fault_rows(record["faults"])) + "\n\n" + notes)
    return "\n\n".join(parts)


def serving_fuzz() -> str:
    """Return the table of hostile requests by kind and status."""
    record = _record("serve-fuzz")
    statuses = sorted({status for counts in record["statuses"].values() for status in counts})
    rows = [
        [kind, *(f"{counts.get(status, 0):,}" for status in statuses)] for kind, counts in record["statuses"].items()
    ]
    facts = record["environment"]
    growth = ", ".join(f"{name} {value:.0f} MB" for name, value in record["growth_mb"].items())
    notes = (
        f"{record['cases']:,} requests in {record['seconds']:,} s, the slowest {record['slowest_s']:.1f} s;"
        f" {len(record['failures'])} failures, {record['wrong_answers']} wrong answers to good requests in between;"
        f" growth of memory: {growth}. {facts['cpu']}, {facts['cpu_count']} cores. Record:"
        f" `benchmarks/records/serve-fuzz.json`. Command: `{shlex.join(record['command'])}`"
    )
    return table(["inputs", *statuses], rows) + "\n\n" + notes


def serving_pressure() -> str:
    """Return the table of good requests beside expensive ones, and how requests ended while processes were killed."""
    record = _record("serve-fuzz")
    pressure = record["pressure"]
    rows = []
    for name, part in pressure.items():
        if "ratio" in part:
            statuses = ", ".join(f"{count:,} x {status}" for status, count in part["statuses"].items())
            without, beside = (f"{1e3 * part[side]['p99_s']:.0f}" for side in ("without", "good"))
            answered = f"{part['good']['answered']:,}"
            rows.append([name.replace("_", " "), statuses, answered, without, beside, f"{part['ratio']:.1f}"])
    kills = []
    for name in ("engine_kills", "decoder_kills", "server_kills"):
        part = pressure[name]
        ends = [f"{part[key]:,} {key.replace('_', ' ')}" for key in part if key.startswith(("plain", "stream", "page"))]
        kills.append(f"{part['kills']} {name.replace('_', ' ')}: {', '.join(ends)}")
    peaks = ", ".join(f"{name} {peak:,} MB" for name, peak in pressure["memory"]["peak_mb"].items())
    facts = record["environment"]
    problems = [problem for part in pressure.values() for problem in part["problems"]]
    failed = f"Failed: {'; '.join(problems)}." if problems else "Nothing failed."
    notes = (
        f"{'; '.join(kills)}. Peak memory of a process: {peaks}. {failed}"
        f" {facts['cpu']}, {facts['cpu_count']} cores, which clients, attackers and server share. Record:"
        f" `benchmarks/records/serve-fuzz.json`. Command: `{shlex.join(record['command'])}`"
    )
    headings = [
        "expensive requests",
        "responses",
        "good requests answered",
        "p99 before, ms",
        "p99 beside, ms",
        "ratio",
    ]
    return table(headings, rows) + "\n\n" + notes


def decoding_pool() -> str:
    """Return the table of what a decoding process costs a page, and of PDF pages with one and two processes."""
    record = _record("decoding-pool")
    rows = []
    for kind in ("png", "jpeg"):
        page = record[kind]
        low, high = page["extra_ms_quartiles"]
        rows.append(
            [
                f"one {kind.upper()} page, ms",
                f"{page['here_ms']:.1f}",
                f"{page['child_ms']:.1f}",
                f"{page['extra_ms']:+.1f} ms (quartiles {low:+.1f} to {high:+.1f})",
            ]
        )
    pdf = record["pdf"]
    one, two = (min(pdf[key]) for key in ("one_child_s", "two_children_s"))
    speedups = f"{pdf['speedup']:.2f}x ({min(pdf['speedups']):.2f} to {max(pdf['speedups']):.2f})"
    rows.append([f"{pdf['pages']} PDF pages, s: one and two children", f"{one:.2f}", f"{two:.2f}", speedups])
    facts = record["environment"]
    width, height = record["size"]
    notes = (
        f"Pages of {width} x {height} pixels, from bytes to pixels; medians of interleaved pages, and the fastest of"
        f" {len(pdf['speedups'])} rounds. {facts['cpu']}, {facts['cpu_count']} cores. Record:"
        f" `benchmarks/records/decoding-pool.json`. Command: `{record['command']}`"
    )
    return table(["", "this process", "child process", "difference"], rows) + "\n\n" + notes


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
