"""Tables of the workloads' records, W1, W2 and W4: the engine beside the floor."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import number, ranged, table

__all__ = ["distinct_documents", "questions"]


def distinct_documents(record: Mapping[str, Any], name: str) -> str:
    """Return the table of a record of W1 or W4: each figure, its floor on this machine, and the ratio of both."""
    found, floor = record["measured"]["engine"], record["floor"]["engine"]
    alone, seen = found["alone"], found["vision"][-1]
    figures = [
        ("requests/s, all at once", [turn["requests_per_s"] for turn in found["throughput"]], 2, "requests_per_s"),
        ("TTFT of one request alone, ms", alone["ttft_ms"]["all"], 0, "ttft_ms"),
        ("end to end, one request alone, ms", alone["e2e_ms"]["all"], 0, "e2e_ms"),
        *(
            (f"decode step of {each['batch']}, ms", [each["ms_per_step"]], 1, f"step_ms_{each['batch']}")
            for each in found["decode"]
            if each["ms_per_step"] is not None  # fewer fit in the cache at once
        ),
        (f"vision, ms per view, {seen['views']} at once", seen["ms_per_view"]["all"], 1, "vision_ms_per_view"),
    ]
    rows = [
        [what, ranged(values, digits), number(floor[key], digits), number(found["ratios"][key], 2) + "x"]
        for what, values, digits, key in figures
    ]
    rows += [
        [f"GPU idle in decode steps of {each['batch']}", f"{number(100 * each['idle']['share'], 1)}%", "-", "-"]
        for each in found["decode"]
        if each["idle"] and each["idle"]["share"] is not None
    ]
    if joules := joules_of(found["throughput"]):
        rows.append(["joules per request, all at once", ranged(joules, 0), "-", "-"])
    if alone.get("joules_per_request") is not None:
        rows.append(["joules of one request alone", number(alone["joules_per_request"], 0), "-", "-"])
    peak = max(turn["peak_reserved_bytes"] for turn in found["throughput"])
    gpus = record["settings"].get("tensor_parallel_size", 1)
    rows.append(["peak memory per GPU, GB", number(peak / gpus / 1e9, 1), "-", "-"])
    return table(["", "engine", "floor", "times floor"], rows) + "\n\n" + _machine(record, name)


def questions(record: Mapping[str, Any], name: str) -> str:
    """Return the table of a record of W2: four questions about each page."""
    found = record["measured"]["engine"]
    names = {"image_major": "page after page", "round_robin": "in rounds over the pages", "all_cached": "all known"}
    follow = found["follow_up"]
    share = follow["cached_tokens"] / record["work"]["prompt_tokens"]
    rows = [
        [
            f"requests/s, {what}",
            ranged([turn["requests_per_s"] for turn in found[key]], 2),
            f"{number(100 * statistics.median(turn['cached_share'] for turn in found[key]), 0)}%",
        ]
        for key, what in names.items()
    ]
    rows.append(
        ["TTFT of a question on a known page, ms", ranged(follow["ttft_ms"]["all"], 0), f"{number(100 * share, 0)}%"]
    )
    headings = ["", "engine", "of the prompt cached"]
    if joules := [joules_of(found[key]) for key in names if joules_of(found[key])]:
        headings.append("joules per request")
        rows = [
            [*cells, energy] for cells, energy in zip(rows, [*(ranged(each, 0) for each in joules), "-"], strict=True)
        ]
    return table(headings, rows) + "\n\n" + _machine(record, name)


def joules_of(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the joules per request of each turn; none in records from before energy was measured."""
    return [turn["joules_per_request"] for turn in turns if turn.get("joules_per_request") is not None]


def _machine(record: Mapping[str, Any], name: str) -> str:
    """Return one line on model, verdict, hardware, power, versions and command of a workload's record."""
    facts, work = record["environment"], record["work"]
    gpus = record["settings"].get("tensor_parallel_size", 1)
    turns = next(iter(record["measured"]["engine"].values()))
    watts = statistics.median(turn["power"]["mean_w"] for turn in turns)
    clock = statistics.median(turn["power"]["median_sm_mhz"] for turn in turns)
    packages = facts["packages"]
    return (
        f"{record['model']['name']}, {record['model']['dtype']}: {_verdict(record)};"
        f" {work['requests']} requests of {work['views']} views,"
        f" {work['prompt_tokens']:,} prompt and {work['output_tokens']} output tokens, {work['repeats']} turn(s);"
        f" {gpus} x {facts['gpus'][0]['name']} at {number(watts, 0)} W and {number(clock, 0)} MHz (driver"
        f" {facts['gpus'][0]['driver']}), {facts['cpu']}, torch {packages['torch']}, transformers"
        f" {packages['transformers']}, triton {packages['triton']}, {record['created'][:10]}. Record:"
        f" `benchmarks/records/{name}.json`. Command: `{record['command']}`"
    )


def _verdict(record: Mapping[str, Any]) -> str:
    """Return the verdict of a workload's record, with its divergence as a multiple of the noise."""
    verdict = record["verdict"]["engine"]
    if verdict is None:
        return "not compared with the reference"
    ratio = max(part["kl"] / part["noise"] for part in (verdict["answer"], verdict["image"]))
    return f"{verdict['verdict']} ({number(ratio, 2)}x the noise)"
