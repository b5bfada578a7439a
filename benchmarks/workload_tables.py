"""Tables of the workloads' records, W1, W2 and W4: the engine beside the limit of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import number, ranged, table
from panscan.core.text import count
from panscan.settings import axes

_NOTE = "For requests/s the limit is a maximum, and the ratio is limit / measured."
_QUANTIZED = " Limits are those of unquantised weights: quantised ones have lower latencies and higher throughput."


def distinct_documents(record: Mapping[str, Any], name: str) -> str:
    """Return the table of a record of W1 or W4: each figure, its limit on this machine, and the ratio of both.

    Brief records measure neither decode steps nor the vision tower.
    """
    rows = [*_limited(record), *_unlimited(record)]
    turns = record["measured"]["engine"]["throughput"]
    note = _NOTE + (_QUANTIZED if record["settings"].get("quantization") else "")
    return table(["", "engine", "limit", "ratio"], rows) + f"\n\n{note} " + _machine(record, name, turns)


_KINDS = {
    "greedy": "greedy",
    "temperature": "temperature 1",
    "gemma_defaults": "Gemma 3's defaults: temperature 1, `top_k` 64, `top_p` 0.95",
    "top_p": "temperature 1, `top_p` 0.95",
    "penalties": "frequency and presence penalty 0.5",
    "logprobs": "5 log-probabilities",
    "json": "every request with a JSON schema, `force_tokens` off",
    "json_forced": "every request with a JSON schema",
    "json_one_in_16": "one request in 16 with a JSON schema",
}


def traffic(record: Mapping[str, Any], name: str) -> str:
    """Return the table of a record of the workload traffic: the throughput of each kind beside the greedy one's."""
    measured = record["measured"]["engine"]
    rows = [
        [words, ranged([turn["requests_per_s"] for turn in measured["turns"][kind]], 2), ranged(ratios["all"], 3) + "x"]
        for kind, words in _KINDS.items()
        if (ratios := measured["ratio_to_greedy"].get(kind))
    ]
    wait = measured["accepted_to_preparing_ms"]
    where = (
        f"From accepted to preparing, while all others decode: {wait['p95']:.1f} ms (p95), {wait['p100']:.1f} ms at"
        f" most. A vocabulary of {record['vocabulary']:,} tokens. {_machine(record, name, measured['turns']['greedy'])}"
    )
    return f"{table(['requests', 'requests/s', 'of greedy'], rows)}\n\n{where}"


