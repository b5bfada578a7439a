"""The record of a training: means since the last line, as JSON lines and on the terminal."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from training.batches import Plan, slots_of


def about(processes: int, device: str) -> dict[str, str]:
    """What the record says first."""
    return {
        "device": f"{processes} x {device}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def totals(module: str, plans: Sequence[Plan], processes: int, seconds: float) -> dict[str, Any]:
    """What the record says last: all that ``processes`` drew and asked so far by these plans each, and this call."""
    begun = ["torchrun", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    return {
        "minutes": round(seconds / 60, 2),
        "batches": processes * sum(plan.sets for plan in plans),
        "documents": processes * sum(plan.documents for plan in plans),
        "questions": processes * sum(plan.documents * plan.sets * len(slots_of(plan.views)) for plan in plans),
        "command": shlex.join([*begun, "-m", module, *sys.argv[1:]]),
    }


class Log:
    """Means since the last line, written as JSON lines and to the terminal."""

    def __init__(self, path: Path, *, silent: bool) -> None:
        self.path, self.silent = path, silent
        self.began, self.documents, self.waited = time.perf_counter(), 0, 0.0
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, value: float, count: float = 1) -> None:
        self.sums[name][0] += value
        self.sums[name][1] += count

    def write(self, step: int, **more: Any) -> None:
        now = time.perf_counter()
        line = {"step": step, "documents_per_s": round(self.documents / (now - self.began), 1), **more}
        line["waited"] = round(self.waited / (now - self.began), 3)
        line |= {name: round(total / count, 4) for name, (total, count) in sorted(self.sums.items())}
        if not self.silent:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)
        self.began, self.documents, self.waited = now, 0, 0.0
        self.sums.clear()
