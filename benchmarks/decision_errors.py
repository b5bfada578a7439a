"""How often decisions are wrong: simulated runs, judged by the functions that reports and recommendations use.

    python -m benchmarks.decision_errors

Answers: one cell is the baseline, the others have fewer crops. "Equal" cells change some answers, as many for better as
for worse; a "worse" cell is three points less accurate and twice as fast as the others. Speeds: as many
repeats as ``panscan bench`` measures by default, with noise of repeats and batches. Writes
``benchmarks/records/decision-errors.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, as people do

from benchmarks.markdown import table
from panscan.analysis.accuracy import standings_of
from panscan.analysis.cells import measured_rows
from panscan.analysis.recommend import recommend
from panscan.bench.plan import SweepPlan
from panscan.core import Stamps
from panscan.records.metrics import work_of
from panscan.records.request_records import RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, RecordedCell, RunRecord, RunSettings
from panscan.records.store import Run
from panscan.records.verdict_records import Divergence, Top1, VerdictRecord
from panscan.report.sweep import SweepReport
from panscan.workload.requests import Source

RECORD = Path(__file__).parent / "records" / "decision-errors.json"
QUESTIONS, CELLS = (35, 100, 300, 1_000), (3, 9)
RIGHT, CHANGED, LOSS = 0.85, 0.04, 0.03
"""Share of right answers, of changed scores in an equal cell, and what a worse cell loses."""
NOISE, DRIFT, BATCH_NOISE = 0.02, 0.02, 0.03
"""Of a cell's repeats, of the machine from repeat to repeat, and of single batches."""
NOISES = (0.25, 0.5, 0.75, 1.0, 2.0)
"""Times so much. Repeats end early most often where their interval is about as wide as asked for."""
BATCHES = 12
_EXACT = Divergence(100, 1e-3, 1e-2, 1e-3)


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """A cell: seconds per request, seconds of each batch by repeat, scores by question, verdict, crops, runner."""

    repeats: Sequence[Sequence[float]]
    scores: Sequence[float] = ()
    verdict: str = "exact"
    crops: int = 4
    runner: str = "generate"


def run_of(cells: dict[str, SimulatedCell], precision: float | None = None) -> Run:
    """Return the records of a run of these cells, in memory. Each batch answers one question."""
    settings = {
        name: {
            "runner": cell.runner,
            "attention": name,
            "do_pan_and_scan": True,
            "pan_and_scan_max_num_crops": cell.crops,
        }
        for name, cell in cells.items()
    }
    recorded = [RecordedCell(name, values) for name, values in settings.items()]
    header = RunRecord(
        schema=2,
        run_id="simulated",
        created="",
        command=[],
        settings=RunSettings(precision=precision),
        environment={},
        cells=recorded,
    )
    run = Run(Path("records.jsonl"), header, {cell.cell: cell for cell in recorded})
    for name, cell in cells.items():
        for number, batches in enumerate(cell.repeats):
            requests, ended = _answered(name, number, batches, cell)
            run.requests[name, number] = requests
            run.repeats[name, number] = _repeat(name, number, ended)
        run.outcomes[name] = CellRecord(cell=name, repeat=len(cell.repeats) - 1, outcome="done", reason=None, time=0.0)
        run.verdicts[name] = _verdict(name, cell.verdict)
    return run


def _answered(
    cell: str, repeat: int, batches: Sequence[float], simulated: SimulatedCell
) -> tuple[list[RequestRecord], float]:
    requests, started = [], 0.0
    scores = simulated.scores or [0.0] * len(batches)
    for index, score in enumerate(scores):
        batch = index % len(batches)
        ended = started + batches[batch]
        requests.append(
            RequestRecord(
                cell=cell,
                repeat=repeat,
                batch=0 if simulated.runner == "engine" else index,
                request=f"q{index}",
                image=["page.png"],
                image_sha256=[str(index)],
                prompt_sha256="",
                views=1 + simulated.crops,
                crops=simulated.crops,
                image_tokens=256,
                prompt_tokens=300,
                finish_reason="stop",
                output_tokens=2,
                error=None,
                stamps=Stamps(accepted=started, tokens=[(started + ended) / 2, ended]),
                scores={"exact_match": score} if simulated.scores else {},
            )
        )
        started = ended
    return requests, started


def _repeat(cell: str, repeat: int, ended: float) -> RepeatRecord:
    return RepeatRecord(
        cell=cell,
        repeat=repeat,
        started=0.0,
        ended=ended,
        warmup_s=0.0,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        peak_rss_bytes=2**30,
    )


def _verdict(cell: str, word: str) -> VerdictRecord:
    factor = {"exact": 1.0, "close": 5.0}[word]
    divergence = Divergence(_EXACT.positions, factor * _EXACT.kl, _EXACT.kl_max, _EXACT.noise)
    return VerdictRecord(
        cell=cell,
        verdict=word,
        reason=None,
        truth=None,
        answer=divergence,
        image=divergence,
        top1=Top1(100, 100),
        equal_tokens=True,
        seconds=0.0,
    )


