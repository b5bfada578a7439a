import random
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.test_comparison import text
from tests.records.load_runs import START, level, level_records, load_header, load_request
from tests.records.synthetic import batches_of, header, write_run

from panscan.analysis.comparison import as_json, build_report
from panscan.core import RecordsError, SettingError
from panscan.records.store import Run
from panscan.report.comparison import markdown_text


def queued(directory: Path, seed: int, *, service: float = 0.1, rates: tuple[float, ...] = (6.0,), **load: Any) -> Run:
    """Write a run against one server that answers in turn: neighbours in the queue share their latency.

    Arrivals are the same for every seed, service times are not.
    """
    arrivals, draws = random.Random(0), random.Random(seed)
    records = [load_header({f"rate-{rate:g}": level(rate) for rate in rates}, **load)]
    for rate in rates:
        at, free, lines = START, START, []
        for number in range(120):
            at += arrivals.expovariate(rate)
            begins = max(at, free)
            free = begins + service * draws.uniform(0.5, 1.5)
            lines.append(load_request(f"rate-{rate:g}", number, at, free - at, 0.005))
        records += level_records(f"rate-{rate:g}", lines)
    return write_run(directory, records)


def test_queues_that_differ_by_chance_raise_few_false_alarms(tmp_path: Path) -> None:
    """A server that is busy 95% of the time. Tests of single requests, which share its queue, alarm in 9 of these 12
    comparisons of equal servers."""
    runs = [queued(tmp_path / str(seed), seed, rates=(9.5,)) for seed in range(24)]
    alarms = 0
    for a, b in zip(runs[::2], runs[1::2], strict=True):
        [row] = build_report([a, b]).differences[0]
        alarms += any(each.word in ("faster", "slower", "better", "worse") for each in row.values())
    assert alarms <= 3


def test_a_slower_server_is_found_level_by_level(tmp_path: Path) -> None:
    rates = (4.0, 8.0)
    runs = [queued(tmp_path / "a", 1, rates=rates), queued(tmp_path / "b", 2, service=0.115, rates=rates)]
    report = build_report(runs, ["median_ttft>5%"])
    assert [row["median_ttft_ms"].word for row in report.differences[0]] == ["slower", "slower"]
    assert [row["attainment"].word for row in report.differences[0]][1] in ("worse", "within noise")
    assert {finding.holds for finding in report.findings} == {True}
    shown = text(report, 100)
    assert "level 4 req/s: 120 paired requests in 20 batches" in shown
    assert "panscan verify" in shown
    assert not {"cell", "unverified", "verdict"} & set(shown.replace(":", " ").split())
    assert "level 8 req/s" in markdown_text(report)
    assert as_json(report)["comparisons"][0]["cells"][0]["verdicts"] is None


def test_runs_of_other_traffic_are_told(tmp_path: Path) -> None:
    runs = [queued(tmp_path / "a", 1), queued(tmp_path / "b", 2, image_reuse=0.5, endpoint="http://other/v1")]
    shown = text(build_report(runs), 100)
    assert "Different workload: these numbers compare different jobs" in shown
    assert "image_reuse 0 / 0.5" in shown
    assert "http://other/v1" in shown


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    load = queued(tmp_path / "a", 1)
    sweep = write_run(tmp_path / "sweep", [header({"c": {}}), *batches_of("c", [1.0, 2.0])])
    for runs in ([load, sweep], [sweep, load]):
        with pytest.raises(RecordsError, match=r"a is a load run of an endpoint and .*sweep is a sweep"):
            build_report(runs)
    with pytest.raises(RecordsError, match="no level pairs: request_rate is 6 in A and 3 in B"):
        build_report([load, queued(tmp_path / "b", 1, rates=(3.0,))])
    with pytest.raises(SettingError, match="load runs have no verdicts"):
        build_report([load, load], ["verdict"])
