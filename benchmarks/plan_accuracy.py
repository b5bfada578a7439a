"""What `panscan plan` predicts against what committed records measured; fits its factors.

    python -m benchmarks.plan_accuracy            # the table
    python -m benchmarks.plan_accuracy --fit      # also writes src/panscan/plan/efficiency.json
    python -m benchmarks.plan_accuracy --check    # exit status 1 if that file differs from a new fit

The factors are fitted to the vision, prefill and decode times of some configurations of the phase records
(:data:`benchmarks.plan_points.FITTED`). Everything else is held out: other configurations, all throughput, long
prompts, and the older records.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, as people do

from benchmarks.markdown import table
from benchmarks.plan_points import GPU, PHASES, Point, points, points_of_another_gpu, read_ceilings
from panscan.plan.efficiency import Efficiency, Factors, committed_efficiency

PLAN_FILE = Path(__file__).parent.parent / "src" / "panscan" / "plan" / "efficiency.json"
TARGET = 0.2
"""Relative error that the plan aims to stay within."""
_TOLERANCE = 0.02  # relative difference of a factor that rounding and another NumPy explain
_PRIOR_WEIGHT = 0.25  # of a factor's log against its prior: decides factors that no record determines
_ROUNDS = 30
_ENOUGH = 1e-6  # gained of the sum of squares in a round
_STEP = 1e-4  # in logs, for derivatives
_DIGITS = 3
_QUANTILE = 0.9
_COMMAND = "python -m benchmarks.plan_accuracy"
_LABELS = {
    "vision": "vision",
    "prefill": "prefill",
    "decode": "decode step",
    "mixed": "decode and prefill in one pass",
    "prepare": "image preparation (host)",
    "TTFT": "TTFT of one request",
    "W1": "W1 req/s",
}
_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "vision ms, 4 views": ("vision", (4,)),
    "32 views": ("vision", (32,)),
    "prefill ms, 1,102 tokens": ("prefill", (1102,)),
    "decode step ms, 1 request": ("decode", (1,)),
    "8": ("decode", (8,)),
    "64": ("decode", (64,)),
    "TTFT ms": ("TTFT", ()),
    "W1 req/s": ("W1", ()),
}
"""Of the table: phase and sizes; no sizes stands for all."""

_PRIOR = Factors(
    read_bf16=1.05,
    read_fp8=1.0,
    read_int8=1.0,
    read_int4=0.75,
    read_int4_few=0.3,
    compute_bf16=1.0,
    compute_fp8=0.95,
    compute_int8=0.75,
    vision=0.7,
    attention=0.4,
    kv=1.0,
    activations=0.8,
    link=0.6,
    layer_seconds=35e-6,
    tail_seconds=80e-6,
    int4_few_seconds=40e-6,
    pass_seconds=3e-4,
    message_seconds=12e-6,
    launch_seconds=4e-4,
    launch_ranks_seconds=8e-4,
    replay_seconds=1e-3,
    replay_ranks_seconds=2.7e-3,
    sequence_ranks_seconds=3e-5,
    prepare_seconds=2e-3,
    prepare_ranks_seconds=4e-3,
)
"""Where the fit starts: the records of single products (products.json), of the tower, and of W1."""


def fit(measurements: Sequence[Point], ceilings: tuple[float, float]) -> Efficiency:
    """Return the fitted efficiency, with its spreads.

    Raises:
        ValueError: no point is fitted.
    """
    fitted = tuple(sorted({point.record for point in measurements if point.fitted}))
    held_out = tuple(sorted({point.record for point in measurements if not point.fitted}))
    efficiency = Efficiency(GPU, ceilings, 0.0, 0.0, fitted, held_out, fit_factors(measurements, ceilings))
    one, several = (
        _spread([point for point in measurements if point.split == split], efficiency) for split in (False, True)
    )
    return replace(efficiency, spread=one, spread_ranks=several)


def fit_factors(measurements: Sequence[Point], ceilings: tuple[float, float]) -> Factors:
    """Return the factors that predict the fitted points best: least squares of relative errors, in logs.

    Raises:
        ValueError: no point is fitted.
    """
    fitted = [point for point in measurements if point.fitted]
    if not fitted:
        raise ValueError("no phase record to fit to: run benchmarks.phases")
    names = [item.name for item in fields(Factors)]
    prior = np.log([getattr(_PRIOR, name) for name in names])

    def residuals(logs: Any) -> Any:
        factors = Factors(**dict(zip(names, map(float, np.exp(logs)), strict=True)))
        trial = Efficiency(GPU, ceilings, 0.0, 0.0, (), (), factors)
        return np.array([*(_log_error(point, trial) for point in fitted), *(_PRIOR_WEIGHT * (logs - prior))])

    logs = _least_squares(residuals, prior)
    return Factors(**{name: _rounded(math.exp(log)) for name, log in zip(names, logs, strict=True)})


def errors(measurements: Sequence[Point], efficiency: Efficiency) -> list[float]:
    """Return the relative error of each prediction: 0.1 if it is 10% too high."""
    return [math.expm1(_log_error(point, efficiency)) for point in measurements]


def _log_error(point: Point, efficiency: Efficiency) -> float:
    return math.log(point.predicted(efficiency) / point.measured)


def _spread(measurements: Sequence[Point], efficiency: Efficiency) -> float:
    """Return the relative error that nine of ten points stay within."""
    sizes = [abs(_log_error(point, efficiency)) for point in measurements if point.phase != "prepare"]
    return math.ceil(100 * math.expm1(float(np.quantile(sizes, _QUANTILE)))) / 100


def _least_squares(residuals: Callable[[Any], Any], start: Any) -> Any:
    """Return where the sum of squares is least, by Levenberg's and Marquardt's method."""
    estimate, damping = np.array(start), 1e-3
    wrong = residuals(estimate)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(estimate + step) - wrong) / _STEP for step in _STEP * np.eye(len(estimate))], 1)
        normal = slopes.T @ slopes
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ wrong)
            tried = residuals(estimate + step)
            if tried @ tried < wrong @ wrong:
                break
            damping *= 10
        else:
            return estimate
        gained = wrong @ wrong - tried @ tried
        estimate, wrong, damping = estimate + step, tried, damping / 10
        if gained < _ENOUGH:
            return estimate
    return estimate


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return what differs between two contents of ``efficiency.json``, beyond rounding."""
    wrong = [name for name in ("gpu", "fitted", "held_out") if list(first[name]) != list(second[name])]
    spreads = ("spread", "spread_ranks")
    numbers = [{**content["factors"], **{name: content[name] for name in spreads}} for content in (first, second)]
    wrong += [
        name
        for name in numbers[0].keys() | numbers[1].keys()
        if not math.isclose(numbers[0].get(name, 0), numbers[1].get(name, 0), rel_tol=_TOLERANCE)
    ]
    return sorted(wrong)


