"""Speed and verdict of the engine, vLLM and ``generate()`` on the same GPUs: README's short table, and the full one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.markdown import days, number, ranged, table, times_text
from benchmarks.readme_chart import speed_chart
from panscan.core.text import count
from panscan.settings import axes

_SIDES = ("engine", "vllm-exact", "generate")
_SHAPES = {"27b": "27B", "4b": "4B", "12b": "12B"}
Measured = Mapping[str, Any]
"""What one process measured."""


def _turns(order: str, figure: str) -> Callable[[Measured], list[float]]:
    return lambda measured: [turn[figure] for turn in measured[order] if turn[figure] is not None]


def _kind_rates(kind: str) -> Callable[[Measured], list[float]]:
    return lambda measured: [turn["requests_per_s"] for turn in measured["turns"][kind]]


def _latencies(group: str, figure: str) -> Callable[[Measured], list[float]]:
    return lambda measured: list(measured[group][figure]["all"])


def _host_ms(measured: Measured) -> list[float]:
    """Return a list with the mean host time before the first pass of one request alone."""
    stages = measured["alone"]["stages_ms"]
    return [stages["load"] + stages["preprocess"]]


_W1: tuple[tuple[str, Callable[[Measured], list[float]], int], ...] = (
    ("requests/s, 128 documents at once{batches}", _turns("throughput", "requests_per_s"), 2),
    ("joules per request", _turns("throughput", "joules_per_request"), 0),
    ("one request alone: TTFT, ms", _latencies("alone", "ttft_ms"), 0),
    ("of which loading and preprocessing, ms", _host_ms, 0),
    ("one request alone: end to end, ms", _latencies("alone", "e2e_ms"), 0),
)
_W2: tuple[tuple[str, Callable[[Measured], list[float]], int], ...] = (
    ("requests/s, four questions per page, page by page", _turns("image_major", "requests_per_s"), 2),
    ("requests/s, four questions per page, question by question", _turns("round_robin", "requests_per_s"), 2),
    ("joules per request, question by question", _turns("round_robin", "joules_per_request"), 0),
    ("TTFT of a question on a known page, ms", _latencies("follow_up", "ttft_ms"), 0),
)
_TRAFFIC: tuple[tuple[str, Callable[[Measured], list[float]], int], ...] = tuple(
    (f"requests/s, 128 documents at once, {what}", _kind_rates(kind), 2)
    for kind, what in (
        ("greedy", "greedy with the whole vocabulary"),
        ("gemma_defaults", "temperature 1, `top_k` 64, `top_p` 0.95"),
        ("json", "JSON schema"),
    )
)
_VERDICTS = (
    " Verdicts come from a saved checkpoint and show the ratio to the rounding noise; vLLM's come from its 20 most"
    " probable tokens at each position."
)
_OPTIONS = "with the options of each part of `python -m benchmarks.vllm_comparison`"
_FIGURES = {"w1-27b": _W1, "w2-27b": _W2, "w4-4b": _W1, "w4-12b": _W1, "traffic-27b": _TRAFFIC, "traffic-4b": _TRAFFIC}


def comparison(record: Mapping[str, Any], name: str = "vllm-comparison") -> str:
    """Return the main message, the table, and how it was measured.

    Args:
        record: of ``benchmarks/vllm_comparison.py --merge``.
        name: of its file.
    """
    sides = _sides(record)
    batch = _batch(record)
    batches = f" (`generate()`: {batch})" if batch else ""
    rows = [_verdict_row(name, verdict_part, sides) for name, verdict_part in record["verdicts"].items()]
    for part, figures in _FIGURES.items():
        if part in record["parts"]:
            shape = _SHAPES[part.partition("-")[2]]
            runs = record["parts"][part]
            rows += [
                _row(f"{shape}: {what.format(batches=batches)}", runs, take, digits, sides)
                for what, take, digits in figures
            ]
    headings = {"engine": "engine", "vllm-exact": "vLLM, TRITON_ATTN (its default)", "generate": "generate()"}
    full_table = table(["", *(headings[side] for side in sides)], rows)
    return "\n\n".join(
        [*_message(record), full_table, f"{_machine(record)} Record: `benchmarks/records/{name}.json`, {_OPTIONS}"]
    )


_SUMMARY: tuple[tuple[str, str, Callable[[Measured], list[float]], int], ...] = (
    ("w1-27b", "27B: distinct documents, requests/s", _turns("throughput", "requests_per_s"), 2),
    ("w2-27b", "27B: four questions per page, requests/s", _turns("image_major", "requests_per_s"), 2),
    ("w1-27b", "27B: one request alone, time to first token, ms", _latencies("alone", "ttft_ms"), 0),
    ("w1-27b", "27B: one request alone, end to end, ms", _latencies("alone", "e2e_ms"), 0),
    ("w4-4b", "4B: distinct documents, requests/s", _turns("throughput", "requests_per_s"), 2),
    ("w4-4b", "4B: one request alone, time to first token, ms", _latencies("alone", "ttft_ms"), 0),
)


def summary(record: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> str:
    """Return the rows that most readers need, with the engine's speed over that of vLLM, and where they are from.

    Args:
        record: of ``benchmarks/vllm_comparison.py --merge``.
        elsewhere: such a record of another GPU.
    """
    rows = []
    for part, what, take, digits in _SUMMARY:
        sides = _summary_sides(record, part, take)
        cells = [ranged(values, digits) if values else "-" for values in sides.values()]
        engine, vllm = sides["engine"], sides["vllm-exact"]
        ratio = times_text(vllm, engine) if what.endswith("ms") else times_text(engine, vllm)
        rows.append([what, *cells[:2], ratio, cells[2]])
    facts = next(iter(record["parts"].values()))[0]["record"]["environment"]
    headings = ["", "engine", f"vLLM {_version(record)}", "engine better by", "`generate()`"]
    notes = (
        f"- One {facts['gpus'][0]['name']}, bfloat16, random weights of Gemma 3's shapes; four views and 128 output"
        " tokens per request. Median of all turns, with their range; a ratio's range is that of all pairs of turns.",
        "- vLLM runs offline, with its own preprocessing on the CPU, which is part of its time to first token and"
        f" limits its throughput with the 4B shape. {_gpu_sentence(record)} `generate()` answers batches of"
        f" {_batch(record)} documents with a {_cache(record)} cache{_with_dynamic_cache(record)}, one turn each, on"
        " another machine with the same GPU model.",
        f"- {_elsewhere_sentence(elsewhere)}"
        " [All rows, energy and verdicts](docs/measured.md#the-engine-vllm-and-generate).",
    )
    return "\n\n".join([table(headings, rows), "\n".join(notes)])


_SMALLER: tuple[tuple[str, str], ...] = (
    ("27B in fp8, one card", "vllm-fp8"),
    ("27B in bf16, two cards limited to 40 GB", "vllm-tp2-40gb"),
)
_SMALLER_FIGURES = (_W1[0], _W1[2], _W1[4])


def smaller(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of 27B in 8 bits and on cards with little memory, beside vLLM on the same cards.

    Args:
        records: of W1 by name, one of the engine and one of vLLM for each name of :data:`_SMALLER`.

    Raises:
        ValueError: the two ran on different cards, or with different requests.
    """
    rows, packages, created = [], dict[str, str](), []
    for what, name in _SMALLER:
        pair = [records[f"{name}-engine"], records[name]]
        if any(pair[0][fact] != pair[1][fact] for fact in ("gpu_uuids", "work")):
            raise ValueError(f"{name}: the engine and vLLM did not run the same requests on the same cards")
        for record in pair:
            packages |= record["environment"]["packages"]
            created.append(record["created"])
        for figure, take, digits in _SMALLER_FIGURES:
            engine, vllm = (take(next(iter(record["measured"].values()))) for record in pair)
            ratio = times_text(vllm, engine) if figure.endswith("ms") else times_text(engine, vllm)
            row = f"{what}: {figure.format(batches='')}"
            rows.append([row, ranged(engine, digits), ranged(vllm, digits), ratio])
    facts, work = pair[0]["environment"], pair[0]["work"]
    notes = (
        f"{work['views']} views, {work['prompt_tokens']:,} prompt and {work['output_tokens']} output tokens per"
        f" request; random weights. Median (range) of {count(work['repeats'], 'turn')} each; one after the other on"
        f" the same cards (by UUID), {facts['gpus'][0]['name']}. vLLM {packages['vllm']} offline with `TRITON_ATTN`,"
        " CUDA graphs for up to 128 requests and for its image encoder. Each quantises to fp8 in its own way; answers"
        f" were not compared. torch {packages['torch']}, transformers {packages['transformers']}, {days(created)}."
        " Records, with their commands:"
        f" {', '.join(f'`benchmarks/records/{name}-engine.json`, `{name}.json`' for _, name in _SMALLER)}"
    )
    return f"{table(['', 'engine', 'vLLM', 'engine better by'], rows)}\n\n{notes}"


