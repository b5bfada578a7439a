from typing import Any

import pytest
from tests.analysis.noisy_runs import noisy_run
from tests.analysis.test_comparison import text

from panscan.analysis.comparison import as_json, build_report
from panscan.records.schema import RunSettings
from panscan.report.comparison import markdown_text


def test_a_pair_is_named_by_its_ids_and_what_varies_in_either_run() -> None:
    cells = tuple({"batch_size": size, "attention": name} for size in (1, 2) for name in ("sdpa", "eager"))
    one = ({"batch_size": 2, "attention": "eager"},)
    a, b = noisy_run(1, cells=cells, batches=3), noisy_run(2, cells=one, batches=3)
    for runs, ids in (((a, b), "c3 / c0"), ((b, a), "c0 / c3")):
        report = build_report(runs)
        assert report.comparisons[0].pairs[0].title == f"eager attention, batch size 2 ({ids})"
        for form in (text(report), markdown_text(report)):
            assert report.comparisons[0].pairs[0].title in form
    assert build_report([a, a]).comparisons[0].pairs[1].title == "eager attention, batch size 1 (c1)"
    assert build_report([b, b]).comparisons[0].pairs[0].title == "cell c0"


@pytest.mark.parametrize(
    ("shape", "machine", "workload", "says"),
    [
        ({}, {}, {}, None),
        ({"model": "4b"}, {}, {}, "Different model: these numbers compare different jobs."),
        ({}, {"gpus": [{"name": "NVIDIA H200"}]}, {}, "Different machine: this alone may explain all changes."),
        ({}, {"commit": "abc"}, {"workload_sha256": None}, None),
        ({}, {}, {"workload_sha256": "b"}, "Different workload: these numbers compare different jobs."),
        (
            {"random_weights": True, "model_shape": "4b"},
            {"cpu": "other"},
            {"workload_sha256": "b"},
            "Different model, machine and workload: these numbers compare different jobs.",
        ),
    ],
)
def test_other_jobs_are_said_first(
    shape: dict[str, Any], machine: dict[str, Any], workload: dict[str, Any], says: str | None
) -> None:
    a, b = noisy_run(1, cells=({},), batches=3), noisy_run(2, cells=(shape,), batches=3)
    a.header.settings, b.header.settings = (RunSettings(**{"workload_sha256": "a"} | more) for more in ({}, workload))
    b.header.environment = machine
    report = build_report([a, b])
    assert as_json(report)["comparisons"][0]["warning"] == says
    assert (text(report).splitlines()[2] or None) == says
    assert ("- " + str(says) in markdown_text(report).splitlines()[4]) == (says is not None)
    more = build_report([a, a, b]).head()
    assert more[3:] == ([f"A and C: {says}"] if says else [])


def test_cells_without_a_partner_are_items_below_their_heading() -> None:
    a, b = (noisy_run(1, batches=1, cells=tuple({"batch_size": size} for size in sizes)) for sizes in ((1, 2, 4), (1,)))
    report = build_report([a, b])
    lines = ["2 cells of A without a partner in B (not in it):", "- batch size 2 (c1)", "- batch size 4 (c2)"]
    assert "\n".join(lines) in text(report)
    assert "\n".join(["- " + lines[0], *(f"  {line}" for line in lines[1:])]) in markdown_text(report)
    assert as_json(report)["comparisons"][0]["without_partner"] == lines
