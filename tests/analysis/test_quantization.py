"""Quantised cells: the unquantised cells that they are compared with, and the table in every report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.analysis.test_accuracy import BASE, cell_records
from tests.records import synthetic

from panscan.analysis.accuracy import tradeoffs_of
from panscan.analysis.cells import measured_rows
from panscan.analysis.recommend import recommend
from panscan.records.store import Run
from panscan.report import to_markdown
from panscan.report.sweep import SweepReport

INT4 = "int4, groups of 64"
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "plain": ({}, {"weight_bytes": 4 * 2**30}, "exact", 2),
    "other": ({"batch_size": 4}, {"weight_bytes": 4 * 2**30}, "exact", 0),
    "int8": ({"quantization": "int8"}, {"weights": "int8", "weight_bytes": 2**31}, "different", 2),
    "stored": (
        {"model": "out/", "revision": "r"},
        {"weights": INT4, "base_model": "mini", "weight_bytes": 2**30},
        "different",
        12,
    ),
    "cache": ({"quantization": "int8", "kv_cache_dtype": "int8"}, {"weights": "int8"}, "different", 2),
    "alone": ({"quantization": "int8", "max_new_tokens": 64}, {"weights": "int8"}, "different", 2),
}
"""By id: settings, fields of the load, verdict, and questions answered wrongly."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    header = synthetic.header({cell: {**BASE, **settings} for cell, (settings, *_) in CELLS.items()})
    records = [header, synthetic.truth()]
    for cell, (_, load, word, wrong) in CELLS.items():
        records += [synthetic.load([cell], None, **load), *cell_records(cell, word, wrong)]
    return synthetic.write_run(tmp_path, records)


def test_each_quantised_cell_is_compared_with_the_unquantised_one_of_the_same_settings(run: Run) -> None:
    prices = tradeoffs_of(run, measured_rows(run))
    assert [price.row.cell for price in prices] == ["plain", "int8", "stored", "cache", "alone"]
    plain, int8, stored, cache, alone = prices
    assert [price.base for price in prices] == [None, plain, plain, plain, None]
    assert (int8.weights, cache.weights) == ("int8", "int8, int8 KV cache")
    assert (int8.relative_size, stored.relative_size, alone.relative_size) == (0.5, 0.25, None)
    assert int8.relative_speed is not None and int8.relative_speed.value == pytest.approx(1)
    assert int8.kl == pytest.approx((0.09, 0.09))


def test_another_spelling_of_the_same_directory_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundled name is never a directory, even where one has the same name."""
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "mini"):
        (tmp_path / name).mkdir()
    cells = {
        "relative": ({"model": "./plain"}, {}),
        "bundled": ({"model": "mini"}, {}),
        "stored": ({"model": "out"}, {"weights": INT4, "base_model": str(tmp_path / "plain")}),
        "other": ({"model": "out2"}, {"weights": INT4, "base_model": "./mini"}),
    }
    records = [synthetic.header({cell: BASE | settings for cell, (settings, _) in cells.items()}), synthetic.truth()]
    for cell, (_, load) in cells.items():
        word = "different" if load else "exact"
        records += [synthetic.load([cell], None, **load), *cell_records(cell, word, 2)]
    run = synthetic.write_run(tmp_path / "run", records)
    bases = {each.row.cell: each.base and each.base.row.cell for each in tradeoffs_of(run, measured_rows(run))}
    assert (bases["stored"], bases["other"]) == ("relative", None)


def test_a_run_without_quantised_cells_has_no_trade_offs() -> None:
    run = synthetic.run_of()
    assert SweepReport(run).tradeoffs is None
    assert "Quantisation trade-offs" not in to_markdown(run)


def test_different_cells_are_recommended_only_without_a_loss(run: Run) -> None:
    """40 questions with equal answers do not exclude a loss of more than the limit; ten wrong ones are a loss."""
    rejected = recommend(run).rejected
    assert "the same score on all 40 questions; about" in rejected["int8"] and "loss: -25.0" in rejected["stored"]
    assert recommend(run, allow=["stored"]).rejected.keys() == rejected.keys() - {"stored"}