def _summary_sides(
    record: Mapping[str, Any], part: str, take: Callable[[Measured], list[float]]
) -> dict[str, list[float]]:
    runs = record["parts"][part]
    return {side: [value for run in runs if run["side"] == side for value in take(_measured(run))] for side in _SIDES}


def chart(record: Mapping[str, Any]) -> str:
    """Return README's chart of the rows of :func:`summary`, but for the times end to end.

    Args:
        record: of ``benchmarks/vllm_comparison.py --merge``.
    """
    rows = [
        ("Requests per second: more is better", "27B\ndistinct\ndocuments", _SUMMARY[0]),
        ("Requests per second: more is better", "27B\nfour questions\nper page", _SUMMARY[1]),
        ("Requests per second: more is better", "4B\ndistinct\ndocuments", _SUMMARY[4]),
        ("Time to first token, ms: less is better", "27B\none request\nalone", _SUMMARY[2]),
        ("Time to first token, ms: less is better", "4B\none request\nalone", _SUMMARY[5]),
    ]
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}
    for title, name, (part, _, take, _) in rows:
        panels.setdefault(title, {})[name] = _summary_sides(record, part, take)
    titles = {
        "engine": "panscan's engine",
        "vllm-exact": f"vLLM {_version(record)}",
        "generate": "generate()",
    }
    return speed_chart(panels, (1, 0), titles)


