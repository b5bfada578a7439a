"""The fit of the plan's factors: repeatable from committed records, and right where the truth is known."""

from dataclasses import asdict, replace

import pytest
from benchmarks.plan_accuracy import differences, errors, fit_factors
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
