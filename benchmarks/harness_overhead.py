"""What measuring costs: `panscan bench` against a bare loop over Transformers, on the tiny model, interleaved.

    python benchmarks/harness_overhead.py

The bare loop does what a short script would: open the image, processor, `generate()`, decode. The sweep does the same
requests with stamps, counts and records that are on the disk when a repeat ends.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from panscan import GenerateRunner
from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.run import header
from panscan.bench.sweep import measure
from panscan.records.environment import environment
from panscan.records.store import RecordWriter
from panscan.settings import settings_from
from panscan.workload.requests import Item, Source, load_workload
from panscan.workload.samples import write_samples

RECORD = Path(__file__).parent / "records" / "harness-overhead.json"
ROUNDS = 15


class Quiet:
    """A progress listener that shows nothing."""

    def loading(self, *_: Any) -> None: ...
    def ready(self, *_: Any) -> None: ...
    def stage(self, *_: Any) -> None: ...
    def batch_done(self) -> None: ...
    def problem(self, *_: Any) -> None: ...


@torch.no_grad()
def bare(runner: GenerateRunner, items: list[Item]) -> float:
    """Return the seconds of a bare loop over the items."""
    processor, model = runner.loaded.reader.processor, runner.loaded.model
    views = runner.settings.pan_and_scan.processor_kwargs()
    start = time.perf_counter()
    for item in items:
        with Image.open(item.documents[0].name) as opened:
            image = opened.convert("RGB")
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": item.prompt}]}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=text, images=[image], add_special_tokens=False, return_tensors="pt", **views)
        inputs.pop("num_crops", None)
        output = model.generate(**inputs, max_new_tokens=32, min_new_tokens=32, do_sample=False)
        processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return time.perf_counter() - start


def main() -> None:
    settings = settings_from(
        {"model": "tiny", "dtype": "fp32", "device": "cpu", "max_new_tokens": 32, "ignore_eos": True}
    )
    runner = GenerateRunner.from_settings(settings)
    with tempfile.TemporaryDirectory() as folder:
        source = Source(dataset=str(write_samples(Path(folder) / "samples")), num_samples=8)
        items = load_workload(source, on_problem=print).items
        cell = Cell.of(settings)
        plan = SweepPlan(cells=[cell], items=items, source=source, repeats=ROUNDS, warmup=0)
        ratios = []
        with RecordWriter(Path(folder) / "run") as writer:
            writer.write([header(plan, ["harness_overhead"])])
            bare(runner, items)
            for repeat in range(ROUNDS):
                first = bare(runner, items)
                start = time.perf_counter()
                line, requests = measure(plan, cell, repeat, runner, Quiet())
                writer.write([*requests, line])
                ratios.append((time.perf_counter() - start) / first)
    record = {"ratios": ratios, "median": statistics.median(ratios), "target": 1.05, "environment": environment()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"bench / bare loop: median {statistics.median(ratios):.3f} of {ROUNDS} rounds, target at most 1.05")


if __name__ == "__main__":
    main()
