from pathlib import Path
from typing import Any

import pytest
from tests.records.load_runs import (
    CLIENT,
    START,
    failed_request,
    level,
    level_records,
    load_header,
    load_request,
    load_run,
    saturated,
    steady,
)
from tests.records.synthetic import outcome, write_run

from panscan.analysis.levels import error_groups, levels_of, load_result, load_warnings, unfinished_levels
from panscan.analysis.recommend import recommend
from panscan.bench.run import plan_to_resume
from panscan.core import RecordsError
from panscan.records.store import Run


def result_of(run: Run) -> tuple[str, str]:
    found = load_result(run, levels_of(run))
    return found.headline, ". ".join(found.notes)


def limited(lines: list[dict[str, Any]], reason: str = "p99 lag of 90 ms") -> list[dict[str, Any]]:
    """Return the records of a level with a load generator that was too slow."""
    client = CLIENT | {"limited": True, "reason": reason}
    return [line | {"load": {"client": client}} if line["type"] == "repeat" else line for line in lines]


def test_the_highest_rate_that_meets_the_goodput_is_the_result(tmp_path: Path) -> None:
    headline, notes = result_of(write_run(tmp_path, load_run(attainment=0.8)))
    assert headline == "8 req/s meets TTFT ≤ 100 ms and TPOT ≤ 20 ms for 80% of requests"
    assert "20 of 20 requests (100%, 95% interval 83.9% to 100%)" in notes


def test_a_level_passes_by_the_lower_end_of_its_interval(tmp_path: Path) -> None:
    headline, notes = result_of(write_run(tmp_path, load_run()))
    assert headline == "8 req/s may meet TTFT ≤ 100 ms and TPOT ≤ 20 ms for 95% of requests; 20 do not prove it"
    assert "About 73 requests per level would prove it if the share stays (--num-prompts)" in notes
    assert "16 req/s does not: 5%" in notes


def test_levels_that_contradict_the_result_are_named(tmp_path: Path) -> None:
    cells = {f"rate-{rate}": level(float(rate)) for rate in (4, 8, 16)}
    lines = [*steady("rate-4", 4.0, 0.05), *steady("rate-8", 8.0, 0.2), *steady("rate-16", 16.0, 0.05)]
    headline, notes = result_of(write_run(tmp_path, [load_header(cells), *lines]))
    assert headline.startswith("4 req/s")
    assert "8 req/s does not: 0%. Levels at 16 req/s contradict this" in notes


def test_without_limits_the_result_is_the_fastest_level_that_is_kept_up_with(tmp_path: Path) -> None:
    headline, notes = result_of(write_run(tmp_path, load_run(goodput={})))
    assert headline.startswith("8 req/s is the fastest level that the endpoint keeps up with: 8.00 req/s answered")
    assert "median TTFT 80.0 ms, p95 E2E 120 ms" in headline
    assert "faster than they are answered at 16 req/s" in notes


def test_an_overloaded_run_is_no_success_and_proposes_rates(tmp_path: Path) -> None:
    """Rates above the capacity of 10 req/s: their throughput is the endpoint's, whatever was offered."""
    cells = {f"rate-{rate}": level(float(rate)) for rate in (16, 32)}
    lines = [line for cell, rate in zip(cells, (16, 32), strict=True) for line in saturated(cell, rate, 10.0, 0.08)]
    for limits in ({}, {"ttft": 100.0}):
        run = write_run(tmp_path / str(len(limits)), [load_header(cells, goodput=limits), *lines])
        found = load_result(run, levels_of(run))
        assert found.meets is False
        assert "measure lower rates (--request-rate 5,7.4,8.9)" in ". ".join(found.notes)
        assert limits or found.headline.startswith("The endpoint keeps up with no measured rate: it answers about 9.9")


def test_a_level_that_the_generator_limits_is_no_result(tmp_path: Path) -> None:
    header, *lines = load_run()
    cells = [line for line in lines if line["cell"] == "rate-8"]
    rest = [line for line in lines if line["cell"] != "rate-8"]
    run = write_run(tmp_path, [header, *rest, *limited(cells)])
    headline, notes = result_of(run)
    assert headline.startswith("4 req/s may meet")
    assert "16 req/s does not" in notes
    assert any(
        "8 req/s: the load generator" in line and "lag of 90 ms" in line for line in load_warnings(run, levels_of(run))
    )
    every = write_run(tmp_path / "all", [header, *limited(lines)])
    assert result_of(every)[0] == "No result: the load generator limited every level"
    [warning] = load_warnings(every, levels_of(every))
    assert warning.startswith("4 req/s, 8 req/s, 16 req/s: the load generator") and "these levels are" in warning


