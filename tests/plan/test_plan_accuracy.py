"""The fit of the plan's factors: repeatable from committed records, and right where the truth is known."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from benchmarks.plan_accuracy import accuracy_table, differences, errors, fit_factors, missed
from benchmarks.plan_points import Point, points, read_ceilings

from panscan.plan.efficiency import committed_efficiency


def quick() -> list[Point]:
    return [point for point in points() if point.phase != "W1"]


def test_the_committed_factors_are_those_of_a_new_fit() -> None:
    committed = asdict(committed_efficiency())
    factors = fit_factors(quick(), read_ceilings())
    assert differences(committed, {**committed, "factors": asdict(factors)}) == []


def test_a_fit_recovers_what_a_known_machine_does() -> None:
    known = committed_efficiency()
    slower = replace(
        known.factors, vision=0.6 * known.factors.vision, message_seconds=2 * known.factors.message_seconds
    )
    truth = replace(known, factors=slower)
    measured = [replace(point, measured=point.predicted(truth)) for point in quick()]
    found = replace(known, factors=fit_factors(measured, known.ceilings))
    assert max(map(abs, errors(measured, found))) < 0.15 < max(map(abs, errors(measured, known)))


def test_a_fit_needs_phase_records() -> None:
    with pytest.raises(ValueError, match=r"run benchmarks\.phases"):
        fit_factors([replace(point, fitted=False) for point in quick()], read_ceilings())


def test_differences_name_what_moved() -> None:
    held = asdict(committed_efficiency())
    moved = {**held, "spread": held["spread"] + 0.1, "factors": {**held["factors"], "kv": 2 * held["factors"]["kv"]}}
    assert differences(held, held) == []
    assert differences(held, moved) == ["kv", "spread"]
    assert differences(held, {**held, "held_out": []}) == ["held_out"]


def test_the_table_shows_the_split_and_the_largest_error() -> None:
    known = ("phases-h200.json", "27b:bf16:1", "decode", 8)
    [point] = [each for each in quick() if (each.record, each.configuration, each.phase, each.size) == known]
    lines = accuracy_table([point, replace(point, size=1, fitted=False)], [0.01, -0.3]).splitlines()
    assert len(lines) == 3
    value = 1e3 * point.measured
    assert f"| *{1.01 * value:.2f} / {value:.2f}* |" in lines[2] and f"| {0.7 * value:.2f} / {value:.2f} |" in lines[2]
    assert lines[2].endswith("| 30% |")
    assert (
        missed([point, point], [0.01, -0.3]) == "Off by more than 20%: decode step on one GPU (1 of 2: -30% to -30%)."
    )
    assert missed([point], [0.19]) == "Off by more than 20%: none."