def plan_accuracy() -> str:
    """Return the tables of the page: by phase, and by configuration, with the committed factors."""
    measurements, efficiency = points(), committed_efficiency()
    relative_errors = errors(measurements, efficiency)
    caption = (
        "Predicted / measured; in italics the measurements that the factors are fitted to. Several values: measured"
        f" again, or other memory limits. Factors: `plan/efficiency.json`, fitted by `{_COMMAND} --fit`; nine of ten"
        f" measurements are within {efficiency.spread:.0%} on one GPU and {efficiency.spread_ranks:.0%} on two."
    )
    return "\n\n".join(
        (
            phase_table(measurements, relative_errors),
            caption,
            accuracy_table(measurements, relative_errors),
            missed(measurements, relative_errors),
        )
    )


def plan_of_another_gpu() -> str:
    """Return the table of records of an H100, predicted from its data sheet with the factors of the H200."""
    measurements = points_of_another_gpu()
    relative_errors = errors(measurements, committed_efficiency())
    pools = (
        "The first six rows were measured when the KV cache held fewer requests than the plan assumes; the others"
        " with today's cache."
    )
    caption = f"Predicted / measured, W1. {pools} {missed(measurements, relative_errors)}"
    return f"{caption}\n\n{accuracy_table(measurements, relative_errors)}"


