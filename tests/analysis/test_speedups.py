"""The engine against other runners: whose cells are compared, and what is said."""

from dataclasses import asdict
from typing import Any

from tests.records.synthetic import repeat, request, run_of

from panscan.analysis.cells import distinguishing_names, effective_settings, measured_rows, speedup_lines
from panscan.bench.grid import build_cells


def lines(cells: dict[str, tuple[dict[str, Any], float]]) -> list[str]:
    """Lines of a run in which each cell answered one request of five tokens in its seconds."""
    records: list[dict[str, Any]] = []
    for name, (_, seconds) in cells.items():
        stamps = [seconds * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
        records += [request(name, "q", 0.0, stamps), repeat(name, 0, 0.0, seconds)]
    return speedup_lines(measured_rows(run_of(*records, cells={name: each for name, (each, _) in cells.items()})))


def test_the_fastest_cells_of_the_same_work_are_compared() -> None:
    work = {"do_pan_and_scan": True, "max_new_tokens": 5}
    found = lines(
        {
            "a": ({**work, "runner": "generate", "batch_size": 1}, 8.0),
            "b": ({**work, "runner": "generate", "batch_size": 4}, 4.0),
            "c": ({**work, "runner": "engine", "batch_size": 1, "max_num_seqs": 8}, 2.0),
            "d": ({**work, "runner": "engine", "batch_size": 1, "max_num_seqs": 2}, 3.0),
            "e": ({**work, "runner": "generate", "batch_size": 1, "max_new_tokens": 50}, 0.1),
        }
    )
    assert found == [
        "engine to generate (batch size 4): 2.00x requests per second; verdicts unverified and unverified;"
        " measured once, so noise is unknown (--repeats 5)."
    ]


def test_a_ratio_has_an_interval_over_the_repeats_of_both() -> None:
    records = [
        record | {"repeat": number}
        for number, noise in enumerate((0.98, 1.0, 1.02))
        for name, seconds in (("a", 8.0), ("b", 4.0))
        for record in (
            request(name, "q", 0.0, [seconds * noise / 2, seconds * noise]),
            repeat(name, number, 0.0, seconds * (noise if name == "a" else 2 - noise)),
        )
    ]
    cells = {"a": {"runner": "generate"}, "b": {"runner": "engine"}}
    [line] = speedup_lines(measured_rows(run_of(*records, cells=cells)))
    assert line.startswith("engine to generate: 2.00x (1.81 to 2.21) requests per second")


def test_one_runner_alone_says_nothing() -> None:
    assert lines({"a": ({"runner": "engine"}, 1.0), "b": ({"runner": "engine", "max_num_seqs": 2}, 2.0)}) == []
    assert lines({"a": ({"runner": "generate"}, 1.0), "b": ({"runner": "pipeline"}, 2.0)}) == []


def test_what_only_one_runner_has_is_a_column_only_where_it_differs_there() -> None:
    def swept(**flags: list[str]) -> list[str]:
        cells = build_cells({"runner": ["generate", "engine"], **flags})
        return distinguishing_names([effective_settings(asdict(cell.settings)) for cell in cells])

    assert swept() == ["runner"]
    assert swept(batch_size=["1", "2"]) == ["runner", "batch_size"]
    assert swept(kv_cache_gb=["none", "1"], batch_size=["4"]) == ["runner", "kv_cache_gb"]
    assert swept(max_num_seqs=["8"]) == ["runner"]
    [engine] = build_cells({"runner": ["engine"]})
    assert effective_settings(asdict(engine.settings))["batch_size"] is None
    assert effective_settings(asdict(engine.settings))["attention"] == "sdpa"
