"""Writes the tables of README.md and of pages in docs/, and README's chart, from committed records; `--check` compares.

    python benchmarks/readme_tables.py [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panscan.analysis.cells import MeasuredCell, measured_rows
from panscan.analysis.floors import floor_of
from panscan.core.text import count
from panscan.records.metrics import shares_of
from panscan.records.store import Run, read_run

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, as people do

from benchmarks.decision_errors import decision_errors
from benchmarks.faster import (
    faster_cpu,
    faster_one,
    faster_several,
    faster_small,
    faster_transformers,
    faster_wrong,
)
from benchmarks.idle_gap_tables import idle_gap
from benchmarks.kv_capacity import kv_capacity
from benchmarks.layout_tables import many_gpus, ten_a100
from benchmarks.load_tables import load_crosscheck, load_generator, load_kills, load_mixed, load_replicas
from benchmarks.markdown import number, ranged, table
from benchmarks.mini_tables import mini_by_part, mini_on_cpu, mini_quality, mini_training, task_cost
from benchmarks.plan_accuracy import plan_accuracy, plan_of_another_gpu
from benchmarks.plan_simulation import plan_on_cpu, plan_simulation
from benchmarks.quantization_tables import (
    quantization_27b,
    quantization_mini,
    quantization_products,
    vision_tower_weights,
)
from benchmarks.robustness_tables import robustness_cases, robustness_parts
from benchmarks.serving_tables import (
    batch_replicas,
    client_outcomes,
    decoding_pool,
    rank_faults,
    serving_faults,
    serving_fuzz,
    serving_over_http,
    serving_pressure,
    serving_replicas,
    serving_routing,
)
from benchmarks.tensor_parallel import tensor_parallel_tokens
from benchmarks.verify_tables import load_verify, rare_faults, verify_faults, verify_vllm
from benchmarks.vllm_tables import chart, comparison, smaller, summary
from benchmarks.workload_tables import distinct_documents, questions, traffic

HERE = Path(__file__).parent
RECORDS = HERE / "records"
CARD = HERE.parent / "src" / "panscan" / "model" / "weights" / "mini" / "README.md"
DOCS = HERE.parent / "docs"
CHART = DOCS / "images" / "speed.svg"
PAGES = (
    HERE.parent / "README.md",
    *(
        DOCS / name
        for name in (
            "measured.md",
            "faster.md",
            "ten-a100.md",
            "tensor-parallel.md",
            "profile.md",
            "verdict.md",
            "verify.md",
            "load.md",
            "serve.md",
            "cluster.md",
            "robustness.md",
            "quantization.md",
            "plan.md",
            "quality.md",
        )
    ),
    CARD,
)


def machine(run: Run) -> str:
    """Return one line on the hardware, versions, work and command of a run."""
    facts, settings = run.header.machine, run.header.settings
    gpu = facts.gpus[0]
    command = " ".join(part for part in run.header.command if part not in ("--debug",))
    return (
        f"{len(facts.gpus)} x {gpu.name} (driver {gpu.driver}) and {facts.cpu},"
        f" torch {facts.packages['torch']}, transformers {facts.packages['transformers']}, Python {facts.python},"
        f" {run.header.created[:10]};"
        f" {settings.requests} requests per cell, {count(settings.repeats or 0, 'repeat')}"
        f"{' (measured once: no interval)' if settings.repeats == 1 else ''};"
        " ~ has too few samples for 99% confidence."
        f" Record: `benchmarks/records/{run.path.parent.name}`. Command: `{command}`"
    )


def row(run: Run, cell: MeasuredCell) -> list[str]:
    """Return throughput with its interval, latencies, views, memory and the verdict; ~ marks too few samples."""
    metrics, values = cell.metrics, cell.metrics.values

    def latency(name: str, digits: int) -> str:
        return ("~" if name in metrics.uncertified else "") + number(values[name], digits)

    low, high = metrics.intervals.get("request_throughput", (None, None))
    spread = "" if low is None else f" ({number(low, 2)}-{number(high, 2)})"
    floor = floor_of(run, cell.cell)
    ratio = cell.verdict.ratio
    return [
        number(values["request_throughput"], 2) + spread,
        latency("median_ttft_ms", 0),
        latency("median_tpot_ms", 1),
        latency("p95_e2el_ms", 0),
        "-" if floor is None else number((values["mean_e2el_ms"] or 0) / floor.e2e_ms, 1) + "x",
        number(values["mean_views"], 1),
        number((values["peak_allocated_bytes"] or 0) / 2**30, 1),
        cell.verdict.word + ("" if ratio is None else f" ({number(ratio, 2 if ratio < 10 else 0)}x)"),
    ]


HEADINGS = ["req/s (95%)", "TTFT ms", "TPOT ms", "E2E p95 ms", "E2E / floor", "views", "GPU GiB", "verdict (noise)"]


def h200_27b() -> str:
    """Return the table of pan and scan on and off, by batch size."""
    run = read_run(RECORDS / "h200-27b")
    rows = [
        ["on" if cell.settings["do_pan_and_scan"] else "off", str(cell.settings["batch_size"]), *row(run, cell)]
        for cell in measured_rows(run)
    ]
    rows.sort(key=lambda cells: (cells[0] == "on", int(cells[1])))
    return table(["pan and scan", "batch", *HEADINGS], rows) + "\n\n" + machine(run)


def by_settings(name: str, *settings: str) -> Callable[[], str]:
    """Return the writer of a record's table with these settings as its first columns."""

    def write() -> str:
        run = read_run(RECORDS / name)
        rows = [
            [str(cell.settings[setting] or "-") for setting in settings] + row(run, cell) for cell in measured_rows(run)
        ]
        return table([*settings, *HEADINGS], rows) + "\n\n" + machine(run)

    return write