def _message(record: Mapping[str, Any]) -> list[str]:
    """Return the engine's throughput on distinct documents over that of vLLM on the same GPUs, and what part
    preprocessing has in it."""
    ratios, serial = [], []
    for shape, (engine, vllm) in _distinct_documents(record).items():
        rates = _rates(vllm)
        ratios.append(f"{times_text(_rates(engine), rates)} with {shape}")
        period = 1e3 / statistics.median(rates)
        host = statistics.median(value for run in vllm for value in _host_ms(run))
        if host > 0.8 * period:
            serial.append(
                f"With {shape}, vLLM answers a request every {period:.0f} ms, and its preprocessing on the CPU takes"
                f" {host:.0f} ms of one request alone: the ratio is one of preprocessing more than of the model."
            )
    if not ratios:
        return []
    message = (
        f"128 distinct documents at once: the engine's throughput is {' and '.join(ratios)} that of vLLM"
        f" {_version(record)}'s offline"
    )
    return [f"**{message} `LLM.generate`.**", *serial]


def _elsewhere_sentence(record: Mapping[str, Any]) -> str:
    """Return the ratios of :func:`_message` on another GPU."""
    ratios = [
        f"{times_text(_rates(engine), _rates(vllm))} with {shape}"
        for shape, (engine, vllm) in _distinct_documents(record).items()
    ]
    gpu = next(iter(record["parts"].values()))[0]["record"]["environment"]["gpus"][0]["name"]
    return f"Distinct documents on one {gpu}, with vLLM {_version(record)}: {' and '.join(ratios)}."


