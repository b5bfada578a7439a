"""A run with everything that a report can show, and the arithmetic of what it must show."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.records import synthetic

from panscan.model.shapes import SHAPES
from panscan.records.store import Run

SIDES = ([[100, 100]], [[100, 250]], [[900, 100], [10, 10]])
"""Image sizes of the requests in turns: longer over shorter side 1, 2.5 and 9."""
GRID = {
    "fast": {"attention": "sdpa", "batch_size": 2},
    "plain": {"attention": "sdpa", "batch_size": 1},
    "wrong": {"attention": "flash_attention_2", "batch_size": 2},
    "near": {"attention": "flash_attention_2", "batch_size": 1},
    "unknown": {"attention": "eager", "batch_size": 1},
    "large": {"attention": "eager", "batch_size": 2},
    "absent": {"attention": "flex_attention", "batch_size": 2},
    "silent": {"attention": "flex_attention", "batch_size": 1},
}
SECONDS = {"fast": 1.0, "plain": 0.8, "wrong": 0.5, "near": 0.7, "unknown": 2.0}
"""What a batch of each measured cell takes, the first of each repeat a tenth more."""
BATCHES = 4
NUMBERS = {cell: number for number, cell in enumerate(SECONDS, 1)}
"""Of the cells in the table."""
SHAPE = asdict(SHAPES["4b"])
UNKNOWN = "the truth did not fit: <b>80 GiB</b> & more"


def settings_of(cell: str) -> dict[str, Any]:
    return {"model": "tiny", "do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4, **GRID[cell]}


def requests_of(cell: str, scores: bool) -> list[dict[str, Any]]:
    """Two repeats of :data:`BATCHES` batches, one after the other; stages take 5, 10, 25 and 20% of a batch."""
    size, records, start = GRID[cell]["batch_size"], [], 100.0
    for repeat in range(2):
        began = start
        for batch in range(BATCHES):
            took = SECONDS[cell] * (1.1 if batch == 0 else 1.0)
            stages = {"loaded": 0.05, "preprocessed": 0.15, "vision_start": 0.15, "vision": 0.4}
            seen = {name: start + share * took for name, share in stages.items()}
            for place in range(size):
                number = batch * size + place
                tokens = [start + took * share for share in (0.6, 0.7, 0.8, 0.9, 1.0)]
                page = {"views": 1 + number % 2, "image_tokens": 4 + number, "image_size": SIDES[number % 3]}
                asked = {"repeat": repeat, "batch": batch, "prompt_sha256": str(number), **page}
                asked |= {"scores": {"exact_match": float(number % 4 != 0)}} if scores else {}
                stamps = synthetic.stamps(start, tokens, **seen)
                records.append(synthetic.request(cell, f"q{number}", start, tokens, stamps=stamps, **asked))
            start += took
        memory = {"peak_allocated_bytes": (repeat + 2) * 2**30}
        records.append(synthetic.repeat(cell, repeat, began, start, **memory))
    return [*records, synthetic.outcome(cell, "done")]


def records_of(*, scores: bool = False) -> list[dict[str, Any]]:
    header = synthetic.header({cell: settings_of(cell) for cell in GRID})
    header["cells"][0]["preset"] = "balanced"
    header["environment"] = {
        "panscan": "9.8.7",
        "cpu": "A <processor> & more",
        "memory_bytes": 64 * 2**30,
        "packages": {"torch": "2.11.0", "transformers": "5.17.0"},
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "driver": "580.1"}] * 2,
    }
    header["command"] = ["panscan", "bench", "--images", "docs/a b.png", "-p", "What's <this> & that?"]
    # Reading seemed slow, arithmetic did not: only some floors are too high.
    records = [header, synthetic.load(list(SECONDS), SHAPE, flops_per_s=4e15, bytes_per_s=2e10), synthetic.truth()]
    for cell in SECONDS:
        records += requests_of(cell, scores)
    records += [
        synthetic.verdict("fast", "exact", 1.25, 0.5),
        synthetic.verdict("plain", "exact", 0.75, 1.5, equal_tokens=True),
        synthetic.verdict("wrong", "different", 21.5, 1540),
        synthetic.verdict("near", "close", 5.25, 3.5),
        synthetic.verdict("unknown", "unverified", None, reason=UNKNOWN, truth=None),
        synthetic.outcome("large", "oom", "tried to get 16 GiB\nof <memory>"),
        synthetic.outcome("absent", "skipped", "flex_attention needs | something"),
    ]
    return records


def known_run(directory: Path, *, scores: bool = False) -> Run:
    return synthetic.write_run(directory, records_of(scores=scores))


def throughput(cell: str) -> float:
    seconds = 2 * SECONDS[cell] * (BATCHES + 0.1)
    return 2 * BATCHES * GRID[cell]["batch_size"] / seconds
