"""Tables about the load generator, from its records: the cross-check with guidellm, and replicas under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from panscan.records.store import read_run
from panscan.report.load_data import load_report_of

__all__ = ["load_crosscheck", "load_generator", "load_kills", "load_mixed", "load_replicas"]

RECORDS = Path(__file__).parent / "records"


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return found


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
    for found in record["loads"].values():
        load, medians, ratios = found["load"], found["medians"], found["ratios"]
        ours, theirs = medians["panscan"], medians["guidellm"]
        shape = f"{load['rate']:g} req/s" if load["rate"] else f"{load['concurrency']} in flight"
        fake = f"fake, TTFT {load['ttft_ms']:g} ms, TPOT {load['itl_ms']:g} ms"
        rows.append(
            [
                fake if load["server"] == "fake" else "panscan serve, mini", shape, str(load["requests"]),
                f"{ours['requests_per_s']:.2f}", f"{theirs['requests_per_s']:.2f}",
                f"{100 * (ratios['requests_per_s'] - 1):+.1f}%",
                f"{ours['ttft_ms']:.1f}", f"{theirs['ttft_ms']:.1f}", f"{100 * (ratios['ttft_ms'] - 1):+.1f}%",
                f"{ours['tpot_ms']:.2f}", f"{theirs['tpot_ms']:.2f}",
            ]
        )  # fmt: skip
    headings = [
        "server", "load", "requests", "req/s", "guidellm", "difference", "TTFT ms", "guidellm", "difference", "TPOT ms",
        "guidellm",
    ]  # fmt: skip
    rounds = len(next(iter(record["loads"].values()))["rounds"]["panscan"])
    notes = (
        f"Medians; median of {rounds} rounds in which the clients take turns. guidellm {record['guidellm']},"
        f" {record['tokens']} output tokens, one document per request; "
        + _where(record, "load_crosscheck", " --guidellm PROGRAM")
    )
    return table(headings, rows) + "\n\n" + notes


def load_mixed() -> str:
    """Return the table of a 27B model on one GPU under mixed documents that arrive over time."""
    run = read_run(RECORDS / "load-27b")
    report = load_report_of(run)
    median, p95 = report.percentiles.index("median"), report.percentiles.index("p95")
    rows = [
        [
            row.offered.text, row.achieved.text, row.output.text, row.times["ttft"][median].text,
            row.times["ttft"][p95].text, row.times["tpot"][median].text, row.times["tpot"][p95].text,
            row.times["e2el"][p95].text, f"{row.attainment.text}%", str(row.failed),
        ]
        for row in report.rows
    ]  # fmt: skip
    headings = [
        "offered req/s", "req/s", "tokens/s", "TTFT ms", "TTFT p95", "TPOT ms", "TPOT p95", "E2E p95 ms",
        "within the limits", "failed",
    ]  # fmt: skip
    facts, kept = run.header["environment"], run.header["settings"]["load"]
    notes = (
        f"**{report.result.headline}.** {kept['model']}, {len(facts['gpus'])} x {facts['gpus'][0]['name']},"
        f" {facts['cpu_count']} cores for the server and the client, torch {facts['packages']['torch']}, transformers"
        f" {facts['packages']['transformers']}, {run.header['created'][:10]};"
        " ~ has too few samples for 99% confidence. Record: `benchmarks/records/load-27b`."
        f" Command: `{' '.join(run.header['command'])}`"
    )
    return table(headings, rows) + "\n\n" + notes


def load_generator() -> str:
    """Return the table of what the load generator sustains, and what it adds to latencies."""
    record = _record("load-generator")
    rows = [
        [f"{found['rate']:,.0f}", f"{found['sent_per_s']:,.0f}", f"{found['answered_per_s']:,.0f}",
         str(found["requests"] - found["answered"]), f"{found['added_ttft_ms']['median']:.2f}",
         f"{found['added_ttft_ms']['p99']:.2f}"]
        for name in ("sustained", "added_latency") for found in record[name]["rounds"]
    ]  # fmt: skip
    headings = ["offered req/s", "sent/s", "answered/s", "failed", "added TTFT ms", "added TTFT p99"]
    notes = (
        "Rounds of a short stream each, against a server with a set latency; two client processes at the higher rate. "
        + _where(record, "load_generator")
    )
    return table(headings, rows) + "\n\n" + notes


def _level(found: dict[str, Any]) -> list[str]:
    def milliseconds(name: str, digits: int = 0) -> str:
        return "-" if found[name] is None else f"{found[name]:.{digits}f}"

    return [
        f"{found['offered_rate']:g}", f"{found['request_throughput'] or 0:.2f}", milliseconds("median_ttft_ms"),
        milliseconds("p95_ttft_ms"), milliseconds("median_tpot_ms", 1), milliseconds("p95_e2el_ms"),
        f"{100 * found['attainment']:.0f}%", f"{found['failed']:.0f}",
    ]  # fmt: skip


_LEVEL = ["offered req/s", "req/s", "TTFT ms", "TTFT p95", "TPOT ms", "E2E p95 ms", "within the limits", "failed"]


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
    return table(_LEVEL, [_level(found) for found in record["curve"]]) + "\n\n" + notes


def load_kills() -> str:
    """Return the table of levels during which a replica is killed."""
    rows = []
    for found in _record("load-replicas")["kills"]:
        rows.append([f"{found['rate']:g} req/s", "undisturbed", *_counts(found["undisturbed"]), "-"])
        for name, phase in found["phases"].items():
            recovered = found["recovered_s"] if name == "during" else None
            recovery = "-" if recovered is None else f"{recovered:g}"
            rows.append(["", _PHASES[name], *_counts(phase), recovery])
    headings = ["rate", "requests due", "sent", "failed", "within the limits", "TTFT ms", "TTFT p95", "recovery, s"]
    return table(headings, rows)


_PHASES = {"before": "before the kill", "during": "until both replicas answer", "after": "after the recovery"}


def _counts(found: dict[str, Any]) -> list[str]:
    if not found["sent"]:
        return ["0", "-", "-", "-", "-"]
    times = ["-" if found[name] is None else f"{found[name]:.0f}" for name in ("median_ttft_ms", "p95_ttft_ms")]
    return [f"{found['sent']:.0f}", f"{found['failed']:.0f}", f"{100 * found['attainment']:.0f}%", *times]