def _gpu_sentence(record: Mapping[str, Any]) -> str:
    """Return that each ratio is between figures of one card, if the UUIDs of the records say so."""
    cards = [
        {tuple(run["record"].get("gpu_uuids", ())) for run in runs if run["side"] in _SIDES[:2]}
        for part, runs in record["parts"].items()
        if part in {part for part, *_ in _SUMMARY}
    ]
    if any(len(uuids) > 1 or () in uuids for uuids in cards):
        return ""
    return (
        "Both sides of a ratio ran on the same card (by its UUID), while other jobs used the other cards of the host."
    )


def _distinct_documents(record: Mapping[str, Any]) -> dict[str, tuple[list[Measured], list[Measured]]]:
    """Return what the engine and vLLM measured on the same machine with distinct documents, by shape."""
    shapes = {}
    for part in record["parts"]:
        if part.startswith(("w1", "w4")):
            runs = [run for run in record["parts"][part] if not run.get("other_machine")]
            engine, vllm = (
                [_measured(run) for run in runs if run["side"] == side] for side in ("engine", "vllm-exact")
            )
            if engine and vllm:
                shapes[_SHAPES[part.partition("-")[2]]] = engine, vllm
    return shapes


def _rates(runs: Sequence[Measured]) -> list[float]:
    """Return the requests per second of all turns with distinct documents."""
    return [rate for run in runs for rate in _turns("throughput", "requests_per_s")(run)]


def _version(record: Mapping[str, Any]) -> str:
    """Return the version of vLLM."""
    runs = [run for runs in record["parts"].values() for run in runs if run["side"] == "vllm-exact"]
    return str(runs[0]["record"]["environment"]["packages"]["vllm"])


def _sides(record: Mapping[str, Any]) -> list[str]:
    """Return the sides whose speed was measured."""
    measured = {run["side"] for runs in record["parts"].values() for run in runs}
    return [side for side in _SIDES if side in measured]


def _row(
    what: str, runs: Sequence[Any], take: Callable[[Measured], list[float]], digits: int, sides: Sequence[str]
) -> list[str]:
    cells = []
    for side in sides:
        values = [value for run in runs if run["side"] == side for value in take(_measured(run))]
        cells.append(ranged(values, digits) if values else "-")
    return [what, *cells]