def h200_x2() -> str:
    """Return the table of one and of two replicas of ``generate()``."""
    runs = [read_run(RECORDS / name) for name in ("h200-x2-one", "h200-x2-replicas")]
    rows = [
        [str(run.header.settings.replicas), *row(run, cell), shares(run, cell)]
        for run in runs
        for cell in measured_rows(run)
    ]
    notes = "\n\n".join(machine(run) for run in runs)
    return table(["replicas", *HEADINGS, "req/s of each"], rows) + "\n\n" + notes


def shares(run: Run, cell: MeasuredCell) -> str:
    return ", ".join(number(share.request_throughput, 2) for share in shares_of(run.repeats_of(cell.cell))) or "-"


def engine_on_cpu() -> str:
    """Return the table of the engine's throughput relative to other methods, from the ratios of each round."""
    record = json.loads((RECORDS / "engine-on-cpu.json").read_text())
    seconds, facts = record["seconds"], record["environment"]
    rows = []
    for method, baseline, target in (
        ("engine, one by one", "generate, one by one", "1"),
        ("engine, 16 in flight", "generate, one by one", "2"),
        ("engine, 16 in flight", "generate, batches of 4", ""),
        ("engine, 16 in flight", "generate, batches of 16", ""),
    ):
        ratios = [
            baseline_seconds / method_seconds
            for method_seconds, baseline_seconds in zip(seconds[method], seconds[baseline], strict=True)
        ]
        spread = f"{number(min(ratios), 2)}-{number(max(ratios), 2)}"
        rows.append([method, baseline, f"{number(statistics.median(ratios), 2)}x ({spread})", target])
    where = (
        f"{record['requests']} requests of {record['views']} views, {record['max_new_tokens']} output tokens each, tiny"
        f" model, float32, the same tokens everywhere; median and range of {len(seconds['engine, one by one'])}"
        f" interleaved rounds; {facts['cpu']}, {facts['cpu_count']} cores, torch {facts['packages']['torch']},"
        f" transformers {facts['packages']['transformers']}. Command: `python benchmarks/engine_on_cpu.py`"
    )
    return table(["", "against", "throughput", "at least"], rows) + "\n\n" + where


