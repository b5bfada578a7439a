"""How often `panscan bench` finds a fault that hits 1% of 300 measured requests.

    python -m benchmarks.rare_faults [--runs 200] [--output RECORD.json]

The engine answers 300 requests about different pages with the tiny model, and all answers are replayed. In each
simulated run, every request has the fault with a probability of 1%, and the replay judges the changed answers again. So
5% of the runs have no fault, which is why the predicted probability is 95%. Faults: the answer of another request
(mixed-up images), and one token that is the model's second choice. In bf16, rounding may explain a second choice, so
fewer of these are found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from tests.conftest import noise
from tests.mutations.broken import INTACT
from tests.mutations.harness import verdict_under

from panscan.records.environment import environment
from panscan.verdict import cells
from panscan.verdict.judgement import RARE, detection_probability, token_lines
from panscan.verdict.replay import MeasuredAnswer, States, replay
from panscan.verdict.tokens import Judge, ReferenceRows

REQUESTS = 300
RECORD = Path(__file__).parent / "records" / "rare-faults.json"
Fault = Callable[[MeasuredAnswer, Random], MeasuredAnswer]


class Simulation:
    """Takes the place of the verdict's replay: replays the measured answers, and then simulated runs of them.

    Args:
        runs: number of simulated runs for each fault.
    """

    def __init__(self, runs: int) -> None:
        self.runs, self.faults = runs, dict[str, dict[str, Any]]()

    def __call__(
        self, judge: Judge, answers: Sequence[MeasuredAnswer], states: States, rows: ReferenceRows, seconds: float
    ) -> Any:
        cached: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

        def kept(group: Sequence[MeasuredAnswer]) -> list[torch.Tensor]:
            new = [answer for answer in group if (answer.request, answer.tokens) not in cached]
            cached.update(zip([(a.request, a.tokens) for a in new], states(new) if new else [], strict=True))
            return [cached[answer.request, answer.tokens] for answer in group]

        def mixed_up(answer: MeasuredAnswer, draw: Random) -> MeasuredAnswer:
            other = draw.choice([other for other in answers if other is not answer])
            return replace(answer, tokens=other.tokens, start=0)

        def second_choice(answer: MeasuredAnswer, draw: Random) -> MeasuredAnswer:
            position = draw.randrange(len(answer.tokens))
            [hidden] = kept([answer])
            second = int(judge.logits(hidden[position : position + 1]).topk(2).indices[0, 1])
            return replace(answer, tokens=(*answer.tokens[:position], second), start=0)

        check = replay(judge, answers, kept, rows, seconds)
        for name, fault in {"mixed-up images": mixed_up, "second choice once": second_choice}.items():
            self.faults[name] = self._simulated(
                fault, answers, lambda changed: replay(judge, changed, kept, rows, seconds).departed > 0
            )
        return check

    def _simulated(
        self, fault: Fault, answers: Sequence[MeasuredAnswer], notices: Callable[[list[MeasuredAnswer]], bool]
    ) -> dict[str, int]:
        draw, hit, noticed = Random(0), 0, 0
        for _ in range(self.runs):
            faulty = {answer.request for answer in answers if draw.random() < RARE}
            changed = [fault(answer, draw) if answer.request in faulty else answer for answer in answers]
            hit += bool(faulty)
            noticed += notices(changed)
        return {"runs": self.runs, "with the fault": hit, "found": noticed}


def measure(dtype: str, runs: int) -> dict[str, Any]:
    """Return what `panscan bench` prints about the replay, and the results of the simulated runs."""
    simulation = Simulation(runs)
    with tempfile.TemporaryDirectory() as folder, patch.object(cells, "replay", simulation):
        pages = [Path(folder) / f"page{seed:03}.png" for seed in range(REQUESTS)]
        for seed, page in enumerate(pages):
            noise(256, 256, seed).save(page)
        plain = replace(INTACT, pages=REQUESTS, settings={"max_new_tokens": 16}, plan={})
        result = verdict_under(plain, pages, Path(folder) / "run", dtype)
    [printed] = [line for line in token_lines([result.verdict]) if "would notice" in line]
    return {"verdict": result.verdict.word, "printed": printed, "faults": simulation.faults}


def main() -> int:
    """Return 0 if mixed-up images were found in every run that has them."""
    parser = argparse.ArgumentParser(description="How often a rare fault is found.")
    parser.add_argument("--runs", type=int, default=200, help="Simulated runs for each fault.")
    parser.add_argument("--output", type=Path, help="Also write a record, as JSON.")
    options = parser.parse_args()
    rows = {dtype: measure(dtype, options.runs) for dtype in ("fp32", "bf16")}
    for dtype, row in rows.items():
        sys.stdout.write(f"{dtype}: {row['verdict']}. {row['printed']}\n")
        for fault, counts in row["faults"].items():
            sys.stdout.write(
                f"  {fault}: found in {counts['found']} of {counts['runs']} runs, {counts['with the fault']} have it\n"
            )
    if options.output is not None:
        predicted = detection_probability(REQUESTS)
        record = {
            "environment": environment(),
            "command": "python -m benchmarks.rare_faults",
            "requests": REQUESTS,
            "predicted": predicted,
            "precisions": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    mixed_up = [row["faults"]["mixed-up images"] for row in rows.values()]
    return int(any(fault["found"] < fault["with the fault"] for fault in mixed_up))


if __name__ == "__main__":
    sys.exit(main())