def _verdict_row(name: str, verdict_part: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    shape = name.partition("-")[2]
    what = (
        f"{_SHAPES[shape]}: verdict of {verdict_part['layers']} layers"
        if verdict_part["layers"]
        else f"verdict, {shape} model"
    )
    return [what, *(_verdict(verdict_part["verdicts"].get(side)) for side in sides)]


def _verdict(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return "-"
    ratio = verdict["ratio"]
    if str(verdict.get("reason")).startswith("from top "):  # its noise covers tokens that vLLM does not report
        return "unverified"
    return str(verdict["verdict"]) + ("" if ratio is None else f" ({number(ratio, 2 if ratio < 10 else 0)}x)")


def _measured(run: Mapping[str, Any]) -> Measured:
    [measured] = run["record"]["measured"].values()
    return dict(measured)


def _order(record: Mapping[str, Any]) -> str:
    """Return how the engine and vLLM were interleaved."""
    counts = [sum(run["side"] == "engine" for run in runs) for runs in record["parts"].values()]
    return "the engine and vLLM in both orders" if counts and min(counts) > 1 else "one after the other"


def _elsewhere(record: Mapping[str, Any]) -> str:
    """Return what ran on another machine, and how many documents ``generate()`` got."""
    runs = [run for runs in record["parts"].values() for run in runs]
    names = {"engine": "the engine", "vllm-exact": "vLLM", "generate": "`generate()`"}
    side_names = [
        names[side] for side in _SIDES if any(run["side"] == side and run.get("other_machine") for run in runs)
    ]
    batch = _batch(record)
    elsewhere = f" {' and '.join(side_names)} ran on another machine with the same GPU model." if side_names else ""
    batches = (
        f" `generate()` has a {_cache(record)} cache{_with_dynamic_cache(record)}; a turn, and its warm-up, is one"
        f" batch of {batch} documents."
        if batch
        else ""
    )
    return elsewhere + batches


def _batch(record: Mapping[str, Any]) -> int:
    """Return how many documents ``generate()`` got at once, 0 if it did not run."""
    runs = [run for runs in record["parts"].values() for run in runs if run["side"] == "generate"]
    return max((turn["requests"] for run in runs for turn in _measured(run)["throughput"]), default=0)


def _cache(record: Mapping[str, Any]) -> str:
    """Return the KV cache of ``generate()``."""
    runs = [run for runs in record["parts"].values() for run in runs if run["side"] == "generate"]
    return "static" if all("--cache static" in run["record"]["command"] for run in runs) else "dynamic"


def _with_dynamic_cache(record: Mapping[str, Any]) -> str:
    """Return the throughput with distinct documents, and the TTFT, of ``generate()`` with a dynamic cache, by shape."""
    figures = []
    for part, runs in record["parts"].items():
        for run in runs:
            if run["side"] == "generate-dynamic":
                measured = _measured(run)
                rate, ttft = statistics.median(_rates([measured])), measured["alone"]["ttft_ms"]["median"]
                shape = _SHAPES[part.partition("-")[2]]
                figures.append(f"{number(rate, 2)} requests/s and {number(ttft, 0)} ms to the first token with {shape}")
    return f" (a dynamic one: {', '.join(figures)})" if figures else ""


def _encoder_graphs(runs: Sequence[Any]) -> str:
    """Return that vLLM's image encoder ran from CUDA graphs, if it did."""
    compilations = [_measured(run).get("arguments", {}).get("compilation_config", {}) for run in runs]
    return " and for its image encoder" if any(options.get("cudagraph_mm_encoder") for options in compilations) else ""


def _memory(runs: Sequence[Any]) -> str:
    """Return the shares of the GPU's memory that vLLM and the engine may use; both limit the requests at once."""
    shares = {_measured(run).get("arguments", {}).get("gpu_memory_utilization") for run in runs} - {None}
    engine = axes()["gpu_memory_utilization"].default
    most = " or ".join(f"{share:.0%}" for share in sorted(shares))
    return f" and {most} of the GPU's memory (the engine: {engine:.0%})"


def _different_gpus(record: Mapping[str, Any]) -> str:
    """Return which parts ran the engine and vLLM on different GPUs of the host."""
    parts = []
    for part, runs in record["parts"].items():
        engine, vllm = ({run["gpu"] for run in runs if run["side"] == side} for side in ("engine", "vllm-exact"))
        if engine and vllm and not engine & vllm:
            parts.append(f"`{part}`")
    return f" (of {' and '.join(parts)}: on different ones)" if parts else ""


def _machine(record: Mapping[str, Any]) -> str:
    runs = [run for runs in record["parts"].values() for run in runs]
    facts, work = runs[0]["record"]["environment"], runs[0]["record"]["work"]
    with_generate = "generate" in _sides(record)
    watts = [
        turn["power"]["mean_w"]
        for run in runs
        if not run["side"].startswith("generate")
        for turns in _measured(run).values()
        if isinstance(turns, list)
        for turn in turns
        if isinstance(turn, dict) and turn.get("power")
    ]
    without = " without `generate()`" if with_generate else ""
    power = f"; median {number(statistics.median(watts), 0)} W{without}" if watts else ""
    packages = {name: version for run in runs for name, version in run["record"]["environment"]["packages"].items()}
    verdicts = _VERDICTS if record["verdicts"] else " vLLM's answers were not compared with a reference."
    return (
        f"{work['views']} views, {work['prompt_tokens']:,} prompt and {work['output_tokens']} output tokens per"
        " request; random weights, bfloat16. Median (range) of all turns (no range: one turn); separate"
        f" processes, of one workload and shape on the same {facts['gpus'][0]['name']}{_different_gpus(record)},"
        f" {_order(record)};"
        f" vLLM with CUDA graphs for up to 128 requests{_encoder_graphs(runs)},"
        f" its own preprocessing{_memory(runs)}.{_elsewhere(record)}{verdicts} Driver"
        f" {facts['gpus'][0]['driver']}{power};"
        f" {facts['cpu']}, torch {packages['torch']}, transformers {packages['transformers']},"
        f" vLLM {packages.get('vllm', 'unknown')}, {days(run['record']['created'] for run in runs)}."
    )
