"""Measure the accuracy cost of quantised weights: python benchmarks/quantization.py [--kinds NAMES]

The engine answers all questions about sample documents with each kind of weights: unquantised, int8, int4 rounded to
nearest in groups of 64 and 32, fp8, some with an int8 head or an 8-bit vision tower, and any checkpoints given with
`--checkpoint NAME=DIRECTORY`, such as one that `panscan quantize` calibrated. (Groups of 128 do not divide the mini
model's matrices.) The record has each question's score, and the divergence from the float32 reference of the
unquantised model. Variants of an existing record with the same documents are kept unless they are measured again, so
runs on other hardware can add theirs.

On a CPU, fp8 uses the same arithmetic as on a GPU, with float32 sums in another order; `panscan bench` does not support
it there, because it is slow. `--products` also times products of one layer, alternating int8 and float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import nn

from panscan.bench.grid import Cell
from panscan.core import InputError
from panscan.model.linear.quantized import WeightFormat, quantized_linear
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes, weights_name
from panscan.records.environment import environment
from panscan.records.scores import exact_match
from panscan.runners.engine import EngineRunner
from panscan.settings import settings_from
from panscan.verdict.cells import Verifier
from panscan.verdict.references import References
from panscan.workload.requests import Item, Source, load_workload, request_of
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "quantization-mini.json"
SEED = 977  # of documents; the samples that panscan draws by default have seed 0
KINDS: dict[str, dict[str, Any]] = {
    "unquantised": {},
    "unquantised, bf16": {"dtype": "bf16"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4, groups of 64": {"quantization": "int4", "quantization_group_size": 64},
    "int4, groups of 32": {"quantization": "int4", "quantization_group_size": 32},
    "int8 head, bf16": {"dtype": "bf16", "quantize_head": "int8"},
    "int8, int8 head": {"quantization": "int8", "quantize_head": "int8"},
    "int4, groups of 64, int8 head": {
        "quantization": "int4",
        "quantization_group_size": 64,
        "quantize_head": "int8",
    },
    "int8 vision tower, bf16": {"dtype": "bf16", "quantize_vision": "int8"},
    "fp8 vision tower, bf16": {"dtype": "bf16", "quantize_vision": "fp8"},
    "int8, int8 vision tower": {"quantization": "int8", "quantize_vision": "int8"},
}
COMPARED, STEPS = 32, 16  # requests whose distributions are compared, and their output tokens
HIDDEN, INTERMEDIATE = 2560, 10_240  # of the 4b shape's MLP
ROWS = (1, 16, 256, 1024)


def measure(items: list[Item], source: Source, verifier: Verifier, values: dict[str, Any]) -> dict[str, Any]:
    """Answer every question with one kind of weights, and compare its distributions with the reference."""
    settings = settings_from({"model": "mini", "runner": "engine", "max_new_tokens": 32, "dtype": "fp32", **values})
    cell = Cell.of(settings)
    verifier.references.prepare_apart([settings])
    runner = EngineRunner(load_for(settings), settings)  # not open_runner: it refuses fp8 on a CPU
    try:
        facts = {"weights": weights_name(runner.loaded.model), "weight_bytes": weight_bytes(runner.loaded.model)}
        verifier.references.prepare(runner, [settings])
        runner.configure(settings)
        requests = [request_of(item, settings, source) for item in items]
        began = time.perf_counter()
        texts = [result.text for result in runner.run(requests)]
        seconds = time.perf_counter() - began
        verdict = verifier.verify(runner, cell)
        device = str(runner.loaded.device)
    finally:
        runner.close()
    scores = [round(exact_match(text, item.answers)) for text, item in zip(texts, items, strict=True)]
    kept = {name: to_builtins(getattr(verdict, name)) for name in ("verdict", "reason", "answer", "image", "top1")}
    return {
        **facts,
        "settings": values,
        "device": device,
        "seconds": round(seconds, 1),
        "exact_match": scores,
        "answers": texts,
        "verdict": kept,
    }


@torch.no_grad()
def products(repeats: int = 15) -> list[dict[str, Any]]:
    """Return median milliseconds of one matrix product by number of rows, alternating float32 and int8."""
    dense = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
    quantized = quantized_linear(HIDDEN, INTERMEDIATE, WeightFormat("int8"))
    quantized.quantize(dense.weight)
    times = []
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN)
        seconds: dict[str, list[float]] = {"float32": [], "int8": []}
        for repeat in range(repeats + 2):
            for name, product in (("float32", dense), ("int8", quantized)):
                began = time.perf_counter()
                product(x)
                if repeat >= 2:  # the first two warm up
                    seconds[name].append(time.perf_counter() - began)
        medians = {f"{name}_ms": round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}
        times.append({"rows": rows, **medians})
    return times


def refuse(problem: InputError) -> None:
    raise problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--kinds", default=";".join(KINDS), help="names separated by ';' (default: all)")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--products", action="store_true", help="also time int8 and float32 products on this CPU")
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    kinds = {name: KINDS[name] for name in args.kinds.split(";") if name}
    kinds |= {name: {"model": path} for name, _, path in (option.partition("=") for option in args.checkpoint)}
    record: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    if (record.get("documents"), record.get("seed")) != (args.documents, SEED):
        record = {"variants": {}}
    record |= {
        "about": "exact match of the mini model with quantised weights, and its divergence from the unquantised model",
        "command": f"python benchmarks/quantization.py --documents {args.documents} --products",
        "documents": args.documents,
        "seed": SEED,
        "environment": environment(),
    }
    if args.products:
        record["products"] = {
            "inputs": HIDDEN,
            "outputs": INTERMEDIATE,
            "threads": torch.get_num_threads(),
            "times": products(),
        }
    with tempfile.TemporaryDirectory() as folder:
        source = Source(dataset=str(write_samples(Path(folder), count=args.documents, seed=SEED)))
        items = load_workload(source, on_problem=refuse).items
        step = max(1, len(items) // COMPARED)
        chosen = items[::step][:COMPARED]
        verifier = Verifier(References(chosen, source, STEPS, None, (), lambda _: None, print))
        for name, values in kinds.items():
            record["variants"][name] = variant = measure(items, source, verifier, values)
            print(f"{name}: {sum(variant['exact_match']) / len(items):.2%} of {len(items)}, {variant['seconds']} s")
            args.output.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