def accuracy_run(rng: np.random.Generator, questions: int, cells: int, *, worse: int) -> Run:
    """Return a run of a baseline, ``worse`` cells that lose three points, and equal cells."""
    base = rng.random(questions) < RIGHT
    drawn = {"baseline": SimulatedCell([[1.0]], base.astype(float).tolist(), crops=9)}
    for index in range(1, cells):
        loss = LOSS if index <= worse else 0.0
        # Of right answers some become wrong, of wrong ones some become right.
        lost = rng.random(questions) < (CHANGED / 2 + loss) / RIGHT
        won = rng.random(questions) < CHANGED / 2 / (1 - RIGHT)
        scores = np.where(base, ~lost, won).astype(float).tolist()
        drawn[f"{'worse' if loss else 'equal'}{index}"] = SimulatedCell(
            [[0.5 if loss else 0.9]], scores, crops=9 - index
        )
    return run_of(drawn)


def contradictions(run: Run) -> int:
    """Return how many statements of the page about a run contradict another one or the recommendation."""
    report = SweepReport(run)
    standings, advice, answers = report.standings, report.advice, report.answers
    if advice is None or answers is None:
        return 1
    texts = {cell.cell: cell.against for cell in answers.cells}
    rejected = dict(report.rejected)
    count = 0
    for row in report.rows:
        standing = standings.cells.get(row.cell)
        if standing is None:
            continue
        count += texts[row.cell] != standing.text
        count += (row.name in rejected) == standings.qualifies(row)
        count += row.name in rejected and standing.text not in rejected[row.name]
        count += row.cell == advice.cell and standing.word in ("loss", "undecided")
    return count


def accuracy_errors(
    rng: np.random.Generator, questions: int, cells: int, runs: int, *, pages: int = 5
) -> dict[str, float]:
    """Return the shares of runs with each kind of error, and of equal cells that qualify; some pages are read."""
    counts: Counter[str] = Counter()
    for number in range(runs):
        equal = accuracy_run(rng, questions, cells, worse=0)
        rows = measured_rows(equal)
        standings = standings_of(equal, rows)
        words = Counter(standing.word for standing in standings.cells.values())
        counts["false_loss"] += words["loss"] > 0
        counts["equal_qualifies"] += sum(standing.lossless for standing in standings.cells.values())
        for kind, worse in (("one", 1), ("all", cells - 1)):
            run = accuracy_run(rng, questions, cells, worse=worse)
            counts[f"{kind}_worse_chosen"] += recommend(run).cell.startswith("worse")
            if number < pages:
                counts["contradictions"] += contradictions(run)
    shares = {name: counts[name] / runs for name in ("false_loss", "one_worse_chosen", "all_worse_chosen")}
    qualifies = counts["equal_qualifies"] / runs / (cells - 1)
    return {**shares, "equal_qualifies": qualifies, "contradictions": float(counts["contradictions"])}


def timed_cells(
    rng: np.random.Generator,
    seconds: dict[str, float],
    verdicts: dict[str, str],
    precision: float | None = 2.0,
    noise: float = 1.0,
) -> tuple[Run, float]:
    """Return a run of the engine and of ``generate()``, with as many repeats as ``panscan bench`` measures, and the
    seconds of its documents where a batch takes one on average."""
    documents = rng.lognormal(0, 0.5, BATCHES)
    plan = SweepPlan(cells=[], items=[], source=Source(no_images=True, prompt="x"), repeats=5, precision=precision)
    drift = rng.lognormal(0, noise * DRIFT, plan.most_repeats)  # of the machine: cells take turns in each repeat
    cells = {}
    for name, batch_seconds in seconds.items():
        runner, repeats, work = name.partition("-")[0], [], []
        for number in range(plan.most_repeats):
            batch_noise = rng.lognormal(0, noise * BATCH_NOISE, BATCHES)
            batches = batch_seconds * documents * drift[number] * rng.lognormal(0, noise * NOISE) * batch_noise
            repeats.append(batches.tolist())
            requests, ended = _answered(name, number, repeats[-1], SimulatedCell([], runner=runner))
            work.append(work_of((_repeat(name, number, ended), requests)))
            if plan.is_last(number, work):
                break
        cells[name] = SimulatedCell(repeats, verdict=verdicts.get(name, "exact"), runner=runner)
    return run_of(cells, precision), float(documents.sum())


