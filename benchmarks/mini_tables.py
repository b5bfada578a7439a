"""Tables about the bundled mini model, from the records of its training and of its evaluation."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import accuracies, table
from panscan.records.intervals import wilson_interval

RECORDS = Path(__file__).parent / "records"


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / "mini-quality.json").read_text())
    return record


def _share(part: dict[str, float]) -> str:
    return f"{100 * part['exact_match']:.1f}% ({100 * part['low']:.0f}-{100 * part['high']:.0f})"


def mini_quality() -> str:
    """Return the table of accuracy by document shape and number of crops."""
    record = _record()
    summary = record["summary"]
    rows = [["held-out documents", "without", "2 crops", "3 crops", "4 crops", "6 crops", "questions"]]
    for shape in ("tall and wide", "square"):
        cells = [summary.get(f"{shape}, {name}") for name in ("without", "crops-2", "crops-3", "with", "crops-6")]
        texts = ["-" if part is None else f"{_share(part)}, {part['views']:.1f} views" for part in cells]
        rows.append([shape, *texts, str(summary[f"{shape}, with"]["questions"])])
    return f"{table(rows[0], rows[1:])}\n\n{_where(record)}"


def mini_by_part() -> str:
    """Return the table of accuracy with pan and scan by print, kind of document and type of question."""
    record = _record()
    rows = [["with pan and scan", "tall and wide", "square"]]
    names = dict.fromkeys(
        name.split(", with, ")[1] for name in record["summary"] if ", with, " in name
    )  # in the order of the record
    for name in names:
        cells = [record["summary"].get(f"{shape}, with, {name}") for shape in ("tall and wide", "square")]
        texts = ["-" if part is None else f"{_share(part)}, n={part['questions']}" for part in cells]
        rows.append([_called(name), *texts])
    return f"{table(rows[0], rows[1:])}\n\n{_where(record)}"


def _called(name: str) -> str:
    for key, label in (("new", "new"), ("kind", "kind"), ("type", "question")):
        if name.startswith(f"{key} "):
            return f"{label}: {name.removeprefix(key + ' ')}"
    return name


def _where(record: dict[str, Any]) -> str:
    return (
        "Accuracy (exact match) with 95% intervals over documents; pan and scan 256 / 4 / 1.2 unless another count"
        " stands."
        f" float32 on a CPU ({record['machine']}), torch {record['torch']}, transformers {record['transformers']}."
        f" Record: `benchmarks/records/mini-quality.json`. Command: `{record['command']}`"
    )


def task_cost() -> str:
    """Return the table of each variant's accuracy and its difference from the reference on the same questions."""
    record = json.loads((RECORDS / "task-cost.json").read_text())
    variants = record["variants"]
    reference = variants["reference"]
    count = len(reference["answers"])
    rows = [["variant", "accuracy (exact match)", "vs reference (95%)", "other answers"]]
    results = accuracies(variants, "reference")
    for name, variant in variants.items():
        right = variant["exact_match"]
        low, high = wilson_interval(sum(right) / count, count)
        accuracy = f"{100 * sum(right) / count:.1f}% ({100 * low:.1f}-{100 * high:.1f})"
        if variant is reference:
            rows.append([name, accuracy, "-", "-"])
            continue
        changed = sum(ours != theirs for ours, theirs in zip(variant["answers"], reference["answers"], strict=True))
        rows.append([name, accuracy, results[name].short_text, f"{changed} of {count}"])
    facts = record["environment"]
    return (
        f"{table(rows[0], rows[1:])}\n\n{count} questions about {record['documents']} sample documents (seed"
        f" {record['seed']}), paired by question. float32 on {facts['cpu']}, torch {facts['packages']['torch']},"
        f" transformers {facts['packages']['transformers']}, {record['seconds'] / 60:.0f} minutes on a core that"
        f" others used, too. Record: `benchmarks/records/task-cost.json`. Command: `{record['command']}`"
    )


def mini_on_cpu() -> str:
    """Return the table of the seconds of loading and of one answer, median and range."""
    record = json.loads((RECORDS / "mini-on-cpu.json").read_text())
    rows = [["on a CPU", "seconds"]]
    labels = {"load_s": "loading", "answer_s": f"an answer about a page of {record['views']} views"}
    for key, name in labels.items():
        values = record[key]
        rows.append([name, f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"])
    facts = record["environment"]
    return (
        f"{table(rows[0], rows[1:])}\n\nfloat32, {record['output_tokens']:.0f} output tokens; {facts['cpu']},"
        f" {facts['cpu_count']} cores, torch {facts['packages']['torch']},"
        f" transformers {facts['packages']['transformers']}. Command: `python benchmarks/mini_on_cpu.py`"
    )


def mini_training() -> str:
    """Return the table of the hardware, time and data of training and of finishing."""
    lines = [json.loads(line) for line in (RECORDS / "mini-training.jsonl").read_text().splitlines()]
    stages = [[line for line in lines if line.get("stage", "train") == name] for name in ("train", "finish")]
    ends = [(next(line for line in stage if "device" in line), stage[-1]) for stage in stages]
    rows = [
        ["", "training", "finishing"],
        ["hardware", *(first["device"] for first, _ in ends)],
        ["time", *(f"{last['minutes']:.0f} minutes" for _, last in ends)],
        *(
            [f"{name} {verb}", *(f"{last[name]:,}" for _, last in ends)]
            for name, verb in (("documents", "drawn"), ("questions", "asked"), ("batches", "learnt"))
        ),
        *([name, *(first[name] for first, _ in ends)] for name in ("torch", "transformers", "python")),
    ]
    return (
        f"{table(rows[0], rows[1:])}\n\nRecord with loss and accuracy over time:"
        f" `benchmarks/records/mini-training.jsonl`. Last commands: "
        + ", ".join(f"`{last['command']}`" for _, last in ends)
    )
