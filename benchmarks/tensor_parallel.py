"""Tensor parallelism in float32 on a CPU: the tokens of 2, 4 and 8 processes against those of one.

    python -m benchmarks.tensor_parallel            # 100 questions; minutes on two cores, 4 GB
    python -m benchmarks.tensor_parallel --sizes 4 --questions 10 --no-record

The model has random weights, 16 attention heads, 8 KV heads and a vocabulary that 8 does not divide. Questions are of
any length, one in three is about a page, one in three is sampled. Sizes that do not divide the heads must be refused.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.markdown import table
from benchmarks.workloads.common import say
from benchmarks.workloads.pages import page
from panscan import Engine, PanAndScan, Request, Sampling
from panscan.core import UnsupportedError
from panscan.core.files import write_file
from panscan.model.bundled.random_weights import random_model
from panscan.model.shapes import SHAPES, Shape, VisionShape
from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "tensor-parallel-cpu.json"
_TEXT = replace(SHAPES["tiny"].text, vocabulary=1028, hidden=64, intermediate=96, heads=16, kv_heads=8, head_size=16)
SHAPE = Shape(
    "eight KV heads",
    replace(_TEXT, layers=4, pattern=2, window=40),
    VisionShape(16, 24, 1, 2, image_size=48, patch_size=4),
    image_tokens=16,
)
SIZES, REFUSED = (2, 4, 8), (3, 6, 16)
TOKENS = 16
_WORDS = ("total", "date", "page", "sum", "tax", "who", "when", "what", "is", "the", "of", "line")


def random_questions(count: int, tokens: int = TOKENS) -> list[Request]:
    """Return requests of random words, some about a page, greedy or sampled."""
    draw = Random(0)
    requests = []
    for number in range(count):
        text = " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))
        images = [page(number, (draw.randint(40, 150), draw.randint(40, 150)))] if number % 3 == 0 else []
        sampling = Sampling(tokens, temperature=0.9 if number % 3 == 1 else 0.0, seed=number, ignore_eos=True)
        crops = PanAndScan(min_crop_size=50, max_num_crops=2)
        requests.append(Request(text, images, pan_and_scan=crops, sampling=sampling, id=str(number)))
    return requests


def answer(checkpoint: str, size: int, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Return the tokens of each request from ``size`` processes, and the seconds that they took."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "kv_cache_gb": 0.05, "max_num_seqs": 32}
    with Engine.from_pretrained(checkpoint, tensor_parallel_size=size, **options) as engine:
        start = time.perf_counter()
        results = engine.generate(requests)
        seconds = time.perf_counter() - start
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.token_ids for result in results], seconds


def refusal(checkpoint: str, size: int) -> str:
    """Return why a size is refused.

    Raises:
        RuntimeError: it is not.
    """
    try:
        answer(checkpoint, size, [])
    except UnsupportedError as error:
        return str(error)
    raise RuntimeError(f"--tensor-parallel-size {size} was not refused")


def tensor_parallel_tokens() -> str:
    """Return the table of the record."""
    record = json.loads(RECORD.read_bytes())
    count, facts = record["questions"], record["environment"]
    rows = [[size, f"{result['equal']} of {count}"] for size, result in record["sizes"].items()]
    rows += [[size, f"refused: `{message}`"] for size, message in record["refused"].items()]
    note = (
        f"Random questions with the tokens of one process, float32; {record['attention_heads']} attention heads,"
        f" {record['kv_heads']} KV heads, random weights, {record['tokens']} tokens each; {facts['cpu']}, torch"
        f" {facts['packages']['torch']}, {record['created'][:10]}. Record:"
        " `benchmarks/records/tensor-parallel-cpu.json`. Command: `python -m benchmarks.tensor_parallel`"
    )
    return f"{table(['ranks', 'answers'], rows, text=(0, 1))}\n\n{note}"


def main() -> None:
    """Compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks; default: %(default)s")
    parser.add_argument("--questions", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args()
    requests = random_questions(options.questions)
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in random_model(SHAPE, dtype=torch.float32, device="cpu"):
            part.save_pretrained(folder)
        expected, _ = answer(folder, 1, requests)
        for size in options.sizes:
            tokens, seconds = answer(folder, size, requests)
            equal = sum(one == other for one, other in zip(tokens, expected, strict=True))
            sizes[str(size)] = {"equal": equal, "seconds": round(seconds, 1)}
            say(f"{size} ranks: {equal} of {len(expected)} answers are those of one process")
        refused = {str(size): refusal(folder, size) for size in REFUSED}
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "questions": len(expected),
        "different_answers": len({tuple(tokens) for tokens in expected}),
        "tokens": TOKENS,
        "attention_heads": SHAPE.text.heads,
        "kv_heads": SHAPE.text.kv_heads,
        "sizes": sizes,
        "refused": refused,
        "environment": environment(),
    }
    say(json.dumps(record, indent=1))
    if not options.no_record:
        write_file(RECORD, json.dumps(record, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