def vision_tower() -> str:
    """Return the table of the vision tower's milliseconds per view by attention kernel and views at once."""
    record = json.loads((RECORDS / "vision-tower.json").read_text())
    kernels = list(record["ms_per_view"])
    base = record["ms_per_view"][kernels[0]]
    rows = []
    for kernel in kernels:
        for views, values in record["ms_per_view"][kernel].items():
            ratio = statistics.median(values) / statistics.median(base[views])
            rows.append([kernel, views, ranged(values, 2), number(ratio, 2) + "x"])
    facts, power = record["environment"], record["power"]
    packages = facts["packages"]
    gpu = facts["gpus"][0]
    where = (
        "SigLIP at its true shape, random weights, bfloat16; both kernels in one run, in turns; one"
        f" {gpu['name']} (mean power {number(power['mean_w'], 0)} W, median SM clock"
        f" {number(power['median_sm_mhz'], 0)} MHz, driver {gpu['driver']}), {facts['cpu']},"
        f" torch {packages['torch']}, triton {packages['triton']}."
        f" Record: `benchmarks/records/vision-tower.json`. Command: `{' '.join(record['command'])}`"
    )
    return table(["attention kernel", "views at once", "ms per view", f"times {kernels[0]}"], rows) + "\n\n" + where


def harness() -> str:
    """Return the table of the harness's own speed."""
    overhead = json.loads((RECORDS / "harness-overhead.json").read_text())
    plans = json.loads((RECORDS / "view-planning.json").read_text())
    rows = [
        ["`panscan bench` / bare loop of `generate()`", f"{overhead['median']:.3f}", "at most 1.05"],
        ["view plans per second, one core", f"{statistics.median(plans['plans_per_second']):,.0f}", "100,000"],
    ]
    facts = overhead["environment"]
    where = f"{facts['cpu']}, {facts['cpu_count']} cores, torch {facts['packages']['torch']}, tiny model, float32."
    return table(["the harness itself", "measured", "target"], rows) + "\n\n" + where


def mutations() -> str:
    """Return the table of broken engines, and which part of the verdict caught each."""
    record = json.loads((RECORDS / "mutations.json").read_text())
    cells: dict[str, list[str]] = {}
    for row in record["rows"]:
        caught = ", ".join(row["caught_by"]) or f"nothing: {row['why_invisible']}"
        cells.setdefault(row["name"], [row["name"]]).append(f"{row['verdict']}: {caught}")
    facts = record["environment"]
    packages = facts["packages"]
    where = (
        f"On {facts['cpu']}, torch {packages['torch']}, transformers {packages['transformers']}."
        f" Record: `benchmarks/records/mutations.json`. Command: `{record['command']}`"
    )
    return f"{table(['broken engine', 'float32', 'bf16'], list(cells.values()))}\n\n{where}"


def from_record(name: str, write: Callable[[dict[str, Any]], str], before: str = "") -> Callable[[], str]:
    """Return the writer of the table of a record; nothing is written while the record does not exist.

    Args:
        name: of the record's file, without ``.json``.
        write: makes the table of a record.
        before: paragraph above the table.
    """

    def written() -> str:
        path = RECORDS / f"{name}.json"
        if not path.exists():
            return ""
        return (f"{before}\n\n" if before else "") + write(json.loads(path.read_text("utf-8")))

    return written


def workload(name: str, write: Callable[[dict[str, Any], str], str], before: str = "") -> Callable[[], str]:
    """Return the writer of the table of a workload's record, which names the record."""
    return from_record(name, lambda record: write(record, name), before)


def on_four_gpus(name: str, before: str) -> Callable[[], str]:
    """Return the writer of the tables of a record of W1 on H100s and on H200s; nothing while neither exists."""
    writers = [workload(f"{name}-{gpu.lower()}", distinct_documents, before.format(gpu)) for gpu in ("H100", "H200")]
    return lambda: "\n\n".join(filter(None, (write() for write in writers)))


def vllm_summary(record: dict[str, Any]) -> str:
    """Return README's table of the comparison with vLLM, with the ratios on another GPU."""
    return summary(record, json.loads((RECORDS / "vllm-comparison-h100.json").read_bytes()))


def vllm_smaller() -> str:
    """Return the table of 27B in fp8 and on two cards with 40 GB beside vLLM."""
    return smaller({path.stem: json.loads(path.read_bytes()) for path in RECORDS.glob("vllm-*.json")})


_12B = "W4 with the 12B shape:"