def test_too_few_requests_do_not_say_that_the_endpoint_keeps_up(tmp_path: Path) -> None:
    requests = [load_request("c", number, START + number, 0.05, 0.01) for number in range(3)]
    run = write_run(tmp_path, [load_header({"c": level(1.0)}, goodput={}), *level_records("c", requests)])
    assert load_result(run, levels_of(run)).meets is None
    assert "Too few requests to tell whether the endpoint keeps up" in result_of(run)[1]


def test_a_closed_loop_names_its_concurrency(tmp_path: Path) -> None:
    cells = {"concurrency-4": level(None, 4), "concurrency-2": level(None, 2)}
    lines = [*steady("concurrency-4", 8.0, 0.09), *steady("concurrency-2", 5.0, 0.05)]
    run = write_run(tmp_path, [load_header(cells, arrival="closed"), *lines])
    assert [each.name for each in levels_of(run)] == ["concurrency 2", "concurrency 4"]
    assert result_of(run)[0].startswith("7.99 req/s (concurrency 4) may meet")


def test_no_level_meets_the_goodput(tmp_path: Path) -> None:
    headline, notes = result_of(write_run(tmp_path, load_run(goodput={"ttft": 10.0})))
    assert headline == "No measured level meets TTFT ≤ 10 ms for 95% of requests"
    assert "Closest: 4 req/s, 0 of 20 requests" in notes


def test_errors_are_grouped_by_kind_and_count_as_missed(tmp_path: Path) -> None:
    lines = [load_request("c", n, START + n, 0.05, 0.01) for n in range(7)]
    lines += [failed_request("c", n, START + n, error=f"HTTP 500, try {n}") for n in (7, 8)]
    lines.append(failed_request("c", 9, START + 9, "timeout", "no answer in 5 s"))
    run = write_run(tmp_path, [load_header({"c": level(1.0)}), *level_records("c", lines)])
    levels = levels_of(run)
    groups = [(each.kind, each.requests, each.levels, each.example) for each in error_groups(run, levels)]
    assert groups == [("http", 2, ("1 req/s",), "HTTP 500, try 7"), ("timeout", 1, ("1 req/s",), "no answer in 5 s")]
    assert (levels[0].failed, levels[0].goodput.attainment) == (3, 0.7)


def test_a_run_in_which_every_request_failed_has_no_result(tmp_path: Path) -> None:
    lines = [failed_request("c", n, START + n, "connect", "refused") for n in range(3)]
    run = write_run(tmp_path, [load_header({"c": level(1.0)}), *level_records("c", lines)])
    assert result_of(run)[0] == "No result: every request failed"
    empty = write_run(tmp_path / "empty", [load_header({"c": level(1.0)}), outcome("c", "failed", "endpoint is down")])
    assert result_of(empty)[0] == "No result: no level was measured"
    assert unfinished_levels(empty) == [("1 req/s", "failed", "endpoint is down")]


@pytest.mark.parametrize(
    ("chunks", "words"), [(1, "do not stream"), (3, "4.00 tokens on average"), (12, None)], ids=["one", "few", "each"]
)
def test_chunks_that_hold_several_tokens_are_warned_of(tmp_path: Path, chunks: int, words: str | None) -> None:
    lines = steady("c", 4.0, 0.05, chunks=chunks, output_tokens=12)
    run = write_run(tmp_path, [load_header({"c": level(4.0)}), *lines])
    found = " ".join(load_warnings(run, levels_of(run))).replace("does not stream", "do not stream")
    assert words in found if words else not found


def test_what_only_a_sweep_has_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, load_run())
    with pytest.raises(RecordsError, match="a load run measures an endpoint, it has no recommendation"):
        recommend(run)
    with pytest.raises(RecordsError, match="a run of panscan load cannot be resumed; start a new one"):
        plan_to_resume(run, on_problem=lambda problem: None)