def coverage(
    rng: np.random.Generator, runs: int, noise: float = 1.0, precision: float | None = 2.0
) -> dict[str, float]:
    """Return how often 95% intervals hold the true throughputs and their ratio, and how many repeats it takes."""
    hits: Counter[str] = Counter()
    for _ in range(runs):
        run, total = timed_cells(rng, {"engine": 1.0, "generate": 1.3}, {}, precision, noise)
        rows = {row.cell: row for row in measured_rows(run)}
        for name, batch_seconds in (("engine", 1.0), ("generate", 1.3)):
            hits[name] += _holds(rows[name].interval, BATCHES / (batch_seconds * total))
        ratio = rows["engine"].speed_over(rows["generate"])
        hits["ratio"] += ratio is not None and _holds(ratio.interval, 1.3)
        hits["repeats"] += len(run.repeats)
    shares = {name: hits[name] / runs for name in ("engine", "generate", "ratio")}
    return shares | {"repeats": hits["repeats"] / runs / 2}


def faster_chosen(rng: np.random.Generator, runs: int) -> float:
    """Return how often the faster of two cells is chosen. The slower one is exact: within the noise, it would be."""
    verdicts = {"generate-fast": "close"}
    cells = {"generate-slow": 1.15, "generate-fast": 1.0}
    return sum(recommend(timed_cells(rng, cells, verdicts)[0]).cell == "generate-fast" for _ in range(runs)) / runs


def _holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]


def simulate(runs: dict[int, int], speeds: int, seed: int) -> dict[str, Any]:
    """Return the shares of errors: ``runs`` by number of questions for the answers, ``speeds`` for the speeds."""

    def generator(*key: int) -> np.random.Generator:
        return np.random.default_rng([seed, *key])

    with ProcessPoolExecutor(2) as pool:
        timed = {
            f"{noise:g}": pool.submit(coverage, generator(number), speeds, noise) for number, noise in enumerate(NOISES)
        }
        fixed = pool.submit(coverage, generator(len(NOISES)), speeds, 1.0, None)
        faster = pool.submit(faster_chosen, generator(len(NOISES) + 1), speeds)
        answers = {
            f"{questions} questions, {cells} cells": (
                count,
                pool.submit(accuracy_errors, generator(questions, cells), questions, cells, count),
            )
            for questions, count in sorted(runs.items(), reverse=True)
            for cells in reversed(CELLS)
        }
        return {
            "seed": seed,
            "answers": {name: {"runs": count, **task.result()} for name, (count, task) in reversed(answers.items())},
            "speeds": {
                "runs": speeds,
                "faster": faster.result(),
                "noise": {noise: task.result() for noise, task in timed.items()},
                "five_repeats": fixed.result(),
            },
        }


def decision_errors(path: Path = RECORD) -> str:
    """Return the tables of a record."""
    record = json.loads(path.read_text("utf-8"))
    headings = [
        "runs of",
        "any equal cell called a loss",
        "a cell 3 points worse chosen (one of the others, all others)",
        "an equal cell qualifies",
        "contradictions on the page",
    ]
    rows = [
        [
            name,
            f"{row['false_loss']:.1%}",
            f"{row['one_worse_chosen']:.1%}, {row['all_worse_chosen']:.1%}",
            f"{row['equal_qualifies']:.0%}",
            f"{row['contradictions']:.0f}",
        ]
        for name, row in record["answers"].items()
    ]
    speeds = record["speeds"]
    counts = sorted({row["runs"] for row in record["answers"].values()})
    deviation = float(np.hypot(np.hypot(NOISE, DRIFT), BATCH_NOISE / np.sqrt(BATCHES / np.exp(0.25))))
    coverages = {f"{float(noise) * deviation:.1%}": row for noise, row in speeds["noise"].items()}
    coverages[f"{deviation:.1%}, always five repeats"] = speeds["five_repeats"]
    timed = [
        [name, f"{row['repeats']:.1f}", *(f"{row[kind]:.1%}" for kind in ("engine", "generate", "ratio"))]
        for name, row in coverages.items()
    ]
    return (
        f"{table(headings, rows)}\n\n{counts[0]} to {counts[-1]} runs a line; {CHANGED:.0%} of an equal cell's scores"
        f" change.\n\n{table(['repeats differ by', 'repeats', *_COVERED], timed)}\n\n{speeds['runs']:,} runs a line."
        f" Of two cells 15% apart, the faster is chosen in {speeds['faster']:.1%}."
        " Record: `benchmarks/records/decision-errors.json`. Command: `python -m benchmarks.decision_errors`"
    )


_COVERED = ("95% intervals that hold the engine's throughput", "that of `generate()`", "the ratio of both")


def main() -> int:
    """Simulate, write the record, and print its tables."""
    parser = argparse.ArgumentParser(description="How often decisions are wrong, in simulated runs.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the record's number of runs.")
    parser.add_argument("--output", type=Path, default=RECORD, help="The record, as JSON.")
    options = parser.parse_args()
    started = monotonic()
    runs = {35: 1_000, 100: 500, 300: 300, 1_000: 150}
    counts = {questions: max(1, round(count * options.share)) for questions, count in runs.items()}
    record = simulate(counts, max(1, round(2_000 * options.share)), seed=47)
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"{decision_errors(options.output)}\n\n{monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