TABLES: dict[str, Callable[[], str]] = {
    "h200-27b": h200_27b,
    "h200-4b": by_settings("h200-4b", "attention", "cache", "preprocess"),
    "h200-4b-chunks": by_settings("h200-4b-chunks", "prefill_chunk_size"),
    "h200-x2": h200_x2,
    "h200-27b-engine": by_settings("h200-27b-engine", "runner", "batch_size"),
    "idle-gap": idle_gap,
    "w1-27b": workload("w1-27b", distinct_documents),
    "w1-27b-tp2": workload("w1-27b-tp2", distinct_documents),
    "w1-27b-tp4": on_four_gpus("w1-27b-tp4", "On four {}s:"),
    "w1-27b-tp4-fp8": on_four_gpus("w1-27b-tp4-fp8", "With fp8 weights on four {}s:"),
    "w1-27b-tp2-40gb": workload("w1-27b-tp2-40gb", distinct_documents),
    "w2-27b": workload("w2-27b", questions),
    "w1-27b-h100": workload("w1-27b-h100", distinct_documents),
    "w2-27b-h100": workload("w2-27b-h100", questions),
    "w4-4b": workload("w4-4b", distinct_documents),
    "w4-4b-h100": workload("w4-4b-h100", distinct_documents),
    "traffic-4b": workload("traffic-4b", traffic),
    "w4-12b": workload("w4-12b", distinct_documents, _12B),
    "vllm-comparison": from_record("vllm-comparison", comparison),
    "vllm-comparison-h100": workload("vllm-comparison-h100", comparison),
    "vllm-smaller": vllm_smaller,
    "vllm-summary": from_record("vllm-comparison", vllm_summary),
    "vision-tower": vision_tower,
    "vision-tower-weights": from_record("vision-tower-weights", vision_tower_weights),
    "engine-on-cpu": engine_on_cpu,
    "harness": harness,
    "mutations": mutations,
    "mini-quality": mini_quality,
    "task-cost": task_cost,
    "quantization-mini": quantization_mini,
    "quantization-products": quantization_products,
    "quantization-27b": quantization_27b,
    "plan-simulation": plan_simulation,
    "decision-errors": decision_errors,
    "plan-on-cpu": plan_on_cpu,
    "mini-by-part": mini_by_part,
    "mini-on-cpu": mini_on_cpu,
    "mini-training": mini_training,
    "clients": client_outcomes,
    "serving": serving_over_http,
    "replicas": serving_replicas,
    "routing": serving_routing,
    "serve-faults": serving_faults,
    "serve-fuzz": serving_fuzz,
    "serve-pressure": serving_pressure,
    "decoding-pool": decoding_pool,
    "batch-replicas": batch_replicas,
    "load-mixed": load_mixed,
    "load-generator": load_generator,
    "load-crosscheck": load_crosscheck,
    "load-replicas": load_replicas,
    "load-kills": load_kills,
    "verify-faults": verify_faults,
    "verify-vllm": verify_vllm,
    "load-verify": load_verify,
    "rare-faults": rare_faults,
    "plan-accuracy": plan_accuracy,
    "plan-h100": plan_of_another_gpu,
    "faster-one": faster_one,
    "faster-transformers": faster_transformers,
    "faster-several": faster_several,
    "faster-small": faster_small,
    "faster-cpu": faster_cpu,
    "faster-wrong": faster_wrong,
    "ten-a100": ten_a100,
    "many-gpus": many_gpus,
    "rank-faults": rank_faults,
    "tensor-parallel-cpu": tensor_parallel_tokens,
    "kv-capacity": kv_capacity,
    "robustness": robustness_parts,
    "robustness-files": robustness_cases("files", "groups"),
    "robustness-damage": robustness_cases("files", "ways"),
    "robustness-commands": robustness_cases("commands", "groups"),
    "robustness-values": robustness_cases("commands", "ways"),
    "robustness-kills": robustness_cases("kills", "groups"),
    "robustness-enospc": robustness_cases("enospc", "groups"),
    "robustness-bombs": robustness_cases("bombs", "groups"),
    "robustness-checkpoints": robustness_cases("checkpoints", "groups"),
    "robustness-checkpoint-commands": robustness_cases("checkpoints", "ways"),
    "robustness-endpoints": robustness_cases("endpoints", "groups"),
}


def filled(text: str) -> str:
    """Return the page with every table rewritten."""

    def write(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", write, text, flags=re.DOTALL)


def main() -> int:
    texts = {page: filled(page.read_text("utf-8")) for page in PAGES}
    texts[CHART] = from_record("vllm-comparison", chart)()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.name} is not what its record says; run python benchmarks/readme_tables.py")
        return bool(stale)
    for path in stale:
        path.write_text(texts[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
