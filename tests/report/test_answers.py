"""Quality by question type, kind of document and aspect ratio."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import synthetic
from tests.records.synthetic import record_of, repeat, request

from panscan.core import SettingError
from panscan.records.quality import empty_answers, metric_of, metrics_in, quality_of, with_metric
from panscan.records.store import Run
from panscan.report.answers import MOST_GROUPS, SHAPES, breakdowns, shape_of


def run_of(*questions: dict[str, Any], cell: str = "c") -> Run:
    requests = [
        request(cell, f"q{number}", 0.0, [1.0], prompt_sha256=str(number), **fields)
        for number, fields in enumerate(questions)
    ]
    return synthetic.run_of(*requests, repeat(cell, 0, 0.0, 1.0), cells={cell: {}})


def shape(*sizes: Sequence[int]) -> str | None:
    return shape_of(record_of(request("c", "q", 0.0, [1.0], image_size=sizes)))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ([[100, 100]], "square"),
        ([[119, 100]], "square"),
        ([[120, 100]], "wide 1.2–2"),
        ([[100, 120]], "tall 1.2–2"),
        ([[199, 100]], "wide 1.2–2"),
        ([[200, 100]], "wide 2–3"),
        ([[100, 299]], "tall 2–3"),
        ([[100, 300]], "tall over 3"),
        ([[900, 100]], "wide over 3"),
        ([[900, 100], [1, 1]], "several images"),
        ([], None),
        ([[0, 5]], None),
    ],
)
def test_shapes(sizes: list[list[int]], name: str | None) -> None:
    assert shape(*sizes) == name


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_every_picture_has_a_shape_and_its_turn_is_its_mirror(width: int, height: int) -> None:
    name, turned = shape([width, height]), shape([height, width])
    assert name in SHAPES
    mirror = {"wide": "tall", "tall": "wide"}
    assert turned == " ".join(mirror.get(word, word) for word in str(name).split())


def test_a_question_of_two_types_counts_in_both() -> None:
    scored = [({"type": ["form"]}, 1.0), ({"type": ["form", "layout"]}, 0.0), ({"type": ["layout"]}, 0.0), ({}, 1.0)]
    run = run_of(*({"tags": tags, "scores": {"exact_match": score}} for tags, score in scored))
    [found] = breakdowns(run, ["c"])
    assert (found.name, found.groups) == ("question type", (("form", 2), ("layout", 2)))
    form, layout = found.cells["c"]
    assert (form.mean, layout.mean) == (0.5, 0.0)
    assert layout.high > 0, "two wrong answers are no certainty"


def test_groups_are_the_largest_and_a_single_one_is_no_breakdown() -> None:
    kinds = [f"k{number}" for number in range(MOST_GROUPS + 3)]
    run = run_of(*({"tags": {"kind": [kind]}, "scores": {"exact_match": 1.0}} for kind in [*kinds, *kinds[:2]]))
    [found] = breakdowns(run, ["c"])
    assert found.name == "kind of document"
    assert found.groups[:2] == (("k0", 2), ("k1", 2))
    assert (len(found.groups), found.left_out) == (MOST_GROUPS, 3)
    alone = run_of(*({"tags": {"kind": ["bill"]}, "scores": {"exact_match": 1.0}} for _ in range(3)))
    assert breakdowns(alone, ["c"]) == []


def test_shapes_are_in_their_order_and_the_runs_metric_counts() -> None:
    sizes = [[100, 400], [100, 100], [400, 100]]
    scores = [{"exact_match": 0.0, "anls": share} for share in (0.25, 0.5, 0.75)]
    run = run_of(*({"image_size": [size], "scores": each} for size, each in zip(sizes, scores, strict=True)))
    [found] = breakdowns(with_metric(run, "anls"), ["c"])
    assert [name for name, _ in found.groups] == ["tall over 3", "square", "wide over 3"]
    assert [each and each.mean for each in found.cells["c"]] == [0.25, 0.5, 0.75]


def test_a_run_from_before_there_were_other_metrics() -> None:
    """Schema 2 as it was: no metric in the header, exact match alone, no tags."""
    run = run_of({"scores": {"exact_match": 1.0}}, {"scores": {"exact_match": 0.0}}, {})
    assert (metric_of(run), metrics_in(run)) == ("exact_match", ["exact_match"])
    found = quality_of(run, "c")
    assert found.mean == 0.5
    assert breakdowns(run, ["c"]) == []
    assert with_metric(run, None) is run
    assert metric_of(with_metric(run, "exact_match")) == "exact_match"
    with pytest.raises(SettingError, match=r"--quality-metric anls: .* its answers have exact_match"):
        with_metric(run, "anls")
    with pytest.raises(SettingError, match=r"--quality-metric anls: .* its dataset has no answers"):
        with_metric(run_of({}), "anls")


def test_empty_answers_are_counted_and_failed_requests_are_none() -> None:
    wrong = {"scores": {"exact_match": 0.0}, "empty": True}
    run = run_of(wrong, {**wrong, "error": "no memory"}, {"scores": {"exact_match": 1.0}})
    assert empty_answers(run, "c") == 1