def phase_table(measurements: Sequence[Point], relative_errors: Sequence[float]) -> str:
    """Return the table of errors by phase: how many are within the target, the median and the largest."""

    def cells(phase: str, *, fitted: bool) -> list[str]:
        sizes = [
            abs(e)
            for p, e in zip(measurements, relative_errors, strict=True)
            if p.fitted == fitted and p.phase == phase
        ]
        if not sizes:
            return ["-", "-"]
        within = sum(size <= TARGET for size in sizes)
        return [f"{within} of {len(sizes)}", f"{median(sizes):.0%}, {max(sizes):.0%}"]

    headings = [
        f"{name}: {what}" for name in ("fitted", "held out") for what in (f"within {TARGET:.0%}", "median, largest")
    ]
    return table(
        ["phase", *headings],
        [[_LABELS[phase], *cells(phase, fitted=True), *cells(phase, fitted=False)] for phase in PHASES],
    )


def accuracy_table(measurements: Sequence[Point], relative_errors: Sequence[float]) -> str:
    """Return the table: a row for each configuration of a record, predicted / measured of each phase."""
    rows: dict[tuple[str, str], list[tuple[Point, float]]] = {}
    for point, error in zip(measurements, relative_errors, strict=True):
        if point.phase != "prepare":
            rows.setdefault((point.configuration, point.record), []).append((point, error))
    lines = [
        [
            _name(configuration),
            f"`{record}`",
            *(
                ", ".join(_cell(point, error) for point, error in row if _stands_in(point, column)) or "-"
                for column in _COLUMNS
            ),
            f"{max(abs(error) for _, error in row):.0%}",
        ]
        for (configuration, record), row in rows.items()
    ]
    return table(["configuration", "record", *_COLUMNS, "largest error"], lines)


def _name(configuration: str) -> str:
    shape, kind, ranks = configuration.split(":")
    return f"{shape} {kind}" + (f", {ranks} GPUs" if ranks != "1" else "")


def _stands_in(point: Point, column: str) -> bool:
    phase, sizes = _COLUMNS[column]
    return point.phase == phase and (not sizes or point.size in sizes)


def _cell(point: Point, error: float) -> str:
    """Return the predicted and the measured value: milliseconds, or requests per second; fitted ones in italics."""
    scale = 1.0 if point.phase == "W1" else 1e3
    value = scale * point.measured
    digits = 0 if value >= 100 else 1 if value >= 20 else 2
    text = f"{value * (1 + error):.{digits}f} / {value:.{digits}f}"
    return f"*{text}*" if point.fitted else text


def missed(measurements: Sequence[Point], relative_errors: Sequence[float]) -> str:
    """Return a sentence about the predictions that are further off than the target: how many, by phase and GPUs."""
    counts: dict[str, list[float]] = {}
    for point, error in zip(measurements, relative_errors, strict=True):
        counts.setdefault(f"{_LABELS[point.phase]} on {'several GPUs' if point.split else 'one GPU'}", []).append(error)
    parts = []
    for name, phase_errors in counts.items():
        far = [error for error in phase_errors if abs(error) > TARGET]
        if far:
            parts.append(f"{name} ({len(far)} of {len(phase_errors)}: {min(far):+.0%} to {max(far):+.0%})")
    return f"Off by more than {TARGET:.0%}: {'; '.join(parts) or 'none'}."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; fit or check on request."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the factors and write efficiency.json")
    parser.add_argument("--check", action="store_true", help="compare efficiency.json with a new fit")
    options = parser.parse_args(argv)
    measurements = points()
    committed = json.loads(PLAN_FILE.read_bytes())
    if options.fit or options.check:
        fresh = asdict(fit(measurements, read_ceilings()))
        if options.check and (changed := differences(committed, fresh)):
            print(f"{PLAN_FILE.name} differs from a new fit in {', '.join(changed)}: run --fit", file=sys.stderr)
            return 1
        if options.fit:
            PLAN_FILE.write_text(json.dumps(fresh, indent=1) + "\n", "utf-8")
            committed = json.loads(PLAN_FILE.read_bytes())
    relative_errors = errors(measurements, msgspec.convert(committed, Efficiency))
    print(
        phase_table(measurements, relative_errors),
        accuracy_table(measurements, relative_errors),
        missed(measurements, relative_errors),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