def _limited(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of figures with a limit: name, measured, limit, and their ratio."""
    measured, floor = record["measured"]["engine"], record["floor"]["engine"]
    alone, visions = measured["alone"], measured.get("vision", [])[-1:]

    def row(what: str, values: Sequence[float], digits: int, key: str, ratio: float | None = None) -> list[str]:
        ratio = measured["ratios"][key] if ratio is None else ratio
        return [what, ranged(values, digits), number(floor[key], digits), number(ratio, 2) + "x"]

    # The mean stages before the first token, of the requests that were answered whole.
    between = sum(ms for stage, ms in alone["stages_ms"].items() if stage != "decode")
    return [
        row(
            "requests/s, all at once", [turn["requests_per_s"] for turn in measured["throughput"]], 2, "requests_per_s"
        ),
        row("TTFT of one request alone, ms", alone["ttft_ms"]["all"], 0, "ttft_ms"),
        row("mean TTFT between whole answers, ms", [between], 0, "ttft_ms", between / floor["ttft_ms"]),
        row("end to end, one request alone, ms", alone["e2e_ms"]["all"], 0, "e2e_ms"),
        *(
            row(f"decode step of {step['batch']}, ms", [step["ms_per_step"]], 1, f"step_ms_{step['batch']}")
            for step in measured.get("decode", [])
            if step["ms_per_step"] is not None  # fewer fit in the cache at once
        ),
        *(
            row(
                f"vision, ms per view, {vision['views']} at once", vision["ms_per_view"]["all"], 1, "vision_ms_per_view"
            )
            for vision in visions
        ),
    ]


def _unlimited(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of figures without a limit: idle time, energy and memory."""
    measured, rows = record["measured"]["engine"], []
    alone = measured["alone"]
    idle = [step for step in measured.get("decode", []) if step["idle"] and step["idle"]["share"] is not None]
    if idle:
        sizes = ", ".join(str(step["batch"]) for step in idle)
        shares = ", ".join(f"{number(100 * step['idle']['share'], 1)}%" for step in idle)
        rows.append([f"GPU idle in decode steps of {sizes}", shares, "-", "-"])
    if joules := joules_of(measured["throughput"]):
        rows.append(["joules per request, all at once", ranged(joules, 0), "-", "-"])
    if alone.get("joules_per_request") is not None:
        rows.append(["joules of one request alone", number(alone["joules_per_request"], 0), "-", "-"])
    peak = max(turn["peak_reserved_bytes"] for turn in measured["throughput"])
    gpus = record["settings"].get("tensor_parallel_size", 1)
    rows.append([f"memory reserved per GPU, GB ({_memory_limit(record)})", number(peak / gpus / 1e9, 1), "-", "-"])
    return rows


def questions(record: Mapping[str, Any], name: str) -> str:
    """Return the table of a record of W2: four questions about each page."""
    measured = record["measured"]["engine"]
    names = {"image_major": "page by page", "round_robin": "question by question", "all_cached": "all pages cached"}
    follow = measured["follow_up"]
    share = follow["cached_tokens"] / record["work"]["prompt_tokens"]
    rows = [
        [
            f"requests/s, {what}",
            ranged([turn["requests_per_s"] for turn in measured[key]], 2),
            f"{number(100 * statistics.median(turn['cached_share'] for turn in measured[key]), 0)}%",
        ]
        for key, what in names.items()
    ]
    rows.append(
        ["TTFT of a question on a known page, ms", ranged(follow["ttft_ms"]["all"], 0), f"{number(100 * share, 0)}%"]
    )
    headings = ["", "engine", "of the prompt cached"]
    if joules := [joules_of(measured[key]) for key in names if joules_of(measured[key])]:
        headings.append("joules per request")
        rows = [
            [*cells, energy]
            for cells, energy in zip(rows, [*(ranged(values, 0) for values in joules), "-"], strict=True)
        ]
    turns = next(iter(record["measured"]["engine"].values()))
    return table(headings, rows) + "\n\n" + _machine(record, name, turns)


def joules_of(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the joules per request of each turn; none in records from before energy was measured."""
    return [turn["joules_per_request"] for turn in turns if turn.get("joules_per_request") is not None]


def _memory_limit(record: Mapping[str, Any]) -> str:
    """Return the setting that limits the engine's memory: it reserves all of that at startup."""
    name = "gpu_memory_gb" if record["settings"].get("gpu_memory_gb") is not None else "gpu_memory_utilization"
    return f"limit: `--{axes()[name].flag} {record['settings'].get(name, axes()[name].default):g}`"


def _machine(record: Mapping[str, Any], name: str, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return one line on model, verdict, hardware, power, versions and command of a workload's record."""
    facts, work = record["environment"], record["work"]
    gpus = record["settings"].get("tensor_parallel_size", 1)
    watts = statistics.median(turn["power"]["mean_w"] for turn in turns)
    clock = statistics.median(turn["power"]["median_sm_mhz"] for turn in turns)
    packages = facts["packages"]
    return (
        f"{record['model']['name']}, {record['model']['dtype']}: {_verdict(record)};"
        f" {work['requests']} requests of {work['views']} views,"
        f" {work['prompt_tokens']:,} prompt and {work['output_tokens']} output tokens,"
        f" {count(work['repeats'], 'repeat')}; {gpus} x {facts['gpus'][0]['name']} (mean power {number(watts, 0)} W,"
        f" median SM clock {number(clock, 0)} MHz, driver {facts['gpus'][0]['driver']}), {facts['cpu']},"
        f" torch {packages['torch']}, transformers {packages['transformers']}, triton {packages['triton']},"
        f" {record['created'][:10]}. Record: `benchmarks/records/{name}.json`. Command: `{record['command']}`"
    )


def _verdict(record: Mapping[str, Any]) -> str:
    """Return the verdict of a workload's record, with its divergence as a multiple of the noise."""
    verdict = record["verdict"]["engine"]
    if verdict is None:
        return "not compared with the reference"
    ratio = max(part["kl"] / part["noise"] for part in (verdict["answer"], verdict["image"]))
    return f"{verdict['verdict']} ({number(ratio, 2)}x the noise)"
