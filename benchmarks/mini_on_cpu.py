"""How long the mini model takes on a CPU: python benchmarks/mini_on_cpu.py

Seconds of loading it with Transformers, in a process that has imported them, and of answering one question about a page
of four views with the engine, caches empty; different pages, float32, greedy.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from panscan import Engine
from panscan.model.bundled import mini_directory
from panscan.records.environment import environment
from panscan.workload.documents import draw_document

RECORD = Path(__file__).parent / "records" / "mini-on-cpu.json"
VIEWS, PAGES, LOADS = 4, 12, 5


def main() -> None:
    loads = []
    for _ in range(LOADS):
        start = time.perf_counter()
        AutoModelForImageTextToText.from_pretrained(mini_directory(), dtype=torch.float32)
        loads.append(time.perf_counter() - start)
    answers, tokens, index = list[float](), list[int](), 0
    with Engine.from_pretrained("mini", dtype="fp32", device="cpu", max_new_tokens=32) as engine:
        while len(answers) < PAGES + 1:  # the first is a warm-up
            document = draw_document(11, index)
            index += 1
            start = time.perf_counter()
            [result] = engine.generate([engine.request(document.questions[0].question, [document.image])])
            if result.views == VIEWS:
                answers.append(time.perf_counter() - start)
                tokens.append(result.output_tokens)
    record = {
        "load_s": sorted(loads),
        "answer_s": sorted(answers[1:]),
        "output_tokens": statistics.mean(tokens[1:]),
        "views": VIEWS,
        "environment": environment(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"load {statistics.median(loads):.2f} s, answer {statistics.median(answers[1:]):.2f} s")


if __name__ == "__main__":
    main()
